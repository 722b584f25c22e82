"""Times ranks beside one that stands still now and then: in modes that wait for it, and in those that do not.

    torchrun --nproc_per_node=4 benchmarks/stragglers.py            # about two minutes
    torchrun --nproc_per_node=4 benchmarks/stragglers.py --steps 20 --modes sync "sync, patience"

A step computes by sleeping, so ranks need not have cores of their own, and mixes a model along a ring. The last rank
sleeps ten times as long in every 20th step. The modes take turns. The result is the time that the other ranks would need
alone, as a share of what they needed: 100 % if they never waited. It is measured with and without the long sleeps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import fogdist
import torch
from fogdist.algorithms import DecentralizedSGD, WindowPushSum
from torch import nn

PATIENCE = 5.0
EVERY, TIMES = 20, 10.0  # every so many steps the last rank takes so many times as long

Mode = tuple[Any, Any, Callable[[], object]]  # what to call, what steps, what ends it


def _nothing() -> None:
    pass


def _sgd(model: nn.Module, base: Any, **options: Any) -> Mode:
    return model, DecentralizedSGD(base, model, order="awc", **options), _nothing


def _wrapper(model: nn.Module, base: Any, **options: Any) -> Mode:
    wrapper = fogdist.DecentralizedDataParallel(model, base, **options)
    return wrapper, base, wrapper.close


def _push_sum(model: nn.Module, base: Any, force_barrier: bool = True, **options: Any) -> Mode:
    optimizer = WindowPushSum(base, model, **options)
    if "patience" not in options:
        optimizer.force_barrier = force_barrier
    return model, optimizer, optimizer.unregister_window


MODES: dict[str, Callable[[nn.Module, Any], Mode]] = {
    "sync": _sgd,
    "sync, patience": lambda model, base: _sgd(model, base, patience=PATIENCE),
    "wrapper, sync": _wrapper,
    "wrapper, sync, patience": lambda model, base: _wrapper(model, base, patience=PATIENCE),
    "wrapper, async": lambda model, base: _wrapper(model, base, mode="async"),
    "push-sum, barriers": _push_sum,
    "push-sum, patience": lambda model, base: _push_sum(model, base, patience=PATIENCE),
    "push-sum, own pace": lambda model, base: _push_sum(model, base, force_barrier=False),
}


def measure(name: str, steps: int, seconds: float, is_late: bool) -> list[float]:
    """Makes steps in a mode.

    Args:
        name: The mode's.
        steps: How many steps each rank makes.
        seconds: How long the computation of a step sleeps.
        is_late: Whether the last rank is late now and then.

    Returns:
        The share of its time that each of the other ranks did not wait.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 10))
    called, optimizer, end = MODES[name](model, torch.optim.SGD(model.parameters(), lr=0.01))
    x = torch.ones(4, 256)
    late = fogdist.size() - 1
    begin = 0.0
    for step in range(-EVERY, steps):  # the first ones are not measured
        if step == 0:
            begin = time.monotonic()
        is_long = is_late and step >= 0 and step % EVERY == EVERY - 1 and fogdist.rank() == late
        optimizer.zero_grad()
        called(x).square().mean().backward()
        time.sleep(seconds * (TIMES if is_long else 1.0))
        optimizer.step()
    share = torch.tensor([seconds * steps / (time.monotonic() - begin)], dtype=torch.float64)
    shares: list[float] = fogdist.allgather(share).tolist()
    end()
    return shares[:late]


def main() -> None:
    """Measures the modes and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps of each rank, beyond the first 20")
    parser.add_argument(
        "--milliseconds", type=float, default=50.0, help="that the computation of a step sleeps"
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    arguments = parser.parse_args()
    fogdist.init(fogdist.RingGraph)
    rows = {
        name: [
            statistics.mean(measure(name, arguments.steps, arguments.milliseconds / 1e3, is_late))
            for is_late in (True, False)
        ]
        for name in arguments.modes
    }
    if fogdist.rank() == 0:
        print(f"{'':28}one late   none late")
        for name, (with_late, without) in rows.items():
            print(f"{name:28}{with_late:8.0%}{without:12.0%}")
    fogdist.shutdown()


if __name__ == "__main__":
    main()
