"""Tests of torch's own reconfigure, ``enable_reconfigure`` of ``init_process_group``, from torch 2.14 on.

They are equivalent to the cases that torch tests its own backends with: shrink, grow, merge, split, rejoin, a uuid that
was used, after an abort, after a time-out, with a rank that is dead.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import World
from torch.distributed import distributed_c10d

pytestmark = [
    pytest.mark.skipif(
        not hasattr(dist, "_reconfigure"),
        reason=f"torch {torch.__version__} has no reconfigure; torch 2.14 and later have",
    ),
]

SIZE = 3
TIMEOUT = timedelta(seconds=60)


class Regime:
    """The default group of a rank, created with ``enable_reconfigure``, and a Store beside it."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store, self.rank = store, rank
        self._turns = self._turn()

    def _turn(self) -> Iterator[str]:
        turn = 0
        while True:
            turn += 1
            yield f"turn {turn}"

    def handles(self, place: int | None = None) -> list[str]:
        """Returns the handles of all ranks, ordered by the places that they ask for; by default their first ranks."""
        key = next(self._turns)
        self.store.set(f"{key} {self.rank if place is None else place}", dist._get_reconfigure_handle())
        return [self.store.get(f"{key} {rank}").decode() for rank in range(SIZE)]

    def meet(self) -> None:
        self.handles()

    def reconfigure(self, uuid: int, handles: Any, seconds: float = 60.0) -> None:
        dist._reconfigure(uuid, handles, timeout=timedelta(seconds=seconds)).wait()


def checked_sum() -> tuple[int, int]:
    """Returns rank and size, after a sum over the group was right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1000,), rank + 1.0)
    dist.all_reduce(x)
    assert x.eq(size * (size + 1) / 2).all()
    return rank, size


def in_regime(case: Callable[[Regime], Any]) -> Any:
    # Not that of the group, which the case before may have changed.
    rank, before = int(os.environ["RANK"]), distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"reconfigure {case.__name__}", before)
    dist.destroy_process_group()
    dist.init_process_group(
        "fog",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=SIZE,
        timeout=TIMEOUT,
        enable_reconfigure=True,
    )
    assert dist._supports_reconfigure()
    return case(Regime(store, rank))


def shrinks(regime: Regime) -> Any:
    handles = regime.handles()
    with pytest.raises(dist.DistBackendError, match="takes no work before reconfigure"):
        dist.all_reduce(torch.ones(3))
    regime.reconfigure(7, handles)
    seen = [checked_sum()]
    if regime.rank != 1:  # the middle one is left out
        regime.reconfigure(8, [handles[0], handles[2]])
        seen.append(checked_sum())
        x = torch.full((4,), 42.0 if dist.get_rank() == 0 else 0.0)
        dist.broadcast(x, group_src=0)
        assert x.eq(42.0).all()
    regime.meet()
    if regime.rank == 1:
        with pytest.raises(dist.DistBackendError, match="has destroyed its group"):
            dist.all_reduce(torch.ones(3))
    return seen


def grows_and_falls_apart(regime: Regime) -> Any:
    """From groups of one to all, and back."""
    seen = []
    regime.reconfigure(10 + regime.rank, [dist._get_reconfigure_handle()])
    seen.append(checked_sum())
    regime.reconfigure(20, regime.handles())
    seen.append(checked_sum())
    regime.reconfigure(30 + regime.rank, [dist._get_reconfigure_handle()])
    seen.append(checked_sum())
    regime.meet()
    return seen


def merges(regime: Regime) -> Any:
    """A late rank: a group of one and one of two become one; the order of the handles is that of the ranks."""
    handles = regime.handles()
    if regime.rank == 0:
        regime.reconfigure(1, handles[:1])
    else:
        regime.reconfigure(2, handles[1:])
    seen = [checked_sum()]
    regime.reconfigure(3, handles[::-1])
    seen.append(checked_sum())
    send, receive = torch.full((9,), float(dist.get_rank())), torch.empty(9)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, send, (dist.get_rank() + 1) % SIZE),
            dist.P2POp(dist.irecv, receive, (dist.get_rank() - 1) % SIZE),
        ]
    )
    for work in works:
        work.wait()
    assert receive.eq((dist.get_rank() - 1) % SIZE).all()
    regime.reconfigure(4, set(handles))  # of a set, fog takes the order of the first ranks
    seen.append(checked_sum())
    return seen


def leaves_and_rejoins(regime: Regime) -> Any:
    """Three times, each time another rank, which comes back as the last one."""
    regime.reconfigure(100, regime.handles())
    seen = []
    for turn in range(3):
        handles = regime.handles(dist.get_rank())
        rejoins = dist.get_rank() == turn
        if not rejoins:
            regime.reconfigure(101 + 2 * turn, [each for place, each in enumerate(handles) if place != turn])
            checked_sum()
        handles = regime.handles(SIZE - 1 if rejoins else dist.get_rank())
        regime.reconfigure(102 + 2 * turn, handles)
        seen.append(checked_sum())
    return seen


def refuses(regime: Regime) -> Any:
    """Bad arguments, which change nothing."""
    handles = regime.handles()
    regime.reconfigure(5, handles)
    for given, message in (
        (["gloo:7"], "handles: got 'gloo:7'; allowed are handles of the 3 ranks"),
        ([f"{handles[0].rpartition(':')[0]}:3"], "handles: got 'fog:"),
        ([handles[0], handles[0]], "more than once"),
        ([handles[(regime.rank + 1) % SIZE]], "without this rank's own"),
        ([], "got 0 handles without this rank's own"),
    ):
        with pytest.raises(ValueError, match=message):
            regime.reconfigure(6, given)
    with pytest.raises(dist.DistBackendError, match="uuid: got 5, which was already used"):
        regime.reconfigure(5, handles)
    with pytest.raises(ValueError, match="enable_reconfigure"):
        fogdist.init()
    return checked_sum()


def fails(regime: Regime) -> Any:
    """Ranks do not come, or were given others: an error in time, and the group is as it was."""
    handles = regime.handles()
    regime.reconfigure(1, handles)
    begun = time.monotonic()
    if regime.rank == 0:
        with pytest.raises(
            dist.DistBackendError, match="uuid 2.*did not all come, and the group stays as it was"
        ):
            regime.reconfigure(2, handles, 1.0)
    regime.meet()
    given = handles if regime.rank else handles[:2]
    with pytest.raises(dist.DistBackendError, match="uuid 3.*the group stays as it was"):
        regime.reconfigure(3, given, 1.0)
    assert time.monotonic() - begun < 30.0
    regime.meet()
    seen = [checked_sum()]
    regime.reconfigure(4, handles)
    return [*seen, checked_sum()]


def recovers(regime: Regime) -> Any:
    """After an abort, and after a time-out."""
    handles = regime.handles()
    backend = dist.get_backend_impl(distributed_c10d._get_default_group(), torch.device("cpu"))
    regime.reconfigure(1, handles)
    regime.meet()  # an abort also ends the reconfigure of a rank that is still within it
    backend.abort()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        dist.all_reduce(torch.ones(3))
    regime.meet()
    regime.reconfigure(2, handles)
    seen = [checked_sum()]
    if regime.rank == 1:
        backend.set_timeout(timedelta(milliseconds=50))
        with pytest.raises(dist.DistBackendError, match="timed out"):
            dist.all_reduce(torch.ones(3))
        backend.set_timeout(TIMEOUT)
    regime.meet()
    regime.reconfigure(3, handles)
    return [*seen, checked_sum()]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(SIZE, timeout=TIMEOUT.total_seconds())
    yield made
    made.close()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (shrinks, [[(0, 3), (0, 2)], [(1, 3)], [(2, 3), (1, 2)]]),
        (grows_and_falls_apart, [[(0, 1), (rank, 3), (0, 1)] for rank in range(SIZE)]),
        (merges, [[(0, 1), (2, 3), (0, 3)], [(0, 2), (1, 3), (1, 3)], [(1, 2), (0, 3), (2, 3)]]),
        (leaves_and_rejoins, [[(2, 3), (1, 3), (1, 3)], [(0, 3)] * 3, [(1, 3), (2, 3), (2, 3)]]),
        (refuses, [(rank, 3) for rank in range(SIZE)]),
        (fails, [[(rank, 3), (rank, 3)] for rank in range(SIZE)]),
        (recovers, [[(rank, 3), (rank, 3)] for rank in range(SIZE)]),
    ],
)
def test_reconfigure(world: World, case: Callable[[Regime], Any], expected: Any) -> None:
    assert world.run(in_regime, case) == expected


def loses_a_rank(regime: Regime) -> Any:
    handles = regime.handles()
    regime.reconfigure(1, handles)
    regime.meet()
    if regime.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        while True:
            dist.all_reduce(torch.ones(3))
    with pytest.raises(dist.DistBackendError, match="the group stays as it was"):
        regime.reconfigure(2, handles)
    regime.reconfigure(3, [handles[0], handles[2]])
    assert time.monotonic() - begun < 30.0  # far below the time-out
    return checked_sum()


def test_a_dead_rank(new_world: Callable[..., World]) -> None:
    outcomes = new_world(SIZE, timeout=TIMEOUT.total_seconds()).run_raw(in_regime, loses_a_rank)
    assert [outcome.state for outcome in outcomes] == ["returned", "died", "returned"], outcomes
    assert [outcomes[rank].value for rank in (0, 2)] == [(0, 2), (1, 2)]


def without_the_option() -> None:
    assert not dist._supports_reconfigure()
    with pytest.raises(dist.DistBackendError, match="was created without enable_reconfigure"):
        dist._get_reconfigure_handle()


def test_a_group_whose_ranks_stay(new_world: Callable[..., World]) -> None:
    new_world(1).run(without_the_option)
