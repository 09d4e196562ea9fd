"""`python -m worker.engine FILE`: an engine for its parent process, which launch.py starts."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from worker import process
from worker.engine.launch import EngineStart
from worker.engine.names import NOTHING
from worker.engine.server import arguments, serve

KEEP_ALIVE_SECONDS = 75  # longer than the client keeps a connection


class AdaptersInFolder:
    """Implements vLLM's LoRAResolver: an adapter has the name of its folder."""

    def __init__(self, folder: Path, nothing: Path | None) -> None:
        """`nothing`: a folder with an adapter that adds 0."""
        self.folder, self.nothing = folder, nothing

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        folder = self.nothing if lora_name == NOTHING else self._folder_of(lora_name)
        if folder is None or not folder.is_dir():
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name, 1, str(folder))  # vLLM replaces the number

    def _folder_of(self, name: str) -> Path | None:
        """The folder of this name, or None for what names another place, or one that is not complete yet."""
        is_entry = bool(name) and Path(name).name == name and not name.startswith(".")
        return self.folder / name if is_entry else None


def main(file: Path) -> int:
    """Serve until a signal. Returns 1 if the engine has died."""
    start = EngineStart(**json.loads(file.read_text()))
    process.die_with_parent(start.parent)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(start.socket)
    adapters = AdaptersInFolder(Path(start.adapters), None if start.nothing is None else Path(start.nothing))
    args = arguments(start.options, name=start.name, keys=[os.environ["VLLM_API_KEY"]], adapters=adapters)
    return int(not serve(listening, args, {"timeout_keep_alive": KEEP_ALIVE_SECONDS}))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
