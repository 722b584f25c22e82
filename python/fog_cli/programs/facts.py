"""Loads the libraries that fog needs, for `fog doctor`: in order of dependency, as each of them may crash or hang."""

from __future__ import annotations

import os
import sys

from fog_cli.programs.report import step, tell


def _torch() -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise ImportError(f"torch {torch.__version__} has no torch.distributed")
    return str(torch.__version__)


def _cuda() -> str:
    import torch

    if torch.version.cuda is None:
        return "this torch is without CUDA"
    if not torch.cuda.is_available():
        return f"torch has CUDA {torch.version.cuda}; there is no GPU, or no driver"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}, {len(names)} GPU(s): {', '.join(names)}"


def _nccl() -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "this torch is without NCCL; CUDA tensors cannot be sent"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _fog() -> str:
    from fog_pg import _build_info

    native = ", native MPI" if _build_info.NATIVE_MPI else ""
    return f"{_build_info.VERSION}, built for torch {', '.join(_build_info.TORCH_VERSIONS)}{native}"


def _environment() -> str:
    from fog_pg import environment

    environment.check()
    known = {variable.name for variable in environment.VARIABLES}
    own = sorted(name for name in os.environ if name.startswith("FOG_"))
    if unknown := [name for name in own if name not in known]:
        tell(name="unknown variables", text=", ".join(unknown))
    return (
        ", ".join(f"{name}={os.environ[name]}" for name in own if name in known)
        or "no variable of fog's is set"
    )


def _extension() -> str:
    from fog_pg import _extension

    return str(_extension.load().__file__)


def _mpi_library() -> str:
    from fog_pg import _C, _extension

    return "that of the build" if _C.native_mpi else _extension.find_mpi_library()


def _mpi() -> str:
    from fog_pg import _C

    _C.load_mpi()
    return str(_C.mpi_version()).replace("\t", " ").splitlines()[0].strip()


def main() -> None:
    """Loads each library and reports the result."""
    step("Python", lambda: f"{sys.version.split()[0]}, {sys.executable}")
    if step("torch", _torch):
        step("CUDA", _cuda)
        step("NCCL", _nccl)
        if step("environment", _environment) and step("fog", _fog) and step("extension", _extension):
            step("MPI library", _mpi_library)
            step("MPI", _mpi)


if __name__ == "__main__":
    main()
