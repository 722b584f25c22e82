"""The flag --device: on the CPU, or on the GPU that this rank's number on its machine chooses."""

from __future__ import annotations

import argparse
import ctypes
import os

import torch

# The first NCCL that lets several ranks share a GPU, if this is set to 1.
SHARING_VERSION = (2, 30, 3)
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
# By which a launcher tells a process its place on its machine, and how many there are.
_LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --device."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: each rank's model and data are on a GPU, LOCAL_RANK says which (default: %(default)s)",
    )


def parse(parser: argparse.ArgumentParser, *counts: str) -> argparse.Namespace:
    """Returns the flags and --device; ends the program if there is no such device, or a count is below 1.

    Args:
        parser: Of the other flags.
        counts: The names of those that must be at least 1.
    """
    add_flag(parser)
    args = parser.parse_args()
    if reason := problem(args.device):
        parser.error(reason)
    for name in counts:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


def problem(device: str) -> str | None:
    """Returns why ranks cannot be on a type of device, in a line; None if they can. No other rank is asked.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cpu":
        return None
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"--device cuda needs a torch for CUDA, this is torch {torch.__version__}"
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return f"--device cuda needs a GPU, and torch {torch.__version__} finds none on this machine"
    ranks = _number(_LOCAL_SIZES, 1)
    if ranks > gpus:
        return sharing_problem(f"--device cuda with {ranks} ranks on a machine with {gpus} GPUs")
    return None


def sharing_problem(what: str) -> str | None:
    """Returns why several ranks cannot share a GPU, in a line; None if they can.

    Args:
        what: The feature that needs it, for the message.
    """
    version = nccl_version()
    needed = ".".join(map(str, SHARING_VERSION))
    if version is None:
        return f"{what} needs NCCL {needed} or later, and no NCCL is loaded"
    if version < SHARING_VERSION:
        found = ".".join(map(str, version))
        return (
            f"{what} needs NCCL {needed} or later, and {found} is loaded, which refuses two ranks on one GPU; "
            "a newer libnccl.so.2 can be named in LD_PRELOAD"
        )
    if os.environ.get(SHARING_VARIABLE) != "1":
        return f"{what} needs {SHARING_VARIABLE}=1 and a small NCCL_MAX_CTAS, such as 2, in the environment"
    return None


def nccl_version() -> tuple[int, int, int] | None:
    """Returns the version of the NCCL that is loaded, which need not be the one torch was built with."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libnccl.so" in line}
    number = ctypes.c_int()
    # A preloaded library answers for all of them; otherwise there is only one.
    for name in (None, *sorted(paths)):
        try:
            status = ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number))
        except (AttributeError, OSError):
            continue
        if status == 0:
            return number.value // 10000, number.value // 100 % 100, number.value % 100
    return None


def use(device: str) -> torch.device:
    """Returns this rank's device, which becomes the current one; after the launcher's variables are there.

    Args:
        device: "cpu" or "cuda", for which `problem` has nothing to say.
    """
    if device == "cpu":
        return torch.device("cpu")
    chosen = torch.device("cuda", _number(_LOCAL_RANKS, 0) % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def _number(variables: tuple[str, ...], default: int) -> int:
    return next(
        (int(os.environ[name]) for name in variables if os.environ.get(name, "").isdecimal()), default
    )
