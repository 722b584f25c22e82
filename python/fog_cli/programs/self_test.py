"""One of two ranks of the self-test of `fog doctor`, in torchrun's environment. Its argument is "host" or "hosts"."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from fog_cli.programs.report import step, tell

if TYPE_CHECKING:
    import torch

# The timeout of each operation, in seconds, long enough for a busy machine.
_TIMEOUT = 20


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: got {found}, expected {wanted}")


def _expect_all(what: str, found: torch.Tensor, wanted: float) -> None:
    _expect(what, [found.min().item(), found.max().item()], [wanted, wanted])


class _Tests:
    """The tests of one of the two ranks. torch is imported when they begin."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.other = 1 - self.rank

    def start(self) -> str:
        import fogdist
        import torch.distributed as dist

        dist.init_process_group("fog", timeout=timedelta(seconds=_TIMEOUT))
        fogdist.init()
        return f"2 ranks, {fogdist.transport(self.other)}"

    def collectives(self) -> str:
        import torch
        import torch.distributed as dist

        for numel in (1, 1_000_000):
            x = torch.full((numel,), float(self.rank + 1))
            dist.all_reduce(x)
            _expect_all("all_reduce", x, 3.0)
            x = torch.full((numel,), float(self.rank))
            dist.broadcast(x, 1)
            _expect_all("broadcast", x, 1.0)
        parts = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(parts, torch.full((2,), float(self.rank)))
        _expect("all_gather", [part.tolist() for part in parts], [[0.0, 0.0], [1.0, 1.0]])
        dist.barrier()
        return "all_reduce, broadcast, all_gather, barrier"

    def neighbors(self) -> str:
        import fogdist
        import torch

        for numel in (1, 1_000_000):
            x = fogdist.neighbor_allreduce(torch.full((numel,), float(self.rank)))
            _expect_all("neighbor_allreduce", x, 0.5)
        _expect(
            "neighbor_allgather",
            fogdist.neighbor_allgather(torch.tensor([float(self.rank)])).tolist(),
            [float(self.other)],
        )
        return "neighbor_allreduce, neighbor_allgather"

    def windows(self) -> str:
        import fogdist
        import torch
        import torch.distributed as dist

        x = torch.full((100_000,), float(self.rank))
        window = fogdist.Window(x, zero_init=True)
        ways = sorted(set(window.transports.values()))
        window.put(x)
        dist.barrier()
        _expect_all("put and update", window.update(), 0.5)
        dist.barrier()
        window.get()
        dist.barrier()
        window.free()
        return f"put, get, update by {', '.join(ways)}"

    def cuda(self) -> str:
        import torch
        import torch.distributed as dist

        if torch.cuda.device_count() < 2:
            return "not tried: two ranks need two GPUs"
        torch.cuda.set_device(self.rank)
        x = torch.full((1_000_000,), float(self.rank + 1), device="cuda")
        dist.all_reduce(x)
        _expect_all("all_reduce", x, 3.0)
        return "all_reduce"

    def end(self) -> None:
        import fogdist
        import torch.distributed as dist

        fogdist.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> int:
    """Runs the tests in order and stops at the first failure, after which the ranks may no longer match."""
    tests = _Tests()
    steps: list[tuple[str, Callable[[], object]]] = [
        ("start", tests.start),
        ("collectives", tests.collectives),
    ]
    steps += [("neighbors", tests.neighbors), ("windows", tests.windows)]
    if sys.argv[1] == "host":
        import torch

        if torch.cuda.is_available():
            steps += [("CUDA", tests.cuda)]
    steps += [("end", tests.end)]
    for name, action in steps:
        if not step(name, action):
            # A regular exit would wait for the other rank, which may never come.
            os._exit(1)
    tell(name="all", text="done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
