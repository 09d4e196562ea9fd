"""`python -m worker.doctor.torch_state`: print what torch says of this machine, as JSON. Imports nothing else."""

import json
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from worker.device import cuda_state


def state() -> dict[str, Any]:
    cuda = cuda_state()
    gpus = [gpu_of(number) for number in range(torch.cuda.device_count() if cuda.is_available else 0)]
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return {"cuda": asdict(cuda), "gpus": gpus, "has_headers": header.exists()}


def gpu_of(number: int) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(number)
    return {
        "name": torch.cuda.get_device_name(number),
        "capability": "{}{}".format(*torch.cuda.get_device_capability(number)),
        "free_bytes": free,
        "total_bytes": total,
    }


if __name__ == "__main__":
    print(json.dumps(state()))  # noqa: T201 - for worker/doctor/host.py
