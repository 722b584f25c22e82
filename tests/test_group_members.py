"""The members of a new group that are lost before they come: the others raise at once, and go on without them."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, error_of
from hosts import run_on_hosts
from test_membership import TIMEOUT, survivors_of

from fog_pg import _known
from fog_pg._extension import load

# In which the others come to the group before a member is lost. Then they wait.
COME = 0.5
WAYS = ["new_group", "without rank 0", "split"]


def make_without(
    victim: int, ways: Sequence[str], ends_first: bool, over_gloo: bool = False
) -> tuple[dict[str, str], float]:
    """Makes groups with a member that is lost, in several ways; then one of the others.

    Args:
        victim: The rank that ends.
        ways: How the groups are made: of `WAYS`.
        ends_first: Whether it ends before the others make the first group, or while they wait for it.
        over_gloo: Whether the default group has another backend, and fog knows the ranks from another group.

    Returns:
        The errors, and the sum of the ranks that are left.
    """
    timeout = timedelta(seconds=TIMEOUT)
    if over_gloo:
        dist.init_process_group("gloo", timeout=timeout)
    known = dist.new_group(timeout=timeout, backend="fog") if over_gloo else dist.group.WORLD
    assert known is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier(known)
    if rank == victim:
        time.sleep(0.0 if ends_first else COME)
        os.kill(os.getpid(), signal.SIGKILL)
    if ends_first:
        backend: Any = _known.backend_of(known)
        backend.watch([victim])
        while victim not in backend.lost_ranks():
            time.sleep(0.01)
    errors = {way: error_of(lambda way=way: make(known, way, list(range(size)))) for way in ways}
    # Not by new_group: from torch 2.14 on, its names count the calls of each rank that are those of a member.
    group = make(known, "split", [each for each in range(size) if each != victim])
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=group)
    return errors, float(x)


def make(known: Any, way: str, members: list[int]) -> Any:
    timeout = timedelta(seconds=TIMEOUT)
    if way == "split":
        return known.split_group(members, timeout=timeout)
    if way == "without rank 0":  # then the ranks have other numbers than in the group that is known
        members = members[1:]
    return dist.new_group(members, timeout=timeout, backend="fog", use_local_synchronization=True)


def check(outcomes: Sequence[tuple[dict[str, str], float]], victim: int, left: Sequence[int]) -> None:
    """Checks what `make_without` has returned on the ranks that are left."""
    for rank, (errors, total) in zip(left, outcomes, strict=True):
        for way, error in errors.items():
            if way == "without rank 0" and rank == 0:
                assert error == ""
            else:
                place = victim - (way == "without rank 0")
                assert f"waited at the step 'rank' of setting up the group for its rank {place}" in error, (
                    error
                )
                assert f"rank {victim} (pid " in error and "is lost or has ended" in error, error
        assert total == sum(left)


# For each way to be on hosts: their placement, and the member that is lost.
PLACEMENTS: dict[str, tuple[list[int], int]] = {
    "one host": ([0, 0, 0, 0], 2),
    "its own host": ([0, 0, 1], 2),
    "another host": ([0, 1, 1], 1),
}


@pytest.mark.parametrize("ends_first", [True, False])
@pytest.mark.parametrize("where", PLACEMENTS)
def test_a_member_that_is_lost_is_not_waited_for(
    new_world: Callable[..., World], tmp_path: Path, where: str, ends_first: bool
) -> None:
    placement, victim = PLACEMENTS[where]
    arguments = (victim, WAYS, ends_first)
    left = [rank for rank in range(len(placement)) if rank != victim]
    if where == "one host":
        outcomes = new_world(len(placement), timeout=TIMEOUT).run_raw(make_without, *arguments)
        values = [outcome.value for outcome in survivors_of(outcomes, {victim: 0.0})]
    else:
        calls, options = [("make_without", arguments)], {"timeout": TIMEOUT, "killed": [victim]}
        found = run_on_hosts(tmp_path, placement, "test_group_members", calls, **options)
        values = [found[rank][0] for rank in left]
    check(values, victim, left)


def test_the_ranks_may_be_known_from_any_group(new_world: Callable[..., World]) -> None:
    world = new_world(3, initialize=False)
    outcomes = world.run_raw(make_without, 2, ["new_group", "without rank 0"], False, True)
    check([outcome.value for outcome in survivors_of(outcomes, {2: 0.0})], 2, [0, 1])


def leave_before(leaver: int) -> str:
    """A rank ends in good order before it comes to a group of all."""
    dist.barrier()
    if dist.get_rank() == leaver:
        dist.destroy_process_group()
        os._exit(0)
    return error_of(lambda: dist.new_group(timeout=timedelta(seconds=TIMEOUT)))


def test_a_member_that_has_ended_is_not_waited_for(new_world: Callable[..., World]) -> None:
    for outcome in new_world(3, timeout=TIMEOUT).run_raw(leave_before, 2)[:2]:
        assert outcome.state == "returned" and "for its rank 2, which will not come" in outcome.value, outcome


STORES: Mapping[str, Callable[[Path], dist.Store]] = {
    "TCPStore": lambda path: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "FileStore": lambda path: dist.FileStore(str(path / "store"), -1),
    "HashStore": lambda path: dist.HashStore(),
}


def gather(
    store: dist.Store, rank: int, size: int, timeout: float, gone: Callable[[Sequence[int]], dict[int, str]]
) -> list[str] | str:
    """Returns what a rank gathers from the others in a step, or the text of its error."""
    rendezvous = load().Rendezvous(store, rank, size, timedelta(seconds=timeout), gone)
    try:
        return rendezvous.allgather("step", f"of {rank}")
    except dist.DistBackendError as error:
        return str(error)


@pytest.mark.parametrize("kind", STORES)
def test_in_every_store(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks wait for a late one and not for one that is gone, and print nothing while they wait."""
    store = dist.PrefixStore("group", STORES[kind](tmp_path))
    is_gone = threading.Event()
    asked: list[Sequence[int]] = []

    def gone(missing: Sequence[int]) -> dict[int, str]:
        asked.append(missing)
        return {rank: "rank 7 of group 'old'" for rank in (2, 3) if is_gone.is_set() and rank in missing}

    with ThreadPoolExecutor() as pool:
        early = [pool.submit(gather, store, rank, 4, TIMEOUT, gone) for rank in (0, 1)]
        while len(asked) < 4:  # they look again and again
            time.sleep(0.01)
        assert not any(each.done() for each in early)
        late = pool.submit(gather, store, 3, 4, TIMEOUT, gone)
        while [2] not in asked:
            time.sleep(0.01)
        assert [2, 3] in asked
        is_gone.set()
        errors = [each.result() for each in (*early, late)]
    assert errors == [
        f"fog: rank {rank} of 4 waited at the step 'step' of setting up the group for its rank 2, which will not come: "
        "rank 7 of group 'old' is lost or has ended"
        for rank in (0, 1, 3)
    ]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", STORES)
def test_the_timeout_holds_all_the_same(kind: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    error = gather(STORES[kind](tmp_path), 0, 2, 0.7, lambda missing: {})
    assert time.monotonic() - begin >= 0.7
    assert "waited for 700 ms at the step 'step'" in error and "not there: rank(s) 1." in error, error


@pytest.mark.parametrize("kind", ["TCPStore", "HashStore"])
def test_a_rank_that_was_lost_after_its_part_counts(kind: str, tmp_path: Path) -> None:
    """All others see the same: what they gather is complete, though the lost rank could not say so."""
    store: Any = STORES[kind](tmp_path)
    store.append("fog/1/step/all", struct.pack("QQ4s", 1, 4, b"of 1"))
    assert gather(store, 0, 2, TIMEOUT, lambda missing: dict.fromkeys(missing, "lost")) == ["of 0", "of 1"]
