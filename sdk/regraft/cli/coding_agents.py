"""The commands for coding agents: a server of tools, and a skill."""

import argparse
from pathlib import Path

from regraft import skill
from regraft.cli.output import answer
from regraft.cli.shared import DONE, Refused
from regraft.mcp.workspace import Root


def mcp(arguments: argparse.Namespace) -> int:
    """Serve until the agent closes stdin, or until Ctrl-C."""
    try:
        from regraft.mcp import server
    except ModuleNotFoundError as missing:
        raise Refused(f"`regraft mcp` needs {missing.name}: pip install 'regraft[mcp]'") from missing
    if arguments.http is None:
        server.serve_stdio(_root(arguments.root or Path()), writes=arguments.write)
        return DONE
    if arguments.root is None:
        raise Refused(
            "--http needs --root DIR: each caller with a key of the service may use files below it."
        )
    try:
        host, port = server.address_of(arguments.http)
    except ValueError as wrong:
        raise Refused(f"--http: {wrong}") from wrong
    server.serve_http(host, port, _root(arguments.root), writes=arguments.write)
    return DONE


def skill_install(arguments: argparse.Namespace) -> int:
    path = skill.install(arguments.dir or Path(".agents/skills"))
    return answer(arguments, {"path": str(path)}, lambda: f"Wrote {path}")


def _root(folder: Path) -> Root:
    if not folder.is_dir():
        raise Refused(f"--root: {folder} is not a folder")
    target = folder.resolve()
    if not folder.is_absolute() and target in (Path(target.anchor), Path.home().resolve()):
        raise Refused(f"--root would be {target}: name the folder, as in --root /path/of/project")
    return Root(target)
