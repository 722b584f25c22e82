"""Tests of ranks that go at their own pace, and of `max_staleness`: how far they run ahead of a rank without a core."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import pytest
import torch
import torch.distributed as dist
from fogdist.training import pace
from fogdist.training.pace import MAX_STALENESS
from harness import on_ranks
from torch import nn

KINDS: dict[str, Any] = {
    "win_put": fogdist.algorithms.WinPut,
    "gossip": fogdist.algorithms.AsynchronousGossip,
}


def wrap(optimizer: Any, model: nn.Module, **options: Any) -> Any:
    """Returns the wrapper's optimizer."""
    wrapper = fogdist.DecentralizedDataParallel(model, optimizer, mode="async", **options)
    wrapper.optimizer.wrapper = wrapper
    return wrapper.optimizer


def make(kind: str, **options: Any) -> tuple[nn.Module, Any]:
    fogdist.init(fogdist.topology.ring)
    model = nn.Linear(3, 2)
    optimizer = {**KINDS, "wrapper": wrap}[kind](
        torch.optim.SGD(model.parameters(), lr=0.0), model, **options
    )
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def end(optimizer: Any) -> None:
    dist.barrier()
    if hasattr(optimizer, "wrapper"):
        optimizer.wrapper.close()
    else:
        optimizer.close()


DEFAULTS = {
    name: value
    for name, value in vars(pace).items()
    if name.startswith("_QUIET") or name == "_UNKNOWN_SECONDS"
}
# A rank waits so long for a quiet neighbor, at most: a wait that should end is a hang, which fails the test.
FOR_EVER = {"_QUIET_SECONDS": 1e6, "_UNKNOWN_SECONDS": 1e6, "_QUIET_MOST_SECONDS": 1e6}
FAR = 3 * MAX_STALENESS


def waiting(**seconds: float) -> None:
    for name, value in (DEFAULTS | seconds).items():
        setattr(pace, name, value)


def stand_still(model: nn.Module, optimizer: Any, word: str, until_far: bool) -> int:
    """Rank 1 stands still until the others are far ahead, or for half a second; then all go on to the same step.

    Returns:
        The steps of another rank in the meantime.
    """
    store, rank, ahead = dist.distributed_c10d._get_default_store(), fogdist.rank(), 0
    goes_on = f"{word}: rank 1 goes on"
    if rank == 1:
        if until_far:
            store.wait([f"{word}: rank {other} is far" for other in range(fogdist.size()) if other != 1])
        else:
            time.sleep(0.5)
        store.set(goes_on, "")
    while rank != 1 and ahead < FAR and not store.check([goes_on]):
        step(model, optimizer)
        ahead += 1
    store.set(f"{word}: rank {rank} is far", "")
    store.wait([goes_on])
    for _ in range(2 * FAR - ahead):  # all make as many, so none waits for one that makes no more
        step(model, optimizer)
    dist.barrier()
    return ahead


def run_ahead(kind: str, bound: int | None) -> int:
    waiting(**FOR_EVER)
    model, optimizer = make(kind, max_staleness=bound)
    for _ in range(4):
        step(model, optimizer)
        dist.barrier()
    ahead = stand_still(model, optimizer, f"{kind} {bound}", until_far=bound is None)
    end(optimizer)
    return ahead


@pytest.mark.parametrize("kind", [*KINDS, "wrapper"])
def test_a_rank_that_stands_still_is_waited_for(worlds, kind):
    bound = 5
    ahead, *_ = worlds(3).run(run_ahead, kind, bound)
    # Steps that rank 1 had done earlier may be seen late, when the bound is reached.
    assert 0 < ahead <= 2 * bound + 2


@pytest.mark.parametrize("kind", [*KINDS, "wrapper"])
def test_without_a_bound_nobody_waits(worlds, kind):
    ahead, *_ = worlds(3).run(run_ahead, kind, None)
    assert ahead >= FAR


def be_quiet() -> tuple[int, int, int]:
    """Rank 1 is quiet as never before, again soon after, and after many steps that took not long: rank 0's steps."""
    model, optimizer = make("win_put")
    waiting()
    for _ in range(4):
        step(model, optimizer)
    dist.barrier()
    first = stand_still(model, optimizer, "first", until_far=True)
    # As long as rank 1 remembers a pause of half a second, the wait is longer than a test may take.
    waiting(**FOR_EVER | {"_QUIET_SECONDS": 0.1, "_QUIET_TIMES": 200.0})
    soon = stand_still(model, optimizer, "soon", until_far=False)
    for _ in range(70):
        step(model, optimizer)
    later = stand_still(model, optimizer, "later", until_far=True)
    end(optimizer)
    return first, soon, later


def test_a_rank_that_is_quiet_for_long_is_not_waited_for(worlds):
    (first, soon, later), _ = worlds(2).run(be_quiet)
    assert min(first, later) >= FAR
    assert soon <= 2 * MAX_STALENESS + 2


def four_times_as_fast() -> None:
    waiting(**FOR_EVER)
    model, optimizer = make("win_put")
    store, rank = dist.distributed_c10d._get_default_store(), fogdist.rank()
    for turn in range(10):  # rank 1's step comes when rank 0 has made four
        if rank == 1:
            store.wait([f"turn {turn}"])
        for _ in range(1 if rank == 1 else 4):
            step(model, optimizer)
        if rank == 0:
            store.set(f"turn {turn}", "")
            store.wait([f"turn {turn - 1} is over"] if turn else [])
        else:
            store.set(f"turn {turn} is over", "")
    end(optimizer)


def test_a_slow_rank_holds_nobody_up(worlds):
    worlds(2).run(four_times_as_fast)


def slow_as_the_slowest() -> None:
    """Rank 1 sleeps before each step, and rank 0 never gets far ahead of it, where a bound of news lets it get to 10."""
    waiting(**FOR_EVER)
    fogdist.init(fogdist.topology.ring)
    model = nn.Linear(3, 2)
    optimizer = bf.DistributedWinPutOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    store, rank = dist.distributed_c10d._get_default_store(), fogdist.rank()
    for made in range(1, 21):
        if rank == 1:
            time.sleep(0.02)
            store.add("exchanges of rank 1", 1)
        step(model, optimizer)
        if rank == 0:
            assert made - store.add("exchanges of rank 1", 0) <= 2
    end(optimizer)


def test_through_bluefogs_names_nobody_runs_ahead(worlds):
    worlds(2).run(slow_as_the_slowest)


def lose_one() -> None:
    waiting(**FOR_EVER)
    model, optimizer = make("win_put")
    optimizer.skip_lost = True
    for _ in range(4):
        step(model, optimizer)
    dist.barrier()
    if fogdist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(FAR):
        step(model, optimizer)


def test_a_lost_rank_is_not_waited_for(new_world):
    outcomes = new_world(3).run_raw(lose_one)
    assert [each.state for each in outcomes] == ["returned", "died", "returned"]


@on_ranks(2)
def test_bad_bounds() -> None:
    fogdist.init(fogdist.topology.ring)
    model = nn.Linear(3, 2)
    for make_one in KINDS.values():
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="max_staleness must be at least 1, got 0"):
            make_one(sgd, model, max_staleness=0)
        with pytest.raises(TypeError, match="max_staleness must be an int, got float"):
            make_one(sgd, model, max_staleness=2.0)
    assert bf.get_current_created_window_names() == []
