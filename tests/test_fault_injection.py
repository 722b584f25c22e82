"""fogdist.testing.faults: each fault does what it says to a process, a group, a disk or a link, and ends with its block."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fogdist.testing import faults
from fogdist.testing.faults import Fault, Schedule
from fogdist.testing.faults.__main__ import main
from harness import World, WorldPool, case, error_of
from hosts import INTERFACE, address, emulated_hosts, ip, move_to_host

PAUSE = 0.4
# A gap that a busy machine does not make by itself in a thread that sleeps for a millisecond at a time is not known, so
# gaps are compared with a part of the pause from below only.
LEAST_GAP = 0.3


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def state_of(pid: int) -> str:
    """Returns the letter of a process's state: T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def await_state(pid: int, stopped: bool) -> None:
    deadline = time.monotonic() + 20.0
    while (state_of(pid) == "T") != stopped and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (state_of(pid) == "T") == stopped


# --- processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "number"), [(faults.kill, signal.SIGKILL), (faults.segfault, signal.SIGSEGV)]
)
def test_another_process_ends(
    child: subprocess.Popen[bytes], fault: Callable[[int], None], number: signal.Signals
) -> None:
    fault(child.pid)
    assert child.wait(20) == -number


def end_by(kind: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Fault(0, 0, kind).inject()


@pytest.mark.parametrize(("kind", "number"), [("kill", "SIGKILL"), ("segfault", "SIGSEGV")])
def test_this_process_ends(new_world: Callable[..., World], kind: str, number: str) -> None:
    (outcome,) = new_world(1, initialize=False).run_raw(end_by, kind)
    assert outcome.state == "died" and number in outcome.details, str(outcome)


def test_a_stopped_process_continues(child: subprocess.Popen[bytes]) -> None:
    stopping = threading.Thread(target=faults.stop, args=(child.pid, PAUSE))
    begin = time.monotonic()
    stopping.start()
    await_state(child.pid, stopped=True)
    stopping.join(20)
    assert time.monotonic() - begin > LEAST_GAP
    await_state(child.pid, stopped=False)
    assert child.poll() is None


def stop_another(pid: int) -> None:
    threading.Thread(target=faults.stop, args=(pid, 1.0)).start()
    await_state(pid, stopped=True)
    faults.kill()


def test_it_continues_also_if_the_one_that_stopped_it_is_killed(
    new_world: Callable[..., World], child: subprocess.Popen[bytes]
) -> None:
    (outcome,) = new_world(1, initialize=False).run_raw(stop_another, child.pid)
    assert outcome.state == "died", str(outcome)
    await_state(child.pid, stopped=False)


class Watch(threading.Thread):
    """Finds the longest time for which a thread of this process did not run."""

    def __init__(self) -> None:
        super().__init__()
        self.gap, self.end = 0.0, False

    def run(self) -> None:
        last = time.monotonic()
        while not self.end:
            time.sleep(0.001)
            now = time.monotonic()
            self.gap, last = max(self.gap, now - last), now


def longest_gap(fault: Callable[[], object]) -> float:
    watch = Watch()
    watch.start()
    fault()
    watch.end = True
    watch.join()
    return watch.gap


def gaps_in_this_process() -> tuple[float, float, bool]:
    """Returns the gap of a stop, of a deadlock, and whether a signal came through during the deadlock."""
    stopped = longest_gap(lambda: faults.stop(seconds=PAUSE))
    came: list[float] = []
    signal.signal(signal.SIGUSR2, lambda *_: came.append(time.monotonic()))
    sender = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.1; kill -USR2 {os.getpid()}"])
    begin = time.monotonic()
    hung = longest_gap(lambda: faults.deadlock_with_gil(PAUSE))
    sender.wait()
    time.sleep(0.01)
    return stopped, hung, came[0] - begin > LEAST_GAP


def test_a_process_that_is_stopped_or_hangs_with_the_lock_runs_no_python(worlds: WorldPool) -> None:
    ((stopped, hung, came_late), *_) = worlds(2).run(gaps_in_this_process)
    assert stopped > LEAST_GAP and hung > LEAST_GAP and came_late


# --- groups and the Store -----------------------------------------------------------------------------------


def abort_one() -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.barrier(group)
    if dist.get_rank() == 0:
        faults.abort(group)
    error = error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
    x = torch.ones(3)
    dist.all_reduce(x)  # other groups go on
    assert x.tolist() == [2.0] * 3
    return error


def test_an_aborted_group_takes_no_more(worlds: WorldPool) -> None:
    aborted, other = worlds(2).run(abort_one)
    assert "abort" in aborted and other, (aborted, other)


def lose() -> tuple[int, str]:
    store = dist.distributed_c10d._get_default_store()
    store.set("before", "1")
    broken = faults.lose_store()
    try:
        store.get("before")
    except RuntimeError as error:
        text = type(error).__name__
    else:
        text = ""
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    return broken, text


def test_a_lost_store_raises_and_the_group_goes_on(new_world: Callable[..., World]) -> None:
    for broken, error in new_world(2).run(lose):
        assert broken > 0 and error == "DistNetworkError"


STORE_PORT = 29519


def join_and_ask(host: str, is_server: bool) -> str:
    """Returns the error of a request to the Store, which rank 0 serves, after its host was cut off."""
    move_to_host(host)
    import fog_pg  # noqa: F401  registers "fog" also where the entry point is not installed

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(address(0), STORE_PORT, size, is_server)
    dist.init_process_group("fog", store=store, rank=rank, world_size=size)
    store.set(f"ready {rank}", "1")
    try:
        store.wait([f"ready {other}" for other in range(size)])  # the answer may be cut off already
        with faults.cut_link(INTERFACE) if is_server else contextlib.nullcontext():
            time.sleep(6.0 if is_server else 1.0)
            store.get("ready 0")
    except dist.DistNetworkError as error:
        return str(error)
    return ""


def test_a_store_that_is_cut_off_raises(new_world: Callable[..., World]) -> None:
    with emulated_hosts(2) as names:
        world = new_world(2, initialize=False, environment={"FOG_HOST_TIMEOUT": "4"})
        outcomes = world.run_by_rank(join_and_ask, [(names[0], True), (names[1], False)], timeout=40)
        assert [outcome.state for outcome in outcomes] == ["returned"] * 2, list(map(str, outcomes))
        assert outcomes[0].value == "" and "timed out" in outcomes[1].value
        world.close()


# --- disks --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_full_disk_refuses_what_does_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    with faults.full_disk(folder, free=100_000):
        (folder / "fits").write_bytes(b"x" * 90_000)
        with pytest.raises(OSError) as caught:
            (folder / "more").write_bytes(b"x" * 90_000)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(ValueError, match="folder must be empty"), faults.full_disk(folder):
            pass
    assert list(folder.iterdir()) == []
    (folder / "fits").write_bytes(b"x" * 200_000)


def test_files_grow_to_their_limit(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with faults.file_limit(1000):
        (tmp_path / "fits").write_bytes(b"x" * 1000)
        with pytest.raises(OSError) as caught:
            (tmp_path / "more").write_bytes(b"x" * 1001)
        assert caught.value.errno == errno.EFBIG
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    with faults.file_limit(1000, child.pid):
        assert resource.prlimit(child.pid, resource.RLIMIT_FSIZE)[0] == 1000
        child.kill()
        child.wait()


# --- links --------------------------------------------------------------------------------------------------

# Fewer than fit into the memory of a socket.
PACKETS = 200


def exchange_packets(name: str, own: str, peer: str) -> int:
    """Sends packets to the peer and returns how many came from there."""
    move_to_host(name)
    received = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.bind((own, 9))
        link.settimeout(0.05)
        dist.barrier()
        for _ in range(PACKETS):
            link.sendto(b"x" * 100, (peer, 9))
            time.sleep(1e-4)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            try:
                link.recv(200)
                received += 1
            except TimeoutError:
                pass
    return received


def test_links_lose_what_they_are_told_to(new_world: Callable[..., World]) -> None:
    with emulated_hosts(2) as names:
        here, world = names[0], new_world(2)

        def packets() -> list[int]:
            arguments = [(names[rank], address(rank), address(1 - rank)) for rank in range(2)]
            return [outcome.value for outcome in world.run_by_rank(exchange_packets, arguments)]

        before = ip("-n", here, "-json", "link", "show")
        assert packets() == [PACKETS] * 2
        with faults.cut_link(INTERFACE, namespace=here):
            assert packets() == [0, 0]
            with pytest.raises(faults.Unavailable), faults.cut_link(INTERFACE, namespace=here):
                pass
        with faults.cut_link(INTERFACE, peer=address(1), namespace=here):
            assert packets() == [0, 0]
        with faults.cut_link(INTERFACE, peer=address(7), namespace=here):
            assert packets() == [PACKETS] * 2
        with faults.lossy_link(INTERFACE, 0.5, peer=address(1), namespace=here):
            # The standard deviation is 7.
            assert all(PACKETS * 0.3 < count < PACKETS * 0.7 for count in packets())
        with faults.slow_link(INTERFACE, "10mbit", namespace=here):
            assert '"tbf"' in queues(here)
            with (
                pytest.raises(faults.Unavailable, match="queue"),
                faults.slow_link(INTERFACE, "1mbit", namespace=here),
            ):
                pass
        # What a killed process leaves.
        abandoned = faults.cut_link(INTERFACE, namespace=here)
        abandoned.__enter__()
        faults.mend_link(INTERFACE, namespace=here)
        assert packets() == [PACKETS] * 2
        assert ip("-n", here, "-json", "link", "show") == before
        assert '"tbf"' not in queues(here) and "clsact" not in queues(here)
        world.close()  # the end of the hosts kills what runs there


def queues(namespace: str) -> str:
    words = ["tc", "-n", namespace, "-json", "qdisc", "show", "dev", INTERFACE]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


# --- schedules ----------------------------------------------------------------------------------------------


def test_random_schedules_follow_their_arguments() -> None:
    kinds = {"kill": 3.0, "segfault": 1.0, "stop": 2.0, "lossy": 0.5}
    options: dict[str, Any] = {"until": 100.0, "every": (0.5, 2.0), "kinds": kinds, "seconds": (0.1, 0.2)}
    for seed in range(50):
        drawn = Schedule.random(seed, 8, least_living=3, **options).faults
        assert drawn == Schedule.random(seed, range(8), least_living=3, **options).faults
        assert drawn != Schedule.random(seed + 1, 8, least_living=3, **options).faults
        gaps = [b.when - a.when for a, b in itertools.pairwise(drawn)]
        with case(seed=seed):
            assert (
                all(0.498 < gap < 2.002 for gap in gaps) and 50 <= len(drawn) <= 200 and drawn[-1].when < 100
            )
            lost: set[int] = set()
            for fault in drawn:
                assert fault.rank not in lost and 0 <= fault.rank < 8
                assert (0.1 <= fault.seconds <= 0.2) == (fault.kind in ("stop", "lossy"))
                lost |= {fault.rank} if fault.is_fatal else set()
            assert len(lost) == 5
    again = Schedule.random(1, 2, restarted=True, until=100.0)
    assert len(again.faults) > 50 and {fault.rank for fault in again.faults} == {0, 1}
    whole = Schedule.random(1, [3, 5], until=1000, every=(50, 100), kinds=["stop"], whole=True)
    assert all(fault.when == int(fault.when) and fault.rank in (3, 5) for fault in whole.faults)
    frequent = [
        fault.kind for fault in Schedule.random(1, 2, restarted=True, **options | {"until": 5000.0}).faults
    ]
    assert 0.4 < frequent.count("kill") / len(frequent) < 0.52


def test_faults_of_a_step_happen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Fault] = []
    monkeypatch.setattr(Fault, "inject", lambda self, pid=None: happened.append(self))
    early, late, other = Fault(2, 0, "kill"), Fault(5, 0, "abort"), Fault(2, 1, "kill")
    schedule = Schedule([late, other, early])
    assert [schedule.inject(0, step) for step in (0, 1, 2, 3, 7, 8)] == [[], [], [early], [], [late], []]
    assert happened == [early, late]
    assert schedule.inject(1, 2) == [other]


def test_a_schedule_runs_on_other_processes() -> None:
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    pids = [process.pid for process in sleepers]
    try:
        schedule = Schedule([Fault(0.0, 0, "stop", 0.5), Fault(0.1, 1, "kill"), Fault(0.2, 1, "stop", 0.1)])

        def inject(fault: Fault) -> None:
            fault.inject(pids[fault.rank])
            if fault.kind == "kill":
                sleepers[1].wait()
                # A stop does not delay what follows it.
                assert state_of(pids[0]) == "T"

        happened = schedule.run(inject)
        assert happened == list(schedule.faults[:2])  # rank 1 is gone
        assert sleepers[1].returncode == -signal.SIGKILL and sleepers[0].poll() is None
        with pytest.raises(ValueError, match="'deadlock' can only happen to the calling process"):
            Schedule([Fault(0, 2, "deadlock", 1.0)]).run(inject)
        never = threading.Event()
        never.set()
        assert schedule.run(inject, until=never) == []
    finally:
        for process in sleepers:
            process.kill()
            process.wait()


def test_faults_from_the_command_line(
    child: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--every", "0.01", "0.02", "--seconds", "0.2", "--least-living", "0"]
    assert main([str(child.pid), *words]) == 0
    assert child.wait(20) == -signal.SIGKILL
    printed = capsys.readouterr().out
    assert f"kill {child.pid}" in printed and "1 faults" in printed
    with pytest.raises(SystemExit):
        main([str(child.pid), "--every", "2", "1"])
    assert "every must be (least, greatest)" in capsys.readouterr().err


BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: faults.kill(0), ValueError, "pid must be the number of one process, greater than 1, got 0"),
    (lambda: faults.kill(-1), ValueError, "got -1"),
    (lambda: faults.segfault(True), TypeError, "pid must be an int or None, got bool"),
    (lambda: faults.stop(1, 1.0), ValueError, "got 1"),
    (lambda: faults.stop(os.getpid(), 0.0), ValueError, "seconds must be positive and finite, got 0.0"),
    (lambda: faults.stop(os.getpid(), "1"), TypeError, "seconds must be a number, got str"),  # type: ignore[arg-type]
    (lambda: faults.deadlock_with_gil(-1.0), ValueError, "got -1.0"),
    (lambda: faults.kill(2**22 + 1), ProcessLookupError, "No such process"),
    (lambda: faults.stop(2**22 + 1, 60.0), ProcessLookupError, "No such process"),
    (lambda: faults.abort(), RuntimeError, "init_process_group was not called"),
    (lambda: faults.lose_store(), RuntimeError, "init_process_group was not called"),
    (lambda: faults.abort(3), TypeError, "group must be a ProcessGroup"),  # type: ignore[arg-type]
    (lambda: faults.lose_store(dist.HashStore()), TypeError, "store must be a TCPStore .*, got HashStore"),
    (lambda: faults.full_disk("/nowhere").__enter__(), NotADirectoryError, "got /nowhere"),
    (lambda: faults.full_disk("/", -1).__enter__(), ValueError, "free must not be negative, got -1"),
    (lambda: faults.file_limit(-1).__enter__(), ValueError, "size must not be negative, got -1"),
    (
        lambda: faults.cut_link("no-such-device").__enter__(),
        faults.Unavailable,
        "no-such-device|needs the program",
    ),
    (lambda: faults.cut_link("lo", peer="host").__enter__(), ValueError, "peer must be an IPv4 address"),
    (lambda: faults.lossy_link("lo", 1.5).__enter__(), ValueError, "loss must be .* got 1.5"),
    (lambda: faults.slow_link("lo", "fast").__enter__(), ValueError, "rate"),
    (lambda: Fault(0, 0, "die"), ValueError, "kind must be one of 'kill', .*, got 'die'"),  # type: ignore[arg-type]
    (lambda: Fault(-1, 0, "kill"), ValueError, "when must not be negative, got -1"),
    (lambda: Fault(0, -1, "kill"), ValueError, "rank must not be negative, got -1"),
    (lambda: Fault(0, 0.5, "kill"), TypeError, "rank must be an int, got float"),  # type: ignore[arg-type]
    (lambda: Fault(0, 0, "stop"), ValueError, "seconds must be positive"),
    (lambda: Fault(0, 0, "kill", 1.0), ValueError, "seconds must be 0 for 'kill', got 1.0"),
    (lambda: Fault(0, 0, "cut", 1.0).inject(), ValueError, "call fogdist.testing.faults.cut_link"),
    (lambda: Fault(0, 0, "abort").inject(5), ValueError, "can only happen to the calling process, got pid 5"),
    (lambda: Schedule.random(1, 0, until=9), ValueError, "ranks must be"),
    (lambda: Schedule.random(1, 2, until=9, every=(2, 1)), ValueError, r"every must be \(least, greatest\)"),
    (lambda: Schedule.random(1, 2, until=9, every=(0, 1)), ValueError, "every must be positive"),
    (lambda: Schedule.random(1, 2, until=9, kinds=()), ValueError, "at least one kind"),
    (lambda: Schedule.random(1, 2, until=9, kinds={"kill": 0.0}), ValueError, "the frequency of 'kill'"),
]


def test_bad_arguments_raise_before_anything_happens() -> None:
    for number, (call, error, text) in enumerate(BAD):
        with case(number=number, text=text), pytest.raises(error, match=text):
            call()
