"""What a rank of `fog advise` measures: links by real transfers, and compute by a user's script.

`python -m fog_cli.programs.advise_ranks SECONDS [SCRIPT]`, in the environment of a launcher. The first rank prints what
all have measured, as a line of JSON.
"""

from __future__ import annotations

import functools
import math
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import fogdist
import torch
import torch.distributed as dist
from fogdist.compression import BFloat16, Codec, Int8, TopK
from fogdist.context import current
from fogdist.tuning.decision import SPARSE, sparse_code
from torch import Tensor

from fog_cli.programs.report import median_seconds, of_all, tell

_TIMEOUT = timedelta(seconds=120)
_SMALL, _PROBE, _MOST = 16, 64 << 10, 16 << 20  # elements; bytes
_PINGS, _TRIALS = 20, 3
_LONGEST, _SETTLED = 8, 0.9  # times the seconds asked for; a rate over that of the transfer before
_SUM_ELEMENTS = 1 << 20
_WARM_UP, _STEPS = 2, 5
# By what a script writes: those for parameters that are exchanged as they are, and those of SparseLoCo.
_CODECS: dict[str, Codec] = {"BFloat16()": BFloat16(), "Int8()": Int8()} | {
    sparse_code(share): TopK(share, bits=2) for share in SPARSE.values()
}


def measure(seconds: float) -> dict[str, Any]:
    """Measures the links between all ranks; collective.

    From one representative of each host to the one `distance` hosts further, for each distance: all at one time, as in a
    topology's round, so that what they share shows. Within hosts, all ranks send to the next one of their host.

    Args:
        seconds: That one transfer is to take, at least.

    Returns:
        What `fogdist.tuning.network.Network.of` takes, and what makes each `fogdist.tuning.prediction.Codec`, the same on all ranks.
    """
    rank, host_of = dist.get_rank(), list(current(None).machine_of)
    hosts = max(host_of) + 1
    first = [host_of.index(host) for host in range(hosts)]
    transfers: list[list[float]] = []
    for distance in range(1, hosts):
        target, source = _shifted(first, rank, distance)
        # A receiver knows the time.
        for host, (size, taken) in enumerate(_timed(target, source, first, seconds)):
            transfers.append([distance, (host - distance) % hosts, size, taken])
    latency = _latency(*_shifted(first, rank, 1)) if hosts > 1 else 0.0
    mine = [each for each, host in enumerate(host_of) if host == host_of[rank]]
    local_rates, within = [0.0] * hosts, 0.0
    if len(set(host_of)) < len(host_of):
        target, source = _shifted(mine, rank, 1)
        pair = (None, None) if target == rank else (target, source)
        found = _timed(*pair, range(len(host_of)), seconds)
        for host in range(hosts):
            on_it = [found[each] for each in range(len(host_of)) if host_of[each] == host]
            if len(on_it) > 1:
                local_rates[host] = sum(size for size, _ in on_it) / max(taken for _, taken in on_it)
        within = _latency(*pair)
    return {
        "host_of": host_of,
        "transfers": transfers,
        "latency_s": latency,
        "latency_within_s": within,
        "local_rates": local_rates,
        "sum_rate": _sum_rate(),
        "codecs": _codecs(),
    }


def _shifted(ranks: Sequence[int], rank: int, distance: int) -> tuple[int | None, int | None]:
    """To whom this rank sends, and from whom it receives; None if it is none of `ranks`."""
    if rank not in ranks:
        return None, None
    place = ranks.index(rank)
    return ranks[(place + distance) % len(ranks)], ranks[(place - distance) % len(ranks)]


def _transfer(x: Tensor, y: Tensor, target: int | None, source: int | None) -> float:
    """Sends and receives at the same time as all others; returns the seconds until it was received."""
    dist.barrier()
    if target is None or source is None:
        return 0.0
    begin = time.perf_counter()
    receiving, sending = dist.irecv(y, source), dist.isend(x, target)
    if receiving is not None:
        receiving.wait()
    taken = time.perf_counter() - begin
    if sending is not None:
        sending.wait()
    return taken


def _timed(
    target: int | None, source: int | None, ranks: Sequence[int], seconds: float
) -> list[tuple[float, float]]:
    """Bytes and seconds of what each of `ranks` received, of transfers that each take so many seconds or some more.

    A limited link lets some data pass at once after a pause. So a transfer grows, to some times as many seconds, until it
    is so long that its rate no longer falls.
    """
    rank = dist.get_rank()
    sizes = [_PROBE] * dist.get_world_size()  # by receiver, as links differ
    rates = [math.inf] * dist.get_world_size()

    def times() -> list[float]:
        x = torch.zeros(sizes[rank if target is None else target] // 4)
        y = torch.empty(sizes[rank] // 4)
        return of_all(_transfer(x, y, target, source))

    while True:
        taken = times()
        short = []
        for each in ranks:
            falls = taken[each] < _LONGEST * seconds and sizes[each] < _SETTLED * rates[each] * taken[each]
            if taken[each] > 0.0 and sizes[each] < _MOST and (taken[each] < seconds or falls):
                short.append(each)
        if not short:
            break
        for each in short:
            rates[each] = sizes[each] / taken[each]
            # By steps, as the first transfer of a size makes buffers.
            sizes[each] = min(_MOST, sizes[each] * max(2, min(8, math.ceil(seconds / taken[each]))))
    trials = [times() for _ in range(_TRIALS)]
    return [(float(sizes[each]), statistics.median(trial[each] for trial in trials)) for each in ranks]


def _latency(target: int | None, source: int | None) -> float:
    """Seconds of an exchange of some bytes, the largest of all ranks' medians."""
    x, y = torch.zeros(_SMALL), torch.empty(_SMALL)
    return max(of_all(statistics.median(_transfer(x, y, target, source) for _ in range(_PINGS))))


def _sum_rate() -> float:
    """Bytes per second at which a rank adds one tensor to another, with all ranks at it."""
    x, y = torch.zeros(_SUM_ELEMENTS), torch.ones(_SUM_ELEMENTS)
    return 4 * _SUM_ELEMENTS / max(of_all(median_seconds(lambda: x.add_(y, alpha=0.5), _PINGS)))


def _codecs() -> list[tuple[str, float, float, float]]:
    """Each codec: its code, bytes of an element, and elements per second that are encoded and decoded, with all ranks at it."""
    x, target = torch.randn(_SUM_ELEMENTS), torch.empty(_SUM_ELEMENTS)
    found = []
    for code, codec in _CODECS.items():
        message = codec.encode(x)
        encode = functools.partial(codec.backend.encode, x, message)
        decode = functools.partial(codec.backend.decode, message, target)
        rates = [_SUM_ELEMENTS / max(of_all(median_seconds(call, _PINGS))) for call in (encode, decode)]
        found.append((code, message.numel() / _SUM_ELEMENTS, rates[0], rates[1]))
    return found


def of_script(path: str) -> dict[str, float]:
    """Runs the function `make` of a script, and times the steps of what it returns.

    Returns:
        Seconds of a step, the slowest rank's median; bytes of the trained parameters, and of an element, the mean.

    Raises:
        ValueError: The script has no such function, or it returns something else.
    """
    sys.argv = [path]  # of the script, not of this program
    make = runpy.run_path(path).get("make")
    if not callable(make):
        raise ValueError(f"{path} must have a function make() that returns a model and a step")
    made: Any = make()
    if not (
        isinstance(made, tuple)
        and len(made) == 2
        and isinstance(made[0], torch.nn.Module)
        and callable(made[1])
    ):
        raise ValueError(f"make() of {path} must return a torch.nn.Module and a function, got {made!r:.100}")
    model, step = made
    trained = [each for each in model.parameters() if each.requires_grad]
    size = sum(each.numel() * each.element_size() for each in trained)
    count = sum(each.numel() for each in trained)
    return {"compute_s": max(of_all(_median_of(step))), "bytes": size, "element_bytes": size / max(1, count)}


def _median_of(step: Callable[[], object]) -> float:
    def whole() -> None:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(_WARM_UP):
        whole()
    return median_seconds(whole, _STEPS, dist.barrier)  # ranks that share cores compute at the same time


def main() -> None:
    """Measures, and prints it on the first rank."""
    dist.init_process_group("fog", timeout=_TIMEOUT)
    fogdist.init()
    script = sys.argv[2:]
    found = measure(float(sys.argv[1]))
    if dist.get_rank() == 0:
        tell(**found)  # before the script runs, which may fail
    if script:
        found = of_script(script[0])
        if dist.get_rank() == 0:
            tell(**found)
    fogdist.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
