"""Read the chat template of a base model from its files, and ask what it does with thoughts and tools."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from core import chat_templates, template_process
from core.errors import NotReady
from core.fingerprint import conversion_of
from core.model_checks import ModelChecks
from core.outages import outage
from core.registry import BaseModelEntry
from core.template_process import CPU_SECONDS, MEMORY_BYTES
from core.template_tools import NEEDED, TOOLS
from core.tool_parsers import PARSED, template_for_tools, tool_parser_of

log = logging.getLogger(__name__)

CHAT_TEMPLATE = "chat_template.jinja"  # as transformers saves it with a tokenizer
# For renderings whose special tokens do not matter: a template may fail without a token that it adds to a text.
_SOME_TOKENS = tuple((f"{name}_token", f"<{name}>") for name in ("bos", "eos", "pad", "unk"))


def is_reasoning(entry: BaseModelEntry, model_cache: Path, chat_template: str = "auto") -> bool:
    """Whether a job on the model gives thoughts room: by its files, or else by what a worker has found.

    Args:
        chat_template: that of the job.
    """
    known = reasons(entry, model_cache, chat_template)
    if known is None:
        check = ModelChecks(model_cache).latest(entry)
        known = None if check is None else check.reasons
    return bool(known)


@dataclass(frozen=True)
class TemplateFiles:
    """The chat template of a model, and the folder with its tokenizer."""

    template: str
    special_tokens: Mapping[str, str]
    folder: Path
    tool_use: str | None = None  # the template of prompts with tools, where it is another

    @property
    def template_for_tools(self) -> str:
        return self.template if self.tool_use is None else self.tool_use


def files_of(entry: BaseModelEntry, model_cache: Path, chat_template: str = "auto") -> TemplateFiles | None:
    """Return the template with which jobs on the model render prompts. None: it is not on this machine, or has none."""
    text = entry.template_text if chat_template == "auto" else chat_templates.text_of(chat_template)
    folder = folder_of(entry, model_cache)
    if folder is None:
        return None
    own, for_tools, special_tokens = _read(folder)
    if text is not None:
        own, for_tools = text, None
    return None if own is None else TemplateFiles(own, special_tokens, folder, for_tools)


def reasons(entry: BaseModelEntry, model_cache: Path, chat_template: str = "auto") -> bool | None:
    """Whether prompts for the model let it write a thought; None if its template is not on this machine."""
    text = entry.template_text if chat_template == "auto" else chat_templates.text_of(chat_template)
    folder = folder_of(entry, model_cache)
    if folder is None:
        return None if text is None else _reasons(text, ())
    own, _, special_tokens = _read(folder)
    text = own if text is None else text
    return text is not None and _reasons(text, tuple(sorted(special_tokens.items())))


def tools_problem(
    model: str, registered: str | None, template: object, *, parsers: Sequence[str] | None = PARSED
) -> str | None:
    """The reason why prompts for the model cannot have tools, with the remedy; None: they can.

    Args:
        registered: `tool_parser` of the model's registry entry.
        template: the chat template that renders the prompts, or several by name; None: there is none.
        parsers: of which one is needed; None: the model's server may have others.

    Raises:
        NotReady: the check of the template was interrupted.
    """
    template = template_for_tools(template)
    lost = _lost_of_tools(template) if isinstance(template, str) and "tools" in template else (TOOLS,)
    if TOOLS in lost:
        return (
            f"the chat template of {model} has no place for tools: choose a model whose template has one, or set "
            "chat_template (and tool_parser, where the template does not show it) in its entry of the model registry."
        )
    parser = tool_parser_of(registered, template)
    if parser is None:
        return (
            f"this server does not know how {model} writes calls: set tool_parser in its entry of the model registry "
            f"to one of {', '.join(PARSED)}, or chat_template to a template that shows it."
        )
    if parsers is not None and parser not in parsers:
        return (
            f"calls of {model} are written for the tool_parser '{parser}', and this service reads only those of "
            f"{', '.join(PARSED)}: choose another model, or another chat_template and tool_parser in its entry of the "
            "model registry."
        )
    if unseen := " and ".join(part for part in lost if part in NEEDED):
        return (
            f"the chat template of {model} leaves {unseen} of functions out of prompts, so the model would not see "
            "them: choose another model, or set chat_template in its entry of the model registry to a template that "
            "writes them."
        )
    return None


def folder_of(entry: BaseModelEntry, model_cache: Path) -> Path | None:
    """The folder with the model's tokenizer, if it is on this machine."""
    try:
        source = entry.locate()
    except FileNotFoundError:
        return None
    if isinstance(source, str):
        source = _snapshot(source)
    elif source.suffix == ".gguf":
        source = conversion_of(source, model_cache)
    return source if source.is_dir() else None


def _snapshot(hub: str) -> Path:
    """Where huggingface_hub stores the newest revision that it has downloaded."""
    # Not Path.home(), which raises for a user without a home folder and without an entry in /etc/passwd.
    cache = Path(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")))  # noqa: PTH111
    home = Path(os.environ.get("HF_HOME", cache / "huggingface"))
    model = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{hub.replace('/', '--')}"
    revision = _text(model / "refs" / "main")
    return model / "absent" if revision is None else model / "snapshots" / revision.strip()


def _text(file: Path) -> str | None:
    """None: there is no such file, or it is no text. Raises OSError: this machine cannot read it for the moment."""
    try:
        return file.read_text()
    except (OSError, ValueError) as cause:
        if outage(cause) is not None:
            raise
        return None


def _read(folder: Path) -> tuple[str | None, str | None, dict[str, str]]:
    """The chat template, that of prompts with tools if it is another, and the special tokens by their names."""
    try:
        config: Any = json.loads(_text(folder / "tokenizer_config.json") or "{}")
    except ValueError:
        config = {}
    if not isinstance(config, dict):
        config = {}
    text: Any = _text(folder / CHAT_TEMPLATE)
    for_tools: Any = _text(folder / "additional_chat_templates" / "tool_use.jinja")
    if text is None:
        text = config.get("chat_template")
    if isinstance(text, Sequence) and not isinstance(text, str):  # several by name
        named = {one.get("name"): one.get("template") for one in text if isinstance(one, Mapping)}
        text, for_tools = named.get("default"), named.get("tool_use")
    tokens = {name: _token(value) for name, value in config.items() if name.endswith("_token")}
    texts = [one if isinstance(one, str) else None for one in (text, for_tools)]
    return texts[0], texts[1], {name: one for name, one in tokens.items() if one}


def _token(value: Any) -> str:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else ""


@lru_cache(maxsize=64)
def _reasons(template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    return bool(_answer("reasons", template, special_tokens, "its model counts as one without thoughts"))


@lru_cache(maxsize=64)
def _lost_of_tools(template: str) -> tuple[str, ...]:
    """What prompts with tools lack, whatever the tokenizer is."""
    return tuple(_answer("lost_of_tools", template, _SOME_TOKENS, "tools count as rendered") or ())


def _answer(question: str, template: str, special_tokens: Sequence[tuple[str, str]], otherwise: str) -> Any:
    """Asks a process of limited CPU time and memory: a template is a program, and may never end.

    Not of limited wall time: the result is kept, and must not depend on what else the machine does. A template has no
    way to wait.

    Args:
        question: one of QUESTIONS of core/template_process.py.
        otherwise: what follows if the template needs more; the result is then None.

    Raises:
        NotReady: the process was killed from outside. Not kept.
    """
    child = subprocess.run(
        [sys.executable, "-m", template_process.__name__],
        input=json.dumps([question, template, special_tokens]),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    if child.returncode == 0:
        return json.loads(child.stdout)
    if -child.returncode not in (signal.SIGXCPU, signal.SIGSEGV):
        log.error("the check of a chat template ended with status %d: %s", child.returncode, child.stderr)
        raise NotReady(
            "The check of the model's chat template was interrupted before it had a result; retry.",
            retry_after=1,
        )
    log.warning(
        "a chat template needs more than %d s of CPU time or %d MiB, so %s",
        CPU_SECONDS,
        MEMORY_BYTES >> 20,
        otherwise,
    )
    return None
