"""One of two ranks of the self-test of `fog doctor`, in torchrun's environment. Its argument is "host" or "hosts"."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import fogdist
import torch
import torch.distributed as dist

from fog_cli.programs.report import step

# The timeout of each operation, in seconds, long enough for a busy machine.
_TIMEOUT = timedelta(seconds=20)
_RANK = int(os.environ["RANK"])


def _expect(what: str, found: torch.Tensor, wanted: float) -> None:
    if not (found == wanted).all():
        raise AssertionError(f"{what}: got {found.min()} to {found.max()}, expected {wanted}")


def _start() -> str:
    dist.init_process_group("fog", timeout=_TIMEOUT)
    fogdist.init()
    return f"2 ranks, {fogdist.transport(1 - _RANK)}"


def _collectives() -> str:
    for numel in (1, 1_000_000):
        x = torch.full((numel,), float(_RANK + 1))
        dist.all_reduce(x)
        _expect("all_reduce", x, 3.0)
        x = torch.full((numel,), float(_RANK))
        dist.broadcast(x, 1)
        _expect("broadcast", x, 1.0)
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(parts, torch.full((2,), float(_RANK)))
    for rank, part in enumerate(parts):
        _expect("all_gather", part, float(rank))
    dist.barrier()
    return "all_reduce, broadcast, all_gather, barrier"


def _neighbors() -> str:
    for numel in (1, 1_000_000):
        x = fogdist.neighbor_allreduce(torch.full((numel,), float(_RANK)))
        _expect("neighbor_allreduce", x, 0.5)
    _expect("neighbor_allgather", fogdist.neighbor_allgather(torch.tensor([float(_RANK)])), 1.0 - _RANK)
    return "neighbor_allreduce, neighbor_allgather"


def _windows() -> str:
    window = fogdist.Window(torch.full((100_000,), float(_RANK)), zero_init=True)
    ways = sorted(set(window.transports.values()))
    window.put(torch.full((100_000,), float(_RANK)))
    dist.barrier()
    _expect("put and update", window.update(), 0.5)
    dist.barrier()
    window.get()
    dist.barrier()
    window.free()
    return f"put, get, update by {', '.join(ways)}"


def _cuda() -> str:
    if torch.cuda.device_count() < 2:
        return "not tried: two ranks need two GPUs"
    torch.cuda.set_device(_RANK)
    x = torch.full((1_000_000,), float(_RANK + 1), device="cuda")
    dist.all_reduce(x)
    _expect("all_reduce", x, 3.0)
    return "all_reduce"


def _end() -> None:
    fogdist.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> int:
    """Runs the tests in order and stops at the first failure, after which the ranks may no longer match."""
    steps: dict[str, Callable[[], object]] = {"start": _start, "collectives": _collectives}
    steps |= {"neighbors": _neighbors, "windows": _windows}
    if sys.argv[1] == "host" and torch.cuda.is_available():
        steps["CUDA"] = _cuda
    steps["end"] = _end
    for name, action in steps.items():
        if not step(name, action):
            # A regular exit would wait for the other rank, which may never come.
            os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
