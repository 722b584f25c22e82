"""Ranks that hang, are stopped, or only take long: who is declared lost, who is not, and what happens afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, error_of
from hosts import run_on_hosts

from fog_pg import _C

pytestmark = [
    pytest.mark.skipif(BACKEND != "fog", reason="only fog detects hangs"),
    pytest.mark.usefixtures("nothing_left"),
]

RANKS = 3
VICTIM = 1
# Much longer than any of these tests may take, so that no timeout takes the place of the judgement.
LONG_TIMEOUT = 60.0
LOST_AFTER = 2
NOTHING = (0, 0, False, 0.0, 0.0)


# The judgement alone, with times that the test chooses


def judge(liveness: _C.Liveness, times: Iterator[float], signs: object, end: float = 100.0) -> list[str]:
    """Lets it judge peer 7 at these times; `signs` gives its signs at a time. Returns the verdicts."""
    verdicts = []
    for now in times:
        liveness.watch(7, end, True)
        verdicts += liveness.judge(now, False, {7: signs(now)}).values()  # type: ignore[operator]
    return verdicts


def steps(first: float, last: float) -> Iterator[float]:
    return iter([first + 0.1 * k for k in range(round((last - first) / 0.1) + 1)])


def test_the_usual_gap_is_that_of_a_random_moment() -> None:
    assert _C.usual_gap([]) == 0
    assert _C.usual_gap([(2.0, 2.0)]) == 2
    # Many short periods with short gaps do not outweigh the long ones in which most of the time passes.
    assert _C.usual_gap([(0.1, 1.0)] * 10 + [(20.0, 20.0)] * 2) >= 20
    # median 2, MAD 1
    assert _C.usual_gap([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]) == pytest.approx(2 + 6 * 1)
    assert _C.usual_gap([(0.5, 1.0)] * 20 + [(30.0, 3.0)]) == pytest.approx(0.5)


def test_a_stopped_process_is_first_suspect_then_lost() -> None:
    liveness = _C.Liveness(4.0)
    assert judge(liveness, steps(0, 1.9), lambda now: NOTHING) == [] and not liveness.suspects(7)
    assert judge(liveness, steps(2, 3.9), lambda now: NOTHING) == [] and liveness.suspects(7)
    (verdict,) = judge(liveness, steps(4, 4), lambda now: NOTHING)
    assert verdict == "was lost: its process shows no sign of life for 4 s"


def test_a_program_that_makes_no_calls_is_lost_though_its_engine_goes_on() -> None:
    def hangs(now: float) -> tuple[int, int, bool, float, float]:
        return round(10 * now), 5, False, 0.5, 1.5

    liveness = _C.Liveness(4.0)
    assert judge(liveness, steps(0, 3.9), hangs) == []
    (verdict,) = judge(liveness, steps(4, 4), hangs)
    assert verdict == (
        "was lost: its program made no call for 4 s (usually it takes up to 0.5 s), and its oldest operation is 1.5 s old"
    )


def test_a_program_may_take_as_long_as_it_usually_does_up_to_a_limit() -> None:
    def slow(usual: float) -> object:
        return lambda now: (round(10 * now), 5, False, usual, 0.0)

    liveness = _C.Liveness(2.0)
    assert judge(liveness, steps(0, 6.9), slow(7.0)) == []
    assert len(judge(liveness, steps(7, 7.1), slow(7.0))) == 1
    assert judge(_C.Liveness(2.0), steps(0, 19.9), slow(90.0)) == []
    assert len(judge(_C.Liveness(2.0), steps(0, 20.1), slow(90.0))) == 1


def test_a_program_that_waits_is_excused_but_its_process_is_not() -> None:
    def waits(now: float) -> tuple[int, int, bool, float, float]:
        return round(10 * now), 5, True, 0.0, 0.0

    assert judge(_C.Liveness(2.0), steps(0, 50), waits) == []
    assert len(judge(_C.Liveness(2.0), steps(0, 2.1), lambda now: (3, 5, True, 0.0, 0.0))) == 1


def test_silence_counts_only_while_somebody_watches() -> None:
    liveness = _C.Liveness(2.0)
    assert judge(liveness, steps(0, 1.9), lambda now: NOTHING) == []
    assert judge(liveness, steps(30, 31.9), lambda now: NOTHING) == []  # this process was stopped in between
    assert len(judge(liveness, steps(32, 32.1), lambda now: NOTHING)) == 1
    unwatched = _C.Liveness(2.0)
    assert judge(unwatched, steps(0, 1.9), lambda now: NOTHING, end=1.0) == []
    assert unwatched.judge(2.0, False, {7: NOTHING}) == {} and not unwatched.suspects(7)


def test_if_all_programs_pause_none_is_late() -> None:
    def hangs(now: float) -> tuple[int, int, bool, float, float]:
        return round(10 * now), 5, False, 0.0, 0.0

    liveness = _C.Liveness(2.0)
    assert judge(liveness, steps(0, 1.9), hangs) == []
    assert liveness.judge(2.0, True, {7: hangs(2.0)}) == {}
    assert judge(liveness, steps(2.1, 3.9), hangs) == []
    assert len(judge(liveness, steps(4.1, 4.2), hangs)) == 1


def test_only_the_process_is_judged_by_those_who_are_patient() -> None:
    liveness = _C.Liveness(2.0)
    for tenths in range(60):
        liveness.watch(7, 100.0, False)
        assert liveness.judge(tenths / 10, False, {7: (tenths, 5, False, 0.0, 0.0)}) == {}
    assert (
        len([t for t in range(60, 90) if liveness.judge(t / 10, False, {7: (59, 5, False, 0.0, 0.0)})]) == 1
    )


def test_nobody_is_lost_unless_the_user_allows_it() -> None:
    liveness = _C.Liveness(0.0)
    assert judge(liveness, steps(0, 20), lambda now: NOTHING) == [] and liveness.suspects(7)


# Real ranks


@pytest.fixture
def world() -> Iterator[World]:
    world = World(RANKS, timeout=LONG_TIMEOUT, environment={"FOG_LOST_AFTER": str(LOST_AFTER)})
    yield world
    world.close()


def backend() -> _C.ProcessGroupFog:
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr,return-value]


def compute() -> None:
    """Takes longer than a hang may: sleeps in C with the GIL."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(round(1.6e6 * LOST_AFTER)))


def hold_the_gil(fifo: str) -> None:
    """Waits in C with the GIL until `let_go`: no Python thread runs, the threads of the backend do."""
    end = os.open(fifo, os.O_RDWR)
    assert ctypes.PyDLL(None).read(end, ctypes.create_string_buffer(1), 1) == 1
    os.close(end)


def let_go(fifo: str) -> None:
    Path(fifo).write_bytes(b"x")


def pids() -> list[int]:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([os.getpid()]))
    return [int(pid.item()) for pid in found]


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


def await_losses(expected: list[int]) -> list[int]:
    """Waits until these ranks are lost: a rank may hear of the failure from another one, before its own verdict."""
    deadline = time.monotonic() + LONG_TIMEOUT / 2
    while backend().lost_ranks() != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return backend().lost_ranks()


def lose_the_victim(stopped: bool, fifo: str) -> tuple[str, list[int], str]:
    """The victim stops or hangs while the others wait for it, and goes on after they have gone on without it.

    Returns the error of the operation, the lost ranks, and the error of a later operation of the same group.
    """
    rank, all_pids = dist.get_rank(), pids()
    living = dist.new_group([r for r in range(RANKS) if r != VICTIM])
    if rank == VICTIM:
        if stopped:
            os.kill(os.getpid(), signal.SIGSTOP)  # a survivor continues it
        else:
            hold_the_gil(fifo)
        error = error_of(lambda: dist.all_reduce(torch.ones(5)))
        return error, [], error_of(lambda: dist.all_reduce(torch.ones(5)))
    error = error_of(lambda: dist.all_reduce(torch.ones(5)))
    lost = await_losses([VICTIM])
    total = torch.full((5,), float(rank))
    dist.all_reduce(total, group=living)
    assert total.tolist() == [2.0] * 5
    if rank == 0 and stopped:
        os.kill(all_pids[VICTIM], signal.SIGCONT)
    elif rank == 0:
        let_go(fifo)
    return error, lost, error_of(lambda: dist.all_reduce(torch.ones(5)))


@pytest.mark.parametrize("stopped", [True, False])
def test_a_rank_that_stops_or_hangs_is_lost_and_learns_it_when_it_returns(
    world: World, stopped: bool, fifo: str
) -> None:
    check_losses(world.run(lose_the_victim, stopped, fifo), stopped)


@pytest.mark.parametrize("stopped", [True, False])
def test_a_rank_of_another_host_that_stops_or_hangs(tmp_path: Path, stopped: bool, fifo: str) -> None:
    calls = [("lose_the_victim", [stopped, fifo])]
    found = run_on_hosts(
        tmp_path, [0, 1, 2], "test_hangs", calls, environment={"FOG_LOST_AFTER": str(LOST_AFTER)}
    )
    check_losses([outcome for (outcome,) in found], stopped)


def check_losses(outcomes: list[tuple[str, list[int], str]], stopped: bool) -> None:
    how = "its process shows no sign of life" if stopped else r"its program made no call for .* s \(usually"
    for rank, (error, lost, later) in enumerate(outcomes):
        if rank == VICTIM:
            assert "counts this rank as lost" in error and "counts this rank as lost" in later, (error, later)
        else:
            assert re.search(rf"rank {VICTIM} \(pid .*\) was lost: {how}", error), error
            assert lost == [VICTIM]
            assert "takes no more work" in later


def evaluate_on_one_rank(how: str) -> tuple[list[float], list[int]]:
    """The victim computes for long while the others wait for it."""
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    patient = timedelta(seconds=2 * LONG_TIMEOUT) if how == "patient" else None
    if dist.get_rank() == VICTIM:
        with fogdist.suspend_detection() if how == "suspended" else contextlib.nullcontext():
            compute()
    backend().allreduce_named(tensor, dist.ReduceOp.SUM, name="after it", timeout=patient).wait()
    return tensor.tolist(), backend().lost_ranks()


@pytest.mark.parametrize("how", ["suspended", "patient"])
def test_a_long_evaluation_is_no_hang(world: World, how: str) -> None:
    assert world.run(evaluate_on_one_rank, how) == [([9.0] * 5, [])] * RANKS


def chain(fifo: str) -> tuple[str, list[int]]:
    """Rank 2 waits for rank 1, which waits for rank 0, which hangs."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == 0:
        hold_the_gil(fifo)
        return "", []
    error = error_of(lambda: dist.recv(torch.zeros(1), rank - 1))
    if rank == 1:
        let_go(fifo)
    return error, backend().lost_ranks()


def test_a_rank_that_waits_for_a_hung_one_is_not_taken_for_hung(world: World, fifo: str) -> None:
    _, (first, first_lost), (second, second_lost) = world.run(chain, fifo)
    assert "rank 0 (" in first and "was lost" in first and first_lost == [0]
    assert "rank 1 reports" in second and 1 not in second_lost


def quarantine() -> list[int]:
    """The victim stops with a window. Returns the number of windows whose memory is kept: before and after its end."""
    rank, all_pids = dist.get_rank(), pids()
    others = [r for r in range(RANKS) if r != rank]
    tensor = torch.ones(1000)
    window = backend().create_window(tensor, "w", others, others)
    window.put(tensor, [(r, 1.0) for r in others]).wait()
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)  # never continued: a survivor kills it
        return []
    deadline = time.monotonic() + LONG_TIMEOUT
    while backend().lost_ranks() != [VICTIM] and time.monotonic() < deadline:
        window.version(VICTIM)  # the program goes on with its neighbors
        time.sleep(0.05)
    assert backend().lost_ranks() == [VICTIM] and window.is_gone(VICTIM)
    assert "was lost" in error_of(lambda: window.put(tensor, [(VICTIM, 1.0)]).wait())
    window.put(tensor, [(r, 1.0) for r in others], skip_lost=True).wait()
    window.free()
    kept = [_C.bookkeeping()["deferred_windows"]]
    if rank == 0:
        os.kill(all_pids[VICTIM], signal.SIGKILL)
    while _C.bookkeeping()["deferred_windows"] > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    return [*kept, _C.bookkeeping()["deferred_windows"]]


def test_memory_that_a_lost_rank_may_still_write_to_is_kept_until_its_process_ends() -> None:
    world = World(RANKS, timeout=LONG_TIMEOUT, environment={"FOG_LOST_AFTER": str(LOST_AFTER)})
    outcomes = world.run_raw(quarantine)
    assert [o.state for o in outcomes] == ["returned", "died", "returned"], "\n".join(map(str, outcomes))
    assert [o.value for o in outcomes if o.rank != VICTIM] == [[1, 0], [1, 0]]
    world.abandon()


def return_to_a_window() -> str:
    """The victim stops with a window and is continued. Returns the error of its next put."""
    rank, all_pids = dist.get_rank(), pids()
    others = [r for r in range(RANKS) if r != rank]
    tensor = torch.ones(1000)
    window = backend().create_window(tensor, "w", others, others)
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)
        return error_of(lambda: window.put(tensor, [(r, 1.0) for r in others]).wait())
    deadline = time.monotonic() + LONG_TIMEOUT
    while backend().lost_ranks() != [VICTIM] and time.monotonic() < deadline:
        window.version(VICTIM)
        time.sleep(0.05)
    if rank == 0:
        os.kill(all_pids[VICTIM], signal.SIGCONT)
    return ""


def test_a_lost_rank_that_returns_to_its_windows_is_refused(world: World) -> None:
    assert "counts this rank as lost" in world.run(return_to_a_window)[VICTIM]


def rest() -> tuple[float, int]:
    """Shares a window and does nothing for longer than a hang may take. Returns the CPU seconds and wake-ups of it."""
    rank = dist.get_rank()
    others = [r for r in range(RANKS) if r != rank]
    tensor = torch.ones(10)
    window = backend().create_window(tensor, "w", others, others)
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1.5 * LOST_AFTER)
    after = resource.getrusage(resource.RUSAGE_SELF)
    lost = backend().lost_ranks()
    dist.barrier()
    window.free()
    assert lost == []
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, after.ru_nvcsw - before.ru_nvcsw


def test_an_idle_job_uses_no_cpu_and_nobody_is_lost(world: World) -> None:
    for seconds, wakeups in world.run(rest):
        assert seconds < 0.1 and wakeups < 100


def test_nothing_is_lost_by_default() -> None:
    world = World(1, timeout=LONG_TIMEOUT)
    assert world.run(default_settings) == [(0.0, [], [])]
    world.close()


def default_settings() -> tuple[float, list[int], list[int]]:
    default = backend().lost_after
    with pytest.raises(ValueError, match="lost_after: got -1"):
        backend().lost_after = -1
    backend().lost_after = 2.5
    assert backend().lost_after == 2.5
    return default, backend().lost_ranks(), backend().suspect_ranks()
