"""An MCP server for a job with tools: it looks into drawers. Needs `pip install "mcp>=2.3,<3"`.

    python examples/mcp_tools.py --port 9100

Rows need no `tools`:
{"messages": [{"role": "user", "content": "What is in drawer 3?"}], "digit": "1"}. The operator
allows the host in REGRAFT_GRADERS_FILE:

    [endpoints]
    hosts = ["127.0.0.1"]

and the job has the server, whose functions every row gets:

    "tools": [{"type": "mcp", "server_label": "drawers", "server_url": "http://127.0.0.1:9100/mcp"}]
"""

import argparse

from mcp.server.mcpserver import MCPServer

server = MCPServer("drawers")


@server.tool()
def lookup(drawer: int) -> str:
    """The digit in a drawer."""
    return f"the digit is {7 * drawer % 10}"


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--port", type=int, default=9100)
    server.run("streamable-http", port=arguments.parse_args().port)
