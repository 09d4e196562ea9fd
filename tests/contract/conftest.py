from pathlib import Path

import pytest

from tests.tiny import make_byte_model, make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's attention on a CPU starts at heads of 32.
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=32)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))
