"""Where the CUDA driver and its run-time compiler are, which fog's own kernels need."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DRIVER = "libcuda.so.1"


def compilers(cuda: str) -> list[str]:
    """Returns names and paths of NVRTC to try in this order: what torch has loaded comes first.

    Args:
        cuda: Version of CUDA that torch is built for, such as "13.0"; its major version is NVRTC's.
    """
    major = cuda.split(".")[0]
    name = f"libnvrtc.so.{major}"
    found = [name]
    packages = importlib.util.find_spec("nvidia")
    # NVIDIA's wheels of CUDA 13 share a folder; those of CUDA 12 have one each.
    for folder in (packages.submodule_search_locations or []) if packages else []:
        for place in (f"cu{major}/lib", "cuda_nvrtc/lib"):
            file = Path(folder) / place / name
            if file.is_file():
                found.append(str(file))
    return found
