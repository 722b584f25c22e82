"""The faults of the soaks do what they say; a Store that is lost or cut off raises, and the group goes on."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, WorldPool, case
from hosts import (
    INTERFACE,
    Unavailable,
    address,
    cut_link,
    emulated_hosts,
    ip,
    lossy_link,
    move_to_host,
    slow_link,
)
from injected_faults import Fault, Schedule, deadlock_with_gil, lose_store, stop

PAUSE = 0.4
# A gap that a busy machine does not make by itself in a thread that sleeps for a millisecond at a time is not known, so
# gaps are compared with a part of the pause from below only.
LEAST_GAP = 0.3


def state_of(pid: int) -> str:
    """Returns the letter of a process's state: T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# --- processes ----------------------------------------------------------------------------------------------


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
    stopped = longest_gap(lambda: stop(os.getpid(), PAUSE))
    came: list[float] = []
    signal.signal(signal.SIGUSR2, lambda *_: came.append(time.monotonic()))
    sender = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.1; kill -USR2 {os.getpid()}"])
    begin = time.monotonic()
    hung = longest_gap(lambda: deadlock_with_gil(PAUSE))
    sender.wait()
    time.sleep(0.01)
    return stopped, hung, came[0] - begin > LEAST_GAP


def test_a_process_that_is_stopped_or_hangs_with_the_lock_runs_no_python(worlds: WorldPool) -> None:
    ((stopped, hung, came_late), *_) = worlds(2).run(gaps_in_this_process)
    assert stopped > LEAST_GAP and hung > LEAST_GAP and came_late


# --- the Store ----------------------------------------------------------------------------------------------


def lose() -> tuple[int, str]:
    store = dist.distributed_c10d._get_default_store()
    store.set("before", "1")
    broken = lose_store()
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
        with cut_link(INTERFACE, namespace=host) if is_server else contextlib.nullcontext():
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
        with cut_link(INTERFACE, namespace=here):
            assert packets() == [0, 0]
            with pytest.raises(Unavailable), cut_link(INTERFACE, namespace=here):
                pass
        with cut_link(INTERFACE, peer=address(1), namespace=here):
            assert packets() == [0, 0]
        with cut_link(INTERFACE, peer=address(7), namespace=here):
            assert packets() == [PACKETS] * 2
        with lossy_link(INTERFACE, 0.5, peer=address(1), namespace=here):
            # The standard deviation is 7.
            assert all(PACKETS * 0.3 < count < PACKETS * 0.7 for count in packets())
        with slow_link(INTERFACE, "10mbit", namespace=here):
            assert '"tbf"' in queues(here)
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
        assert drawn == Schedule.random(seed, 8, least_living=3, **options).faults
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
                lost |= {fault.rank} if fault.kind in ("kill", "segfault") else set()
            assert len(lost) == 5
    drawn = Schedule.random(1, 2, least_living=1, **options | {"until": 5e3, "lost_by": ()}).faults
    frequent = [fault.kind for fault in drawn]
    assert 0.4 < frequent.count("kill") / len(frequent) < 0.52


def test_a_schedule_runs_on_other_processes() -> None:
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    pids = [process.pid for process in sleepers]
    try:
        schedule = Schedule([Fault(0.0, 0, "stop", 0.5), Fault(0.1, 1, "kill"), Fault(0.2, 1, "stop", 0.1)])

        def inject(fault: Fault) -> None:
            fault.inject(pids[fault.rank])  # the third raises ProcessLookupError, as rank 1 is gone
            if fault.kind == "kill":
                sleepers[1].wait()
                # A stop does not delay what follows it.
                assert state_of(pids[0]) == "T"

        never = threading.Event()
        schedule.run(inject, until=never)
        assert sleepers[1].returncode == -signal.SIGKILL and sleepers[0].poll() is None
        never.set()
        schedule.run(lambda fault: pytest.fail("it is over"), until=never)
    finally:
        for process in sleepers:
            process.kill()
            process.wait()
