"""Ranks that hang, are stopped, or only take long: who is declared lost, who is not, and what happens afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import RUN_TIMEOUT, World, error_of
from hosts import run_on_hosts
from window_interfaces import pids

from fog_pg import _C

pytestmark = pytest.mark.usefixtures("nothing_left")

RANKS = 3
VICTIM = 1
# The harness ends a world before, so that no timeout takes the place of the judgement.
LONG_TIMEOUT = 4 * RUN_TIMEOUT
LOST_AFTER = 2


def test_the_usual_gap_is_that_of_a_random_moment() -> None:
    assert _C.usual_gap([]) == 0
    assert _C.usual_gap([(2.0, 2.0)]) == 2
    # Many short periods with short gaps do not outweigh the long ones in which most of the time passes.
    assert _C.usual_gap([(0.1, 1.0)] * 10 + [(20.0, 20.0)] * 2) >= 20
    # median 2, MAD 1
    assert _C.usual_gap([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]) == pytest.approx(2 + 6 * 1)
    assert _C.usual_gap([(0.5, 1.0)] * 20 + [(30.0, 3.0)]) == pytest.approx(0.5)


# --- the judgement alone, with times that the test chooses --------------------------------------------------

# The signs of a process: its progress, the calls of its program, whether it waits, how long a call usually takes, and
# the age of its oldest operation.
Signs = tuple[int, int, bool, float, float]
NOTHING: Signs = (0, 0, False, 0.0, 0.0)


def goes_on(
    calls: int = 5, waits: bool = False, usual: float = 0.0, age: float = 0.0
) -> Callable[[float], Signs]:
    """Returns the signs of a process whose engine goes on."""
    return lambda now: (round(10 * now), calls, waits, usual, age)


def judge(
    liveness: _C.Liveness, first: float, last: float, signs: Callable[[float], Signs], end: float = 100.0
) -> list[str]:
    """Lets it judge peer 7 every tenth of a second. Returns the verdicts."""
    verdicts = []
    for tenth in range(round(10 * first), round(10 * last) + 1):
        liveness.watch(7, end, True)
        verdicts += liveness.judge(tenth / 10, False, {7: signs(tenth / 10)}).values()
    return verdicts


SILENT = "was lost: its process shows no sign of life for 4 s"
NO_CALL = "was lost: its program made no call for 4 s (usually it takes up to 0.5 s), and its oldest operation is 1.5 s old"
# The limit, the signs, and the time of the only verdict, if there is one in 50 seconds; its text.
VERDICTS: dict[str, tuple[float, Callable[[float], Signs], float, str]] = {
    "a stopped process": (4.0, lambda now: NOTHING, 4.0, SILENT),
    "a program that makes no calls, though its engine goes on": (
        4.0,
        goes_on(usual=0.5, age=1.5),
        4.0,
        NO_CALL,
    ),
    "a program that usually takes longer": (2.0, goes_on(usual=7.0), 7.0, ""),
    "one that takes longer than ten times the limit": (2.0, goes_on(usual=90.0), 20.0, ""),
    "one that waits": (2.0, goes_on(waits=True), 0.0, ""),
    "one that waits in a process that is stopped": (2.0, lambda now: (3, 5, True, 0.0, 0.0), 2.0, ""),
    "nobody, unless the user allows it": (0.0, lambda now: NOTHING, 0.0, ""),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_who_is_lost(name: str) -> None:
    limit, signs, at, text = VERDICTS[name]
    liveness = _C.Liveness(limit)
    assert judge(liveness, 0.0, at - 0.1 if at else 50.0, signs) == []
    # Whoever may be lost is suspect before.
    assert liveness.suspects(7) == (name != "one that waits")
    if at:
        (verdict,) = judge(liveness, at, at, signs) or judge(liveness, at + 0.1, at + 0.1, signs)
        assert verdict == text or not text


def test_silence_counts_only_while_somebody_watches() -> None:
    liveness = _C.Liveness(2.0)
    assert judge(liveness, 0.0, 0.9, lambda now: NOTHING) == [] and not liveness.suspects(7)
    assert judge(liveness, 1.0, 1.9, lambda now: NOTHING) == [] and liveness.suspects(7)
    assert judge(liveness, 30.0, 31.9, lambda now: NOTHING) == []  # this process was stopped in between
    assert len(judge(liveness, 32.0, 32.1, lambda now: NOTHING)) == 1
    unwatched = _C.Liveness(2.0)
    assert judge(unwatched, 0.0, 1.9, lambda now: NOTHING, end=1.0) == []
    assert unwatched.judge(2.0, False, {7: NOTHING}) == {} and not unwatched.suspects(7)


def test_if_all_programs_pause_none_is_late() -> None:
    liveness, hangs = _C.Liveness(2.0), goes_on()
    assert judge(liveness, 0.0, 1.9, hangs) == []
    assert liveness.judge(2.0, True, {7: hangs(2.0)}) == {}
    assert judge(liveness, 2.1, 3.9, hangs) == []
    assert len(judge(liveness, 4.1, 4.2, hangs)) == 1


def test_only_the_process_is_judged_by_those_who_are_patient() -> None:
    liveness = _C.Liveness(2.0)
    verdicts = []
    for tenths in range(90):
        liveness.watch(7, 100.0, False)
        signs = (min(tenths, 59), 5, False, 0.0, 0.0)
        verdicts += [tenths for _ in liveness.judge(tenths / 10, False, {7: signs})]
    assert len(verdicts) == 1 and verdicts[0] >= 79, verdicts


# --- real ranks ---------------------------------------------------------------------------------------------


SETTING = {"FOG_LOST_AFTER": str(LOST_AFTER), "FOG_BETWEEN_HOSTS": "tcp"}


@pytest.fixture
def world(new_world: Callable[..., World]) -> World:
    return new_world(RANKS, timeout=LONG_TIMEOUT, environment=SETTING)


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


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


def await_losses(expected: list[int]) -> list[int]:
    """Waits until these ranks are lost: a rank may hear of the failure from another one, before its own verdict."""
    while backend().lost_ranks() != expected:
        time.sleep(0.05)
    return expected


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
@pytest.mark.parametrize("way", ["memory", "tcp", "rma"])
def test_a_rank_that_stops_or_hangs_is_lost_and_learns_it_when_it_returns(
    new_world: Callable[..., World], tmp_path: Path, way: str, stopped: bool, fifo: str
) -> None:
    if way != "memory":
        setting = SETTING | {"FOG_BETWEEN_HOSTS": way, "UCX_TLS": "shm,self"}
        calls = [("lose_the_victim", [stopped, fifo])]
        found = run_on_hosts(
            tmp_path, [0, 1, 2], "test_hangs", calls, timeout=LONG_TIMEOUT, environment=setting
        )
        outcomes = [outcome for (outcome,) in found]
    else:
        outcomes = new_world(RANKS, timeout=LONG_TIMEOUT, environment=SETTING).run(
            lose_the_victim, stopped, fifo
        )
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


def quarantine(returns: bool) -> int:
    """The victim stops with windows, perhaps returns, and is killed. Returns how many windows' memory is kept before."""
    rank, all_pids = dist.get_rank(), pids()
    others = [r for r in range(RANKS) if r != rank]
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(1000)
    # When the victim returns, its windows are closed one after the other, perhaps by another thread. It uses the last.
    windows = [backend().create_window(torch.ones(1000), f"w{i}", others, others) for i in range(100)]
    window = windows[-1]
    window.put(tensor, [(r, 1.0) for r in others]).wait()
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)
        store.set("refused", error_of(lambda: window.put(tensor, [(r, 1.0) for r in others]).wait()))
        time.sleep(LONG_TIMEOUT)
    while backend().lost_ranks() != [VICTIM]:
        window.version(VICTIM)  # the program goes on with its neighbors
        time.sleep(0.05)
    assert window.is_gone(VICTIM)
    assert "was lost" in error_of(lambda: window.put(tensor, [(VICTIM, 1.0)]).wait())
    window.put(tensor, [(r, 1.0) for r in others], skip_lost=True).wait()
    window.free()
    kept = _C.bookkeeping()["deferred_windows"]
    living = dist.new_group([r for r in range(RANKS) if r != VICTIM], use_local_synchronization=True)
    dist.barrier(living)
    if returns:
        if rank == 0:
            os.kill(all_pids[VICTIM], signal.SIGCONT)
        assert b"counts this rank as lost" in store.get("refused")
        dist.barrier(living)
    if rank == 0:
        os.kill(all_pids[VICTIM], signal.SIGKILL)
    while _C.bookkeeping()["deferred_windows"] > 0:
        time.sleep(0.05)
    return kept


@pytest.mark.parametrize("returns", [False, True])
def test_memory_that_a_lost_rank_may_still_write_to_is_kept(world: World, returns: bool) -> None:
    """Until its process has ended, and it is refused if it returns."""
    outcomes = world.run_raw(quarantine, returns)
    assert outcomes[VICTIM].state == "died", "\n".join(map(str, outcomes))
    assert [o.value for o in outcomes if o.rank != VICTIM] == [1, 1], "\n".join(map(str, outcomes))


def rest() -> int:
    """Shares a window and does nothing for longer than a hang may take. Returns how often a thread woke up."""
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
    return after.ru_nvcsw - before.ru_nvcsw


def test_an_idle_job_uses_no_cpu_and_nobody_is_lost(world: World) -> None:
    assert max(world.run(rest)) < 100


def test_nothing_is_lost_by_default(new_world: Callable[..., World]) -> None:
    assert new_world(1).run(default_settings) == [(0.0, [], [])]


def default_settings() -> tuple[float, list[int], list[int]]:
    default = backend().lost_after
    with pytest.raises(ValueError, match="lost_after: got -1"):
        backend().lost_after = -1
    backend().lost_after = 2.5
    assert backend().lost_after == 2.5
    return default, backend().lost_ranks(), backend().suspect_ranks()
