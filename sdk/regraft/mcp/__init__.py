"""`regraft mcp`: tools for coding agents over the Model Context Protocol (docs/howto/coding-agents.md)."""
