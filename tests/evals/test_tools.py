"""Tools of eval runs are refused where chats with the model refuse them, and nowhere else."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api.http.deps import Service
from api.resources.eval_checks import refuse_tools
from core.chat import Adapter, Served
from core.errors import InvalidRequest
from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from core.storage.store import FolderBlobs

TOOLS = [{"type": "function", "function": {"name": "find"}}]
WITHOUT, WITH = "{{ messages }}", "{{ tools }}{{ messages }}<tool_call>"


@pytest.fixture
def service(tmp_path: Path) -> Callable[..., Service]:
    """An installation with a model, and the template of an adapter for it."""

    def service(template: str, adapter: str | None = None, **entry: Any) -> Service:
        (tmp_path / "chat_template.jinja").write_text(template)
        blobs = FolderBlobs(tmp_path / "blobs")
        if adapter is not None:
            blobs.put_bytes("adapter/chat_template.jinja", adapter.encode())
        registry = Registry(models={"tiny": BaseModelEntry(path=tmp_path, **entry)})
        settings = Settings(data_dir=tmp_path)
        return cast(Service, SimpleNamespace(registry=registry, settings=settings, blobs=blobs))

    return service


BASE = Served(base_model="tiny")
TUNED = Served(base_model="tiny", adapter=Adapter(prefix="adapter", manifest_sha256="0" * 64))


def test_a_parser_that_only_vllm_has_is_refused_where_transformers_serves(
    service: Callable[..., Service],
) -> None:
    refuse_tools(TOOLS, BASE, service(WITH, tool_parser="pythonic"))
    refuse_tools(TOOLS, BASE, service(WITH, tool_parser="pythonic", sampler="vllm"))

    with pytest.raises(InvalidRequest, match="pythonic"):
        refuse_tools(TOOLS, BASE, service(WITH, tool_parser="pythonic", sampler="transformers"))


def test_a_tuned_model_has_the_template_of_its_training(service: Callable[..., Service]) -> None:
    refuse_tools(TOOLS, TUNED, service(WITHOUT, WITH))
    refuse_tools(TOOLS, TUNED, service(WITH))

    with pytest.raises(InvalidRequest, match="no place for tools"):
        refuse_tools(TOOLS, TUNED, service(WITH, WITHOUT))
