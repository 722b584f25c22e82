"""Ranks end in every order and in every way: none hangs or crashes, exit statuses are right, and nothing is left
behind.

The functions below are main programs: each rank runs one in a process that has no group yet, and ends as Python ends a
script, while objects of the program are still alive. A program that ends only at the timeout of its group fails a test.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import RUN_TIMEOUT, World

pytestmark = pytest.mark.usefixtures("nothing_left")

LONG_TIMEOUT = 4 * RUN_TIMEOUT
WATCHDOG_SECONDS = 20.0
OVER_MPI = {"_FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "rma"}

# Objects that stay alive until the end, like globals of a script.
kept: list[Any] = []


def as_main_program(body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Runs a body as the main program of this process, and then ends the process as Python does."""
    rank = int(os.environ["RANK"])
    try:
        harness.init_process_group(LONG_TIMEOUT)
        body(rank, *arguments)
        status = 0
    except SystemExit as error:
        kept.append(error)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        kept.append(error)  # like sys.last_exc, it keeps its frames alive until the end
        sys.excepthook(type(error), error, error.__traceback__)
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    # This ends a finalization that hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WATCHDOG_SECONDS)
    ctypes.pythonapi.Py_Exit(status)


# Runs a body on so many ranks; returns the exit status of each, minus the number of a signal that killed it, and its
# output.
Run = Callable[..., tuple[list[int], list[str]]]


@pytest.fixture
def run_programs(new_world: Callable[..., World]) -> Run:
    def run(
        size: int, body: Callable[..., None], *arguments: Any, environment: dict[str, str] | None = None
    ) -> tuple[list[int], list[str]]:
        statuses, printed = [], []
        world = new_world(size, initialize=False, environment=environment)
        for outcome in world.run_raw(as_main_program, body, arguments):
            assert outcome.state == "died", str(outcome)
            found = re.match(r"process ended with (?:status (\d+)|signal (\w+))\n", outcome.details)
            assert found, outcome.details
            statuses.append(int(found[1]) if found[1] else -signal.Signals[found[2]])
            printed.append(outcome.details[found.end() :])
            for word in ("terminate", "Fatal"):
                assert word not in printed[-1], printed[-1]
        return statuses, printed

    return run


def sum_of_ones() -> float:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return tensor[-1].item()


def meet(rank: int, name: str) -> None:
    """Waits for the other one of two ranks without using the group."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{rank}", "")
    store.wait([f"{name}/{1 - rank}"])


# --- good ends ----------------------------------------------------------------------------------------------


# How a rank leaves: the seconds that it waits first, whether it destroys its groups, and its last statement.
Leaving = tuple[float, bool, str]


def leave(rank: int, manners: list[Leaving]) -> None:
    delay, destroy, end = manners[rank]
    kept.append(dist.new_group())
    dist.barrier(kept[0])
    assert sum_of_ones() == len(manners)
    time.sleep(delay)
    if destroy:
        dist.destroy_process_group()
    if end == "sys.exit":
        sys.exit(rank + 3)


def destroy_piecewise(rank: int) -> None:
    """Ranks destroy groups in different orders, and one group while there is still a reference to it."""
    groups = [dist.new_group(), dist.new_group([0, 1])]
    kept.append(groups[0])
    for group in groups:
        dist.barrier(group)
    if rank == 0:
        dist.destroy_process_group(groups[1])
        dist.destroy_process_group(groups[0])
        assert sum_of_ones() == 2
        dist.destroy_process_group()
    else:
        assert sum_of_ones() == 2
        dist.destroy_process_group()  # destroys all groups
        del groups


def register_exits(rank: int) -> None:
    """Exit functions run in reverse order: fog's own comes between these two."""
    atexit.register(lambda: sum_of_ones() == 2 or os._exit(9))
    atexit.register(lambda: dist.barrier())
    dist.barrier()


def destroy_after_fog_ended(rank: int) -> None:
    dist.barrier()
    # Runs after fog's own exit function, like one that was registered before the first group.
    from fog_pg import _C

    _C.shutdown()
    atexit.register(dist.destroy_process_group)
    with pytest.raises(dist.DistBackendError, match="destroyed"):
        dist.barrier()


def wait_in_a_thread(rank: int) -> None:
    """A daemon thread waits for an operation that never completes."""
    assert sum_of_ones() == 2
    waiting = threading.Event()

    def wait() -> None:
        work = dist.irecv(torch.zeros(4), 1 - rank)
        waiting.set()
        with contextlib.suppress(dist.DistBackendError):
            work.wait()

    threading.Thread(target=wait, daemon=True).start()
    assert waiting.wait(RUN_TIMEOUT)
    meet(rank, "waits")  # both ranks wait before one leaves and ends the group
    time.sleep(0.1 * rank)


GOOD_ENDS: dict[str, tuple[int, Callable[..., None], tuple[Any, ...]]] = {
    "all destroy": (3, leave, ([(0.0, True, "return")] * 3,)),
    "nobody destroys": (3, leave, ([(0.0, False, "return")] * 3,)),
    "rank 0 first, destroys": (2, leave, ([(0.0, True, "return"), (0.4, True, "return")],)),
    "rank 0 first, does not destroy": (2, leave, ([(0.0, False, "return"), (0.4, True, "return")],)),
    "rank 0 last": (3, leave, ([(0.4, True, "return"), (0.0, False, "return"), (0.2, False, "return")],)),
    "one after the other": (3, leave, ([(0.3 * rank, False, "return") for rank in range(3)],)),
    "sys.exit": (3, leave, ([(0.0, False, "sys.exit"), (0.2, True, "sys.exit"), (0.0, True, "sys.exit")],)),
    "groups in different orders": (2, destroy_piecewise, ()),
    "exit functions": (2, register_exits, ()),
    "after fog has ended": (2, destroy_after_fog_ended, ()),
    "a thread waits": (2, wait_in_a_thread, ()),
}


@pytest.mark.parametrize("name", GOOD_ENDS)
def test_good_ends(run_programs: Run, name: str) -> None:
    size, body, arguments = GOOD_ENDS[name]
    statuses, printed = run_programs(size, body, *arguments)
    assert statuses == [rank + 3 if name == "sys.exit" else 0 for rank in range(size)], printed
    for text in printed:
        for word in ("Traceback", "fog:", "lost", "MPI", "UCX"):
            assert word not in text, text


def end_early(rank: int, destroy: bool) -> None:
    """Rank 2 ends; the others work on in their own group, and learn of it in that of all."""
    pair = dist.new_group([0, 1])
    assert sum_of_ones() == 3
    if rank == 2:
        if destroy:
            dist.destroy_process_group()
        return
    for _ in range(20):
        tensor = torch.ones(20_000)
        dist.all_reduce(tensor, group=pair)
        assert tensor[0].item() == 2
    with pytest.raises(dist.DistBackendError, match="rank 2"):
        dist.recv(torch.zeros(1), 2)
    with pytest.raises(dist.DistBackendError, match="rank 2"):
        dist.barrier()
    dist.barrier(pair)


@pytest.mark.parametrize("destroy", [True, False])
def test_one_ends_early(run_programs: Run, destroy: bool) -> None:
    statuses, printed = run_programs(3, end_early, destroy)
    assert statuses == [0, 0, 0] and not any("lost" in text for text in printed), printed


# --- bad ends -----------------------------------------------------------------------------------------------


def exit_with_operations(rank: int, who: list[int]) -> None:
    """The ranks of `who` leave at once, and the others wait for them."""
    assert sum_of_ones() == 2
    peer = 1 - rank
    kept.append(dist.irecv(torch.zeros(4), peer, tag=7))
    kept.append(dist.irecv(torch.zeros(4), tag=9))
    kept.append(dist.isend(torch.ones(500_000), peer, tag=8))
    kept[0].get_future().then(kept.append)  # runs, with the error, while Python ends
    meet(rank, "started")  # both ranks have started all this before one leaves and ends the group
    if rank in who:
        sys.exit(4)
    kept[0].wait()


@pytest.mark.parametrize("who", [[0, 1], [0], [1]])
def test_exit_with_operations_in_flight(run_programs: Run, who: list[int]) -> None:
    statuses, printed = run_programs(2, exit_with_operations, who)
    assert statuses == [4 if rank in who else 1 for rank in range(2)], printed
    for rank in {0, 1} - set(who):
        assert "DistBackendError" in printed[rank] and f"rank {1 - rank}" in printed[rank], printed[rank]


def end_badly(rank: int, how: str) -> None:
    """Rank 1 of 3 ends in the middle of work that the others go on with; rank 2 catches its error."""
    assert sum_of_ones() == 3
    try:
        for step in itertools.count():
            if rank == 1 and step == 20:
                if how == "exception":
                    raise LookupError("no such thing")
                if how == "sys.exit":
                    sys.exit(6)
                if how == "os._exit":
                    os._exit(5)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(50_000))
    except dist.DistBackendError as error:
        if rank == 0:
            raise
        print(f"DistBackendError: {error}")
        dist.destroy_process_group()
        sys.exit(8)


@pytest.mark.parametrize(
    ("how", "status"),
    [("exception", 1), ("sys.exit", 6), ("os._exit", 5), ("SIGKILL", -9)],
)
def test_bad_ends(run_programs: Run, how: str, status: int) -> None:
    statuses, printed = run_programs(3, end_badly, how)
    assert statuses == [1, status, 8], "\n".join(printed)
    if how == "exception":
        assert "LookupError: no such thing" in printed[1]
    announced = how in ("exception", "sys.exit")  # in these cases the rank could announce its end
    for survivor in (printed[0], printed[2]):
        error = re.search(r"DistBackendError: (.*)", survivor)
        assert error and "rank 1" in error[1], survivor
        if announced:
            assert "ended" in error[1], survivor
        else:
            said = re.search(r"^fog: .*lost rank 1 \(pid \d+", survivor, re.MULTILINE)
            assert said and "lost" in error[1], survivor


def end_by(rank: int, number: signal.Signals) -> None:
    """Rank 0 gets a signal while it waits for rank 1, which waits for its end."""
    dist.barrier()
    if rank == 0:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)  # nohup may have set another handler
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        dist.recv(torch.zeros(1), 1)
    with pytest.raises(dist.DistBackendError, match="rank 0"):
        dist.recv(torch.zeros(1), 0)


def test_an_interrupt_ends_a_program_as_it_ends_others(run_programs: Run) -> None:
    statuses, printed = run_programs(2, end_by, signal.SIGINT)
    assert statuses == [128 + signal.SIGINT, 0] and "KeyboardInterrupt" in printed[0], printed


def test_a_hangup_ends_a_rank(run_programs: Run) -> None:
    """A rank gets it when its terminal closes. Unless told not to, UCX, below MPI, uses it for its debug mode."""
    statuses, printed = run_programs(2, end_by, signal.SIGHUP, environment=OVER_MPI)
    assert statuses == [-signal.SIGHUP, 0], printed
