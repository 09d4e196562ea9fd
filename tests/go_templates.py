"""Go's text/template, in which Ollama's templates are written. Helm has it, and its Python package executes it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml


def executed(template: str, messages: Sequence[dict[str, Any]], folder: Path) -> str:
    """The text that a template makes of messages, which it finds as Ollama names them.

    Args:
        folder: an empty one.
    """
    helm = pytest.importorskip(
        "helm_python", reason="helm-python-sdk brings Go's templates; it has no wheel for this platform"
    )
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: chat\nversion: 1.0.0\n")
    (folder / "templates/chat.yaml").write_text(
        f'{{{{ define "chat" }}}}{template}{{{{ end }}}}text: {{{{ include "chat" .Values | toJson }}}}\n'
    )
    values = {"Messages": [{"Role": one["role"], "Content": one["content"]} for one in messages]}
    rendered = helm.Chart.load(folder).render(values, name="chat", namespace="chat")
    text: str = yaml.safe_load(rendered["chat/templates/chat.yaml"])["text"]
    return text
