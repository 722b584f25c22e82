"""Tests of ranks that go at their own pace, and of `max_staleness`: how far they run ahead of a rank without a core."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import fogdist
import pytest
import torch
from fogdist.training.pace import MAX_STALENESS
from reference import Checks
from torch import nn

KINDS: dict[str, Any] = {
    "win_put": fogdist.DistributedWinPutOptimizer,
    "pull_get": fogdist.DistributedPullGetOptimizer,
    "push_sum": fogdist.DistributedPushSumOptimizer,
    "gossip": fogdist.algorithms.AsynchronousGossip,
}


def wrap(optimizer: Any, model: nn.Module, **options: Any) -> Any:
    """Returns the wrapper's optimizer; a given bound is replaced by the wrapper's default."""
    if options.get("max_staleness", 0) is not None:
        options = {}
    wrapper = fogdist.DecentralizedDataParallel(model, optimizer, mode="async", **options)
    wrapper.optimizer.wrapper = wrapper
    return wrapper.optimizer


def make(kind: str, **options: Any) -> tuple[nn.Module, Any]:
    fogdist.init(fogdist.topology.RingGraph)
    model = nn.Linear(3, 2)
    optimizer = {**KINDS, "wrapper": wrap}[kind](
        torch.optim.SGD(model.parameters(), lr=0.0), model, **options
    )
    if kind == "push_sum":
        optimizer.force_barrier = False
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def end(optimizer: Any) -> None:
    fogdist.barrier()
    if hasattr(optimizer, "wrapper"):
        optimizer.wrapper.close()
    elif isinstance(optimizer, fogdist.algorithms.AsynchronousGossip):
        optimizer.finish()
    else:
        optimizer.unregister_window()


def steps_in(seconds: float, model: nn.Module, optimizer: Any, most: int = 10**6) -> int:
    until, done = time.monotonic() + seconds, 0
    while time.monotonic() < until and done < most:
        step(model, optimizer)
        done += 1
    return done


def stop_for_a_while(kind: str, bound: int | None) -> tuple[int, int]:
    """Rank 1 gets no core for half a second; returns the other ranks' steps during that time and after it.

    It was late before, so the others know that it may come.
    """
    model, optimizer = make(kind, max_staleness=bound)
    for turn in range(4):
        if turn == 2 and fogdist.rank() == 1:
            time.sleep(0.25)
        step(model, optimizer)
        fogdist.barrier()
    if fogdist.rank() == 1:
        time.sleep(0.5)
        meanwhile = 0
    else:
        meanwhile = steps_in(0.4, model, optimizer)
    fogdist.barrier()
    after = steps_in(0.2, model, optimizer)
    end(optimizer)
    return meanwhile, after


@pytest.mark.parametrize("kind", [*KINDS, "wrapper"])
def test_a_rank_that_stands_still_is_waited_for(worlds, kind):
    bound = MAX_STALENESS if kind == "wrapper" else 5
    (ahead, after), (_, slow), _ = worlds(3).run(stop_for_a_while, kind, bound)
    # Steps that rank 1 had done earlier may be seen late, when the bound is reached.
    assert ahead <= 2 * bound + 2
    assert after > 10 and slow > 10


@pytest.mark.parametrize("kind", [*KINDS, "wrapper"])
def test_without_a_bound_nobody_waits(worlds, kind):
    (ahead, _), *_ = worlds(3).run(stop_for_a_while, kind, None)
    assert ahead > 2 * MAX_STALENESS


def stop_for_long() -> tuple[int, float, int, int]:
    """Rank 1 is quiet for long, as never before.

    Returns:
        Rank 0's steps meanwhile, the longest in seconds, and those while rank 1 is quiet again: soon after, and after many
        steps of rank 1 that did not take long.
    """
    model, optimizer = make("win_put")
    for _ in range(4):
        step(model, optimizer)
    fogdist.barrier()
    if fogdist.rank() == 1:
        time.sleep(1.2)
        done, longest = 0, 0.0
    else:
        done, longest, until = 0, 0.0, time.monotonic() + 1.0
        while time.monotonic() < until:
            begin = time.monotonic()
            step(model, optimizer)
            done, longest = done + 1, max(longest, time.monotonic() - begin)
    fogdist.barrier()
    again = []
    for steps in (10, 70):  # it comes back
        if fogdist.rank() == 1:
            for _ in range(steps):
                step(model, optimizer)
        fogdist.barrier()
        again.append(0 if fogdist.rank() == 1 else steps_in(0.6, model, optimizer))
        fogdist.barrier()
    end(optimizer)
    return done, longest, again[0], again[1]


def test_a_rank_that_is_quiet_for_long_is_not_waited_for(worlds):
    (done, longest, soon, later), _ = worlds(2).run(stop_for_long)
    assert done > 3 * MAX_STALENESS
    assert 0.08 < longest < 1.0
    assert soon <= 2 * MAX_STALENESS + 2
    assert later > 3 * MAX_STALENESS


def one_is_slow() -> int:
    model, optimizer = make("win_put")
    until, done = time.monotonic() + 1.0, 0
    while time.monotonic() < until:
        time.sleep(0.02 if fogdist.rank() == 1 else 0.004)
        step(model, optimizer)
        done += 1
    end(optimizer)
    return done


def test_a_slow_rank_holds_nobody_up(worlds):
    fast, slow = worlds(2).run(one_is_slow)
    assert fast > 2 * slow


def lose_one() -> float:
    model, optimizer = make("win_put")
    optimizer.skip_lost = True
    for _ in range(4):
        step(model, optimizer)
    fogdist.barrier()
    if fogdist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    for _ in range(3 * MAX_STALENESS):
        step(model, optimizer)
    return time.monotonic() - begin


def test_a_lost_rank_is_not_waited_for(new_world):
    outcomes = new_world(3).run_raw(lose_one)
    assert [each.state for each in outcomes] == ["returned", "died", "returned"]
    assert max(each.value for each in outcomes if each.state == "returned") < 5.0


def bad_bounds() -> None:
    fogdist.init(fogdist.topology.RingGraph)
    model = nn.Linear(3, 2)
    with Checks() as checks:
        for make_one in KINDS.values():
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(ValueError, match="max_staleness must be at least 1, got 0"):
                make_one(sgd, model, max_staleness=0)
            with pytest.raises(TypeError, match="max_staleness must be an int, got float"):
                make_one(sgd, model, max_staleness=2.0)
        checks.equal("windows", fogdist.get_current_created_window_names(), [])


def test_bad_bounds(worlds):
    worlds(2).run(bad_bounds)
