"""Caches of compiled kernels, of all libraries in one folder, so that one volume keeps them when a pod is replaced.

A first step compiles for minutes; with these caches the next process that computes the same shapes on such a GPU does
not. A model's context is part of vLLM's key, and in jobs it is the longest prompt and answer of their rows.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

# The variable of each library, and its folder.
CACHES: Mapping[str, str] = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",  # torch.compile and FlexAttention
    "VLLM_CACHE_ROOT": "vllm",  # its torch.compile, and what it has found out about models
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",  # of the driver, which compiles PTX
}


def place(folder: Path | None, environ: MutableMapping[str, str]) -> None:
    """Have this process and those that it starts use the folder. A library's own variable, if set, is kept.

    The libraries create their folders, so these belong to the user who compiles.
    """
    if folder is not None:
        for variable, name in CACHES.items():
            environ.setdefault(variable, str(folder.absolute() / name))
