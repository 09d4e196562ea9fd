"""The hardware file is checked at start and read again when it has changed."""

import re
import time
from pathlib import Path

import pytest

from core.hardware import GpuClass, Hardware, InvalidHardware, hardware_of
from core.settings import Settings
from tests.hardware import hardware_file
from worker.cli.configuration import read_settings
from worker.cli.parser import UsageError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("price = 1", "price: Extra inputs are not permitted"),
        ("price_per_gpu_second = 0", "price_per_gpu_second: Input should be greater than 0"),
        ('currency = "euros"', "currency: String should match pattern"),
        (
            "[gpu_classes.h100]\ngpu_memory_gib = -1",
            "gpu_classes.h100.gpu_memory_gib: Input should be greater",
        ),
        ('[gpu_classes.h100]\nkv_cache_gib = "much"', "gpu_classes.h100.kv_cache_gib."),
        ("[gpu_classes", "Expected"),
        (None, "hardware.toml does not exist; check the path"),
    ],
)
def test_a_file_that_cannot_be_meant_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    file = tmp_path / "hardware.toml"
    if text is not None:
        file.write_text(text)

    monkeypatch.setenv("REGRAFT_HARDWARE_FILE", str(file))
    with pytest.raises(InvalidHardware, match=said):
        Hardware.load(file)
    with pytest.raises(UsageError, match=f"^REGRAFT_HARDWARE_FILE: {re.escape(str(file))}"):
        read_settings()


def test_without_a_file_nothing_is_known() -> None:
    assert Settings().hardware == Hardware()
    assert hardware_of(None).of("h100") == GpuClass()


def test_the_file_holds_for_the_processes_of_a_service_and_their_copies(tmp_path: Path) -> None:
    file = hardware_file(
        tmp_path, {"h100": GpuClass(gpu_memory_gib=78)}, price_per_gpu_second=0.5, currency="EUR"
    )

    settings = Settings(hardware_file=file).model_copy(update={"ranks": 2})

    assert settings.hardware.price_per_gpu_second == 0.5
    assert settings.of_class("h100").hardware.of("h100").gpu_memory_gib == 78


def test_a_changed_file_holds_without_a_restart(tmp_path: Path) -> None:
    file = hardware_file(tmp_path, {"h100": GpuClass(ranks=1)}, price_per_gpu_second=0.5)
    settings = Settings(hardware_file=file)
    assert settings.hardware.price_per_gpu_second == 0.5

    hardware_file(tmp_path, {"h100": GpuClass(ranks=2)}, price_per_gpu_second=0.25).replace(file)
    deadline = time.monotonic() + 60
    while settings.hardware.price_per_gpu_second == 0.5 and time.monotonic() < deadline:
        time.sleep(0.05)

    assert settings.hardware.price_per_gpu_second == 0.25
    assert settings.of_class("h100").ranks == 2
