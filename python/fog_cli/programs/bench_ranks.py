"""One rank of `fog bench`, in the environment of torchrun: `python -m fog_cli.programs.bench_ranks SECONDS BYTES ...`"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import fogdist
import torch
import torch.distributed as dist

from fog_cli.programs.report import median_seconds, of_all, tell

_TIMEOUT = timedelta(seconds=60)
_WARM_UP, _LEAST, _MOST = 2, 5, 200
_REPETITIONS = 7


def _neighbors_by_gloo(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Computes the result of neighbor_allreduce with plain c10d calls: isend and irecv, then the mean."""
    receivers, senders = fogdist.out_neighbor_ranks(), fogdist.in_neighbor_ranks()
    received = [torch.empty_like(x) for _ in senders]
    works = [dist.irecv(buffer, rank, group) for buffer, rank in zip(received, senders, strict=True)]
    works += [dist.isend(x, rank, group) for rank in receivers]
    for work in works:
        if work is not None:
            work.wait()
    return torch.stack([x, *received]).mean(0)


def _allreduce(x: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(x.fill_(1.0), group=group)


def _put(window: Any, x: torch.Tensor) -> None:
    window.put(x)
    window.update()


def _median(action: Callable[[], object], seconds: float) -> float:
    """Returns the median seconds of one call on the slowest rank. All ranks make the same number of calls."""
    for _ in range(_WARM_UP):
        action()
    calls = int(min(of_all(seconds / max(median_seconds(action, 1), 1e-6))))
    return max(of_all(median_seconds(action, min(max(calls, _LEAST), _MOST), dist.barrier)))


def main() -> None:
    """Times each operation in fog and in Gloo, in turn."""
    seconds, sizes = float(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    torch.set_num_threads(1)
    dist.init_process_group("fog", timeout=_TIMEOUT)
    fogdist.init()
    gloo: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    for size in sizes:
        x = torch.ones(max(size // 4, 1))
        window = fogdist.Window(x.clone(), zero_init=True)
        pairs: list[tuple[str, Callable[[], object], Callable[[], object] | None]] = [
            (
                "neighbor_allreduce",
                partial(fogdist.neighbor_allreduce, x),
                partial(_neighbors_by_gloo, x, gloo),
            ),
            ("allreduce", partial(_allreduce, x, None), partial(_allreduce, x, gloo)),
            ("window put and update", partial(_put, window, x), None),
        ]
        for name, by_fog, by_gloo in pairs:
            # In turn, so that what slows the machine for a while slows both.
            share = seconds / _REPETITIONS
            times = [
                (_median(by_fog, share), _median(by_gloo, share) if by_gloo else None)
                for _ in range(_REPETITIONS)
            ]
            if dist.get_rank() == 0:
                tell(name=name, bytes=x.numel() * 4, times=times)
        window.free()
    fogdist.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
