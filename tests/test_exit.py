"""Ranks end in every order and in every way: none hangs or crashes, exit statuses are right, and nothing is left
behind.

The functions below are main programs: each rank runs one in a process that has no group yet, and ends as Python ends a
script, while objects of the program are still alive.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Outcome, World

pytestmark = [
    pytest.mark.skipif(BACKEND != "fog", reason="tests how fog ends"),
    pytest.mark.usefixtures("nothing_left"),
]

# Much longer than any of these tests may take, so a program that ends only at the timeout fails the test.
LONG_TIMEOUT = 60.0
SOON = 5.0
WATCHDOG_SECONDS = 20.0

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
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # This ends a finalization that hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WATCHDOG_SECONDS)
    ctypes.pythonapi.Py_Exit(status)


class Ended:
    """The end of a rank's process.

    Attributes:
        status: Exit status; minus the signal's number if a signal killed the process.
        printed: The output.
        seconds: Seconds from the start of the body to the end of the process.
    """

    def __init__(self, outcome: Outcome) -> None:
        assert outcome.state == "died", str(outcome)
        found = re.match(r"process ended with (?:status (\d+)|signal (\w+))\n", outcome.details)
        assert found, outcome.details
        self.status = int(found[1]) if found[1] else -signal.Signals[found[2]]
        self.printed = outcome.details[found.end() :]
        self.seconds = outcome.seconds

    def assert_quiet(self) -> None:
        """Checks that the process printed no complaints."""
        for word in ("Traceback", "terminate", "Fatal", "fog:", "lost", "MPI", "UCX"):
            assert word not in self.printed, self.printed


Run = Callable[..., list[Ended]]


@pytest.fixture
def run_programs(new_world: Callable[..., World]) -> Run:
    """Returns a function that runs a body on `size` ranks and returns how each ended."""

    def run(size: int, body: Callable[..., None], *arguments: Any) -> list[Ended]:
        world = new_world(size, initialize=False)
        return [Ended(o) for o in world.run_raw(as_main_program, body, arguments, timeout=30)]

    return run


def sum_of_ones() -> float:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return tensor[-1].item()


# Good ends


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


GOOD_ENDS: dict[str, list[Leaving]] = {
    "all destroy": [(0.0, True, "return")] * 3,
    "nobody destroys": [(0.0, False, "return")] * 3,
    "rank 0 first, destroys": [(0.0, True, "return"), (0.4, True, "return")],
    "rank 0 first, does not destroy": [(0.0, False, "return"), (0.4, True, "return")],
    "rank 0 last, the others do not destroy": [
        (0.4, True, "return"),
        (0.0, False, "return"),
        (0.2, False, "return"),
    ],
    "one after the other, nobody destroys": [(0.3 * rank, False, "return") for rank in range(3)],
    "sys.exit, some destroy": [(0.0, False, "sys.exit"), (0.2, True, "sys.exit"), (0.0, True, "sys.exit")],
}


@pytest.mark.parametrize("manners", list(GOOD_ENDS))
def test_good_ends(run_programs: Run, manners: str) -> None:
    leaving = GOOD_ENDS[manners]
    for rank, (ended, (_, _, end)) in enumerate(
        zip(run_programs(len(leaving), leave, leaving), leaving, strict=True)
    ):
        assert ended.status == (rank + 3 if end == "sys.exit" else 0), ended.printed
        ended.assert_quiet()
        assert ended.seconds < SOON


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


def test_groups_destroyed_in_different_orders(run_programs: Run) -> None:
    for ended in run_programs(2, destroy_piecewise):
        assert ended.status == 0, ended.printed
        ended.assert_quiet()


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


@pytest.mark.parametrize("body", [register_exits, destroy_after_fog_ended])
def test_exit_functions(run_programs: Run, body: Callable[..., None]) -> None:
    for ended in run_programs(2, body):
        assert ended.status == 0, ended.printed
        ended.assert_quiet()


def end_early(rank: int, destroy: bool) -> None:
    """Rank 2 ends; the others work on in their own group, and in one made after its end."""
    pair = dist.new_group([0, 1])
    assert sum_of_ones() == 3
    if rank == 2:
        if destroy:
            dist.destroy_process_group()
        return
    begin = time.monotonic()
    while time.monotonic() < begin + 0.8:
        tensor = torch.ones(20_000)
        dist.all_reduce(tensor, group=pair)
        assert tensor[0].item() == 2
        dist.barrier(pair)
        # The ranks' clocks differ, so rank 0 decides when to stop.
        more = torch.tensor([time.monotonic() < begin + 0.7])
        dist.broadcast(more, 0, group=pair)
        if not more.item():
            break
    with pytest.raises(dist.DistBackendError, match="rank 2"):
        dist.barrier()
    dist.barrier(pair)


@pytest.mark.parametrize("destroy", [True, False])
def test_one_ends_early(run_programs: Run, destroy: bool) -> None:
    ended = run_programs(3, end_early, destroy)
    assert [e.status for e in ended] == [0, 0, 0], "\n".join(e.printed for e in ended)
    for one in ended:
        assert one.seconds < SOON
        assert "terminate" not in one.printed and "lost" not in one.printed, one.printed


# Ends with operations in flight


def exit_with_operations(rank: int, who: list[int]) -> None:
    """The ranks of `who` leave at once, and the others wait for them."""
    assert sum_of_ones() == 2
    peer = 1 - rank
    kept.append(dist.irecv(torch.zeros(4), peer, tag=7))
    kept.append(dist.irecv(torch.zeros(4), tag=9))
    kept.append(dist.isend(torch.ones(500_000), peer, tag=8))
    kept[0].get_future().then(kept.append)  # runs, with the error, while Python ends
    # Both ranks have started all this before one leaves and ends the group.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"started/{rank}", "")
    store.wait([f"started/{peer}"])
    if rank in who:
        sys.exit(4)
    kept[0].wait()


@pytest.mark.parametrize("who", [[0, 1], [0], [1]])
def test_exit_with_operations_in_flight(run_programs: Run, who: list[int]) -> None:
    for rank, ended in enumerate(run_programs(2, exit_with_operations, who)):
        assert ended.seconds < SOON, ended.printed
        assert "terminate" not in ended.printed and "Fatal" not in ended.printed, ended.printed
        if rank in who:
            assert ended.status == 4, ended.printed
        else:
            assert ended.status == 1, ended.printed
            assert "DistBackendError" in ended.printed and f"rank {1 - rank}" in ended.printed


def exit_while_a_thread_waits(rank: int) -> None:
    """A daemon thread waits for an operation that never completes."""
    assert sum_of_ones() == 2
    waiting = threading.Event()

    def wait() -> None:
        work = dist.irecv(torch.zeros(4), 1 - rank)
        waiting.set()
        with contextlib.suppress(dist.DistBackendError):
            work.wait()

    threading.Thread(target=wait, daemon=True).start()
    assert waiting.wait(5)
    # Both ranks wait before one leaves and ends the group.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"waits/{rank}", "")
    store.wait([f"waits/{1 - rank}"])
    time.sleep(0.1 * rank)


def test_exit_while_a_thread_waits(run_programs: Run) -> None:
    for ended in run_programs(2, exit_while_a_thread_waits):
        assert ended.status == 0, ended.printed
        assert "terminate" not in ended.printed and "Fatal" not in ended.printed, ended.printed
        assert ended.seconds < SOON


# Bad ends


def end_badly(rank: int, how: str) -> None:
    """Rank 1 of 3 ends in the middle of work that the others go on with."""
    assert sum_of_ones() == 3
    for step in range(100_000):
        if rank == 1 and step == 20:
            if how == "exception":
                raise LookupError("no such thing")
            if how == "sys.exit":
                sys.exit(6)
            if how == "os._exit":
                os._exit(5)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(50_000))


@pytest.mark.parametrize(
    ("how", "status"),
    [("exception", 1), ("sys.exit", 6), ("os._exit", 5), ("SIGKILL", -9)],
)
def test_bad_ends(run_programs: Run, how: str, status: int) -> None:
    ended = run_programs(3, end_badly, how)
    assert [e.status for e in ended] == [1, status, 1], "\n".join(e.printed for e in ended)
    if how == "exception":
        assert "LookupError: no such thing" in ended[1].printed
    announced = how in ("exception", "sys.exit")  # in these cases the rank could announce its end
    for survivor in (ended[0], ended[2]):
        assert survivor.seconds < SOON, survivor.printed
        error = re.search(r"DistBackendError: (.*)", survivor.printed)
        assert error and "rank 1" in error[1], survivor.printed
        if announced:
            assert "ended" in error[1], survivor.printed
        else:
            said = re.search(r"^fog: .*lost rank 1 \(pid \d+", survivor.printed, re.MULTILINE)
            assert said and "lost" in error[1], survivor.printed
        assert "terminate" not in survivor.printed


def stop_in_the_middle(rank: int) -> None:
    """A survivor that catches the error can still end well."""
    assert sum_of_ones() == 2
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    sys.exit(8)


def test_survivor_ends_well(run_programs: Run) -> None:
    ended = run_programs(2, stop_in_the_middle)
    assert [e.status for e in ended] == [8, -9], ended[0].printed
    assert ended[0].seconds < SOON


# Ctrl-C, in separate scripts, because the way in which Python ends them is part of the test

INTERRUPTED = """
import sys
import time
import torch
import torch.distributed as dist
import fog_pg

rank = int(sys.argv[2])
dist.init_process_group("fog", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
dist.barrier()
print("ready", flush=True)
if rank == 1:
    sys.stdin.read()
    sys.exit(0)
try:
    dist.recv(torch.zeros(1), 1)
except KeyboardInterrupt:
    print(time.monotonic(), flush=True)
    raise
"""


def test_interrupt_ends_a_blocking_wait(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "store"), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    watchdog = threading.Timer(40, lambda: [process.kill() for process in processes])
    watchdog.start()
    try:
        waiting, other = processes
        assert waiting.stdout is not None and waiting.stdout.readline() == "ready\n"
        time.sleep(0.3)  # by then it waits
        sent = time.monotonic()
        waiting.send_signal(signal.SIGINT)
        printed, errors = waiting.communicate(timeout=10)
        assert waiting.returncode == -signal.SIGINT, errors
        assert float(printed) - sent < 1.0
        assert "KeyboardInterrupt" in errors and "terminate" not in errors
        _, errors = other.communicate(timeout=10)  # closes its standard input
        assert other.returncode == 0, errors
        assert time.monotonic() - sent < SOON
    finally:
        watchdog.cancel()
        for process in processes:
            process.kill()
            process.communicate()


def hang_up() -> None:
    """Sends SIGHUP, as a rank gets it when its terminal or connection closes."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have set another handler
    as_main_program(lambda rank: (dist.barrier(), os.kill(os.getpid(), signal.SIGHUP)), ())


def test_a_hangup_ends_a_rank(new_world: Callable[..., World]) -> None:
    # Unless told not to, UCX uses this signal for its debug mode.
    for outcome in new_world(2, initialize=False).run_raw(hang_up, timeout=30):
        assert Ended(outcome).status == -signal.SIGHUP, str(outcome)
