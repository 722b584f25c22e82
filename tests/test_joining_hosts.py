"""Tests of processes that join a running job whose ranks are on several hosts, over TCP (FOG_BETWEEN_HOSTS=tcp)."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fogdist.testing.faults import cut_link
from harness import ALL
from hosts import ACROSS, INTERFACE, address, emulated_hosts
from test_joining import PHASES, RANKS, TIMEOUT, Job, faulty, lose, refused, until_stopped

# The hosts of the ranks at the start; one host is free.
PLACEMENT = [0, 0, 1, 2]
HOSTS = 4
FREE = 3
TCP = {"FOG_BETWEEN_HOSTS": "tcp", "FOG_HOST_TIMEOUT": "4"}

# Holds the Store of the job on its host, and lives as long as the test.
STORE = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class HostsJob(Job):
    """A job of ranks on emulated hosts, whose Store is on the first of them."""

    address = address(0)

    def __init__(self, folder: Path, names: Sequence[str], common: dict[str, str], **options: Any) -> None:
        self.names = names
        self.common = common
        self.host_of = list(PLACEMENT)
        super().__init__(folder, **options)

    def open_store(self) -> int:
        self.holder = subprocess.Popen(
            [*self.inside(0), sys.executable, "-c", STORE, self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.holder.stdout is not None
        return int(self.holder.stdout.readline())

    def inside(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]]

    def before(self, rank: int) -> list[str]:
        return self.inside(self.host_of[rank])

    def start(self, rank: int, **environment: str) -> int:
        return super().start(rank, **(self.common | environment))

    def join_at(self, rank: int, host: int, **environment: str) -> int:
        """Starts a process that joins, on a host; returns its number."""
        self.host_of[rank] = host
        return self.join(rank, **environment)

    def close(self) -> None:
        super().close()
        self.holder.kill()
        self.holder.wait()


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    with emulated_hosts(HOSTS) as names:
        yield names


@pytest.fixture
def new_job(tmp_path: Path, hosts: list[str]) -> Iterator[Callable[..., HostsJob]]:
    with contextlib.ExitStack() as stack:

        def make(common: dict[str, str] | None = None, **options: Any) -> HostsJob:
            job = HostsJob(tmp_path, hosts, TCP if common is None else common, **options)
            stack.callback(job.close)
            job.start_all()
            return job

        yield make


def test_processes_join_on_each_kind_of_host(new_job: Callable[..., HostsJob]) -> None:
    """Beside living ranks, alone, on a new host, and on the host of others; at last in place of the lowest rank."""
    job = new_job()
    now = [0, 1, 2, 3]
    for rank, host in [(1, 0), (2, 1), (3, FREE), (0, FREE)]:
        rest = [number for other, number in enumerate(now) if other != rank]
        lose(job, now[rank], rest, [other for other in range(RANKS) if other != rank])
        now[rank] = job.join_at(rank, host)
        job.until_living(now, [0, 1, 2, 3])
    at = max(job.events(number, "epoch")[-1]["step"] for number in now)
    time.sleep(1.0)
    ends = job.end(now)
    steps = [each["step"] for each in ends]
    assert min(steps) > at and max(steps) - min(steps) <= 12, steps
    norms = [each["norm"] for each in ends]
    assert max(norms) - min(norms) < 0.2 * max(norms), norms
    assert all("Traceback" not in job.log(number) for number in now), job.report()


def test_processes_join_ranks_that_go_at_their_own_pace(new_job: Callable[..., HostsJob]) -> None:
    """Nobody meets because of a loss: neither of a rank beside living ones, nor of the rank that answers."""
    job = new_job(kind="wrapper/async")
    now = [0, 1, 2, 3]
    for rank, host in [(2, 1), (0, 0)]:
        job.kill(now[rank])
        job.processes[now[rank]][0].wait()
        now[rank] = job.join_at(rank, host)
        job.until(lambda: job.events(now[rank], "epoch"), "the process does not join")
        job.until_living(now, [0, 1, 2, 3])
    job.end(now)


# --- a process that joins, or the rank that gives its state, is lost ----------------------------------------------


def test_a_process_that_is_killed_or_stopped_while_it_joins(
    new_job: Callable[..., HostsJob], tmp_path: Path
) -> None:
    """In each phase; the others train on, and then a process joins that is not killed."""
    job = new_job()
    rest = [0, 1, 3]
    lose(job, 2, rest, [0, 1, 3])
    for phase in [*PHASES[1:]] if ALL else PHASES[5:6]:
        new = job.join_at(2, 1, **faulty(tmp_path, phase, "SIGKILL"))
        assert job.processes[new][0].wait(TIMEOUT) == -signal.SIGKILL, (phase, job.log(new))
        job.until_living(rest, [0, 1, 3])
        assert [job.processes[number][0].poll() for number in rest] == [None] * 3, (phase, job.report())
    if ALL:
        before = [times_taken_in(job, number) for number in rest]
        new = job.join_at(2, 1, **faulty(tmp_path, PHASES[5], "SIGSTOP"))
        until_stopped(job, new)
        job.until(
            lambda: [times_taken_in(job, number) for number in rest] == [times + 1 for times in before],
            "it is not taken in",
        )
        job.until_living(rest, [0, 1, 3])
        job.kill(new)
    new = job.join_at(2, 1)
    job.until_living([*rest, new], [0, 1, 2, 3])
    job.end([*rest, new])


def times_taken_in(job: HostsJob, number: int) -> int:
    """Returns how often a rank has told that rank 2 joined. Such an epoch may have ended before the rank's next step."""
    return job.log(number).count("of which [2] joined")


@pytest.mark.long
@pytest.mark.parametrize("method", ["_read", "enter"])
def test_the_rank_that_gives_its_state_is_lost(
    new_job: Callable[..., HostsJob], tmp_path: Path, method: str
) -> None:
    """The process stops, the rank with the lowest number is killed, and the process goes on."""
    job = new_job()
    lose(job, 2, [0, 1, 3], [0, 1, 3])
    new = job.join_at(2, 1, **faulty(tmp_path, ("fogdist.joining.Newcomer", method, "before"), "SIGSTOP"))
    until_stopped(job, new)
    lose(job, 0, [1, 3], [1, 3])
    job.kill(new, signal.SIGCONT)
    job.until_living([1, new, 3], [1, 2, 3])
    job.end([1, new, 3])


# --- a process that is refused ------------------------------------------------------------------------------------


def test_who_is_refused(new_job: Callable[..., HostsJob]) -> None:
    """Each learns the reason, and training goes on."""
    job = new_job()
    assert "rank 3 still runs; a process takes the number of a rank that is gone" in refused(job, 3)
    lose(job, 2, [0, 1, 3], [0, 1, 3])
    wrong = {"FOG_JOB_SECRET": "another secret than the job's"}
    assert "it does not know the job's secret (FOG_JOB_SECRET)" in refused(job, 2, **wrong)
    way = "FOG_BETWEEN_HOSTS (or the option between_hosts) is 'auto' here, and 'tcp' on the job's ranks"
    assert way in refused(job, 2, FOG_BETWEEN_HOSTS="auto")
    job.options["newcomer_width"] = True
    new = job.join(2)
    assert job.processes[new][0].wait(TIMEOUT) == 1, job.report()
    assert "model must be the same as on the ranks of the job that this process joins" in job.log(new)
    del job.options["newcomer_width"]
    epochs = [job.events(number, "epoch")[-1]["epoch"] for number in (0, 1, 3)]
    with cut_link(INTERFACE, peer=address(2), namespace=job.names[FREE]):
        job.host_of[2] = FREE
        assert "it does not reach rank 3 on host" in refused(job, 2)
    assert [job.events(number, "epoch")[-1]["epoch"] for number in (0, 1, 3)] == epochs, job.report()
    new = job.join(2)
    job.until_living([0, 1, 3, new], [0, 1, 2, 3])
    job.end([0, 1, 3, new])


def test_a_job_over_mpi_cannot_be_joined(new_job: Callable[..., HostsJob]) -> None:
    job = new_job(ACROSS["UCX"])
    assert "can be joined with FOG_BETWEEN_HOSTS=tcp" in refused(job, 2)


# --- the job's host is lost -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_host_that_is_cut_off_is_replaced(new_job: Callable[..., HostsJob]) -> None:
    """Nobody sees its processes end. Another process has the number when the link is back, and the old one ends."""
    job = new_job()
    with cut_link(INTERFACE, namespace=job.names[2]):
        job.until_living([0, 1, 2], [0, 1, 2])
        new = job.join_at(3, FREE)
        job.until_living([0, 1, 2, new], [0, 1, 2, 3])
    assert job.processes[3][0].wait(TIMEOUT) != 0, job.report()
    job.until_living([0, 1, 2, new], [0, 1, 2, 3])
    job.end([0, 1, 2, new])
