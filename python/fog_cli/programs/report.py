"""What the programs of commands share: lines of JSON on standard output, times, and the values of all ranks."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def tell(**values: Any) -> None:
    """Prints one line and flushes it at once, because this process may crash or hang later."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def step(name: str, action: Callable[[], Any]) -> bool:
    """Calls `action` and reports `begin`, then `text` (its result) or `error`. Returns whether it succeeded."""
    tell(name=name, begin=True)
    try:
        text = action()
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        tell(name=name, error=f"{type(error).__name__}: {lines[0]}")
        return False
    tell(name=name, text="" if text is None else str(text))
    return True


def of_all(value: float) -> list[float]:
    """Returns this rank's value and those of the others, in the order of ranks; collective."""
    import torch
    import torch.distributed as dist

    found = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value], dtype=torch.float64))
    return [float(each) for each in found]


def median_seconds(
    call: Callable[[], object], calls: int, before: Callable[[], object] = lambda: None
) -> float:
    """Returns the median seconds of some calls, each of them after a call of `before` that is not timed."""
    times = []
    for _ in range(calls):
        before()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
