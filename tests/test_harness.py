"""Tests of the harness: its reports, and that nothing hangs or is left behind."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import leftovers
import pytest
import torch
import torch.distributed as dist
from harness import RankFailures, World, WorldPool


def fork_server_state() -> tuple[int, str, int | None]:
    from torch._inductor import config

    status = Path(f"/proc/{os.getppid()}/status").read_text()
    maps = Path(f"/proc/{os.getppid()}/maps").read_text()
    return int(status.partition("Threads:")[2].split()[0]), maps, config.compile_threads


def test_the_fork_server_has_torch_but_no_threads_and_no_mpi(worlds: WorldPool) -> None:
    threads, maps, compilers = worlds(1).run(fork_server_state)[0]
    assert threads == 1
    assert compilers == 1, "others would be processes that outlive a rank which is killed"
    assert "libtorch_cpu" in maps
    assert "mpi" not in maps.lower()


def add(number: int) -> torch.Tensor:
    tensor = torch.tensor([dist.get_rank() + number])
    dist.all_reduce(tensor)
    return tensor


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("something said before")
        raise dist.DistBackendError("no luck")


def test_run_returns_results_and_reports_errors(worlds: WorldPool) -> None:
    assert worlds(2).run(add, 5) == [11, 11]
    with pytest.raises(RankFailures, match="1 of 2 ranks failed") as failure:
        worlds(2).run(fail_on, 1)
    assert isinstance(failure.value.outcomes[1].error, dist.DistBackendError)
    assert all(text in str(failure.value) for text in ("no luck", "fail_on", "something said before"))
    assert worlds(2).run(add, 1) == [3, 3]  # in a new world


def kill_myself(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_death_of_a_rank_is_reported(new_world: Callable[..., World]) -> None:
    world = new_world(2)
    outcomes = world.run_raw(kill_myself, 0)
    assert [o.state for o in outcomes] == ["died", "returned"]
    assert "SIGSEGV" in str(outcomes[0]) and "kill_myself" in str(outcomes[0])
    assert world.living() == [1]
    assert [o.rank for o in world.run_raw(fail_on, 0)] == [1]


def sleep_forever() -> None:
    while True:
        time.sleep(60)


def test_stuck_ranks_are_killed_and_show_their_stacks(new_world: Callable[..., World]) -> None:
    world = new_world(2)
    outcomes = world.run_raw(sleep_forever, timeout=0.5)
    assert [o.state for o in outcomes] == ["stuck", "stuck"]
    assert "in sleep_forever" in str(outcomes[1])
    assert world.broken and not world.living()


def crash_at_exit() -> None:
    if dist.get_rank() == 1:
        atexit.register(os.abort)


def test_crash_at_teardown_is_reported() -> None:
    world = World(2)
    world.run(crash_at_exit)
    with pytest.raises(RankFailures, match="SIGABRT"):
        world.close()


def leave_a_process() -> int:
    return subprocess.Popen(["sleep", "60"]).pid


def test_leftover_processes_are_found_and_killed_with_a_broken_world() -> None:
    world = World(1)
    left = world.run(leave_a_process)[0]
    deadline = time.monotonic() + 10
    while not leftovers.leftover_processes()[left] and time.monotonic() < deadline:
        time.sleep(0.01)  # for a moment, the new program has no arguments
    assert leftovers.leftover_processes()[left] == "sleep 60"
    world.abandon()
    assert left not in leftovers.leftover_processes()


@pytest.mark.parametrize("prefix", ["cuda.shm.", "nccl-"])
def test_shared_memory_of_gpu_libraries_does_not_count(prefix: str) -> None:
    entry = leftovers.DIRECTORY / f"{prefix}fog-test-{os.getpid()}"
    try:
        entry.touch()
        assert entry.name not in leftovers.shared_memory_entries()
    finally:
        entry.unlink()


def test_shared_memory_that_a_process_uses_is_not_left_behind() -> None:
    before = leftovers.shared_memory_entries()
    entry = leftovers.DIRECTORY / f"fog-test-{os.getpid()}"
    try:
        with entry.open("wb"):
            assert leftovers.shared_memory_entries() - before >= {entry.name}
            assert leftovers.in_use({entry.name}) == {entry.name}
            assert not leftovers.left_behind(before, worlds_run=True)
        assert leftovers.in_use({entry.name}) == set()
    finally:
        entry.unlink()


def leave_shared_memory() -> str:
    entry = leftovers.DIRECTORY / f"mpich_shm_{os.getpid()}_0"
    entry.write_bytes(b"of a rank that is killed")
    return entry.name


def test_shared_memory_that_a_killed_rank_leaves_is_found(new_world: Callable[..., World]) -> None:
    before = leftovers.shared_memory_entries()
    world = new_world(1, initialize=False)
    (name,) = world.run(leave_shared_memory)
    try:
        world.kill(0)
        assert name in leftovers.left_behind(before, worlds_run=True, settle=0.2)
    finally:
        (leftovers.DIRECTORY / name).unlink()
    assert not leftovers.left_behind(before, worlds_run=True)


def test_shared_memory_that_other_programs_leave_does_not_count() -> None:
    """Dead ranks of an unrelated MPI job leave such entries."""
    outside = leftovers.directory_of_others()
    if outside is None:
        pytest.skip("this user may not make a mount namespace, in which /dev/shm is the tests' alone")
    before = leftovers.shared_memory_entries()
    name = f"mpich_shm_{os.getpid()}_0"
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=outside))
    try:
        assert name in os.listdir(outside)
        assert not leftovers.left_behind(before, worlds_run=True, settle=0.2)
    finally:
        os.unlink(name, dir_fd=outside)
