"""Tests of processes that join a running job on one host or on several (over TCP): each algorithm, losses, refusals.

The processes are forked from the harness's server. Where a test says `fresh`, the one that joins is an interpreter of
its own, as users start it; tests/test_keep_going.py has those that `fog run` starts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import fogdist
import fogdist.bluefog.torch as bf
import harness
import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import algorithms
from fogdist.elastic import admission as admissions
from fogdist.elastic import joiner as joiners
from fogdist.elastic import tickets, transfer
from fogdist.elastic.protocol import Action, Give, Member, Request
from fogdist.topology import mixing_matrix
from harness import ALL, World
from hosts import INTERFACE, address, connections, cut_link, emulated_hosts, move_to_host
from numpy.typing import NDArray
from scripts import ROOT
from test_membership import OF_NAMES, OF_WORDS
from test_tuning import move_each_time

from fog_pg import _joining

TIMEOUT = 180.0  # enough for a busy machine
RANKS = 4
# On several hosts: those of the first ranks, how many hosts there are, and the one that is free.
PLACEMENT, HOSTS, FREE = (0, 0, 1, 2), 4, 3
# Steps of mixing alone, after which the ranks of every kind are as close as `end_alike` checks.
COOL_STEPS = 100
ON_HOSTS = {"FOG_HOST_TIMEOUT": "4"}

# Kinds of training, as of `test_membership.make`; those that go at their own pace do not agree because of a loss.
IN_STEP = ["wrapper", "DecentralizedSGD", "DecentralizedSGD/awc", "DecentralizedSGD/cta", "LocalSGD"]
IN_STEP += [
    "DecentralizedAdamW",
    "PushSumSGD",
    "DiLoCo",
    "ChocoSGD",
    "LocalSGD/streaming",
    "DiLoCo/streaming",
    "DiLoCo/streaming/reschedules",
    "DecentralizedSGD/tuned",
]
OWN_PACE = ["wrapper/patience", "DecentralizedSGD/patience", "DecentralizedSGD/patience/freezes"]
OWN_PACE += ["wrapper/async", "AsynchronousGossip"]
KINDS = [*IN_STEP, *OWN_PACE]


def train(options: Mapping[str, Any]) -> None:
    """Trains as a rank of a `Job` until the test ends it; each event is a line of JSON."""
    dist.init_process_group("fog", timeout=timedelta(seconds=options.get("timeout", 60)))

    def graph(size: int) -> nx.DiGraph:
        made = getattr(fogdist.topology, options.get("graph", "ring"))(size)
        for i, j in made.edges if "scale" in options else ():
            made[i][j]["weight"] *= options["scale"]
        return made

    fogdist.init(None if "scale" in options else graph)
    if "scale" in options:
        bf.set_topology(graph(fogdist.size()), is_weighted=True)
    rank = dist.get_rank()
    if "writes" in options:  # no request of its own
        store = _joining.store_of_first(dist.group.WORLD._get_backend(torch.device("cpu")))
        store.set(f"fog/join/{store.add('fog/join/count', 1)}/request", options["writes"])
        sys.exit(3)
    torch.manual_seed(rank)
    dtype, width = getattr(torch, options.get("dtype", "float32")), options.get("width", 6)
    layers = [torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)]
    model = torch.nn.Sequential(*layers).to(dtype)
    fogdist.broadcast_parameters(model.state_dict(), 0)
    kind, *words = options["kind"].split("/")
    inner: Any = torch.optim.SGD(model.parameters(), lr=options.get("rate", 0.05), momentum=0.5)
    if kind == "DecentralizedAdamW":
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    more = {"on_loss": options.get("on_loss", "continue"), "broadcast": "apart" not in options}
    more |= OF_NAMES.get(kind, {})
    for word in words:
        more |= OF_WORDS.get(word, {})
    if "by_samples" in options:
        more["by_samples"] = True
    if "apart" in options:  # ranks begin with multiples of the same values
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank + 1.0)
    if "freezes" in words and "FOG_JOIN" in os.environ:  # the others have frozen it after the wrap
        layers[0].requires_grad_(False)
    called: Any = model
    optimizer: Any = inner
    if kind == "wrapper":
        called = fogdist.DecentralizedDataParallel(model, inner, **more)
    elif "tuned" in words:
        move_each_time()
        optimizer = fogdist.DecentralizedOptimizer(inner, model, tune=fogdist.Tune(max_local_steps=2), **more)
    else:
        optimizer = getattr(algorithms, kind)(inner, model, **more)
    if "freezes" in words:
        layers[0].requires_grad_(False)
    weights = torch.tensor([[1.0], [-1.0], [2.0], [0.5]], dtype=dtype)
    folder = Path(options["folder"])

    def count() -> int:
        return called.round if kind == "wrapper" else optimizer.steps

    def say(event: str, **values: Any) -> None:
        told = {"rank": rank, "event": event, "step": count(), "at": time.monotonic(), **values}
        print(json.dumps(told), flush=True)

    def values() -> list[float]:
        with torch.no_grad():
            return torch.cat([p.reshape(-1) for p in model.parameters()]).tolist()

    drawn: Iterator[list[int]] = iter(())
    if "batch" in options:  # ranks share the batches of a data set, and write down which samples they use
        batches = fogdist.SharedBatches(optimizer, options["length"], options["batch"], seed=None, every=2)
        drawn = itertools.chain.from_iterable(iter(lambda: batches, None))
    known, losses, cool = -1, [], 0
    while not (folder / "end").exists():
        # With an exchange in flight; a process joins before it or after it.
        if "reschedules" in words and optimizer.steps == 3:
            optimizer.reschedule(local_steps=7, fragments=3, delay=1)
        x = torch.randn(16, 4, dtype=dtype)
        part = next(drawn, None)
        optimizer.zero_grad()
        loss = ((called(x) - x @ weights) ** 2).mean()
        loss.backward()
        if options.get("records"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
        before = values()
        try:
            optimizer.step()
        except dist.DistBackendError:
            say("raised")
            raise
        losses.append(loss.item())
        if (
            part is not None
        ):  # of the step before `optimizer.steps`; a process that joins has used it for nothing
            say("part", samples=part, epoch=fogdist.membership.current().epoch)
        now = fogdist.membership.current()
        if now.epoch != known:
            known = now.epoch
            say("epoch", epoch=known, living=now.living, lost=sorted(now.lost))
        if options.get("steps"):
            say("step")
        if options.get("records"):
            say("record", epoch=known, before=before, after=values())
        if (folder / "cool").exists():  # from now on, the ranks only mix
            inner.param_groups[0]["lr"] = 0.0
            cool += 1
            if cool == COOL_STEPS:
                say("cooled", values=values())
        time.sleep(options.get("pause", 0.01))
    if options.get("settles"):
        optimizer.settle()
        say("settled", values=values())
    say("end", loss=sum(losses[-20:]) / len(losses[-20:]), values=values())


# Where a process fails: the module or class, its function, whether before or after that, and the signal.
Fault = tuple[str, str, str, str]


def install(owner: str, name: str, when: str, how: str) -> None:
    """Makes this process fail at the first call of a function."""
    module, _, cls = owner.rpartition(".") if owner.rpartition(".")[2][0].isupper() else (owner, "", "")
    holder: Any = importlib.import_module(module)
    holder = getattr(holder, cls) if cls else holder
    original = getattr(holder, name)
    failed = []

    def fail() -> None:
        if not failed:
            failed.append(True)
            os.kill(os.getpid(), signal.Signals[how])

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if when == "before":
            fail()
        result = original(*arguments, **options)
        if when == "after":
            fail()
        return result

    setattr(holder, name, wrapped)


def run_rank(options: Mapping[str, Any], host: str, fresh: bool, faults: Sequence[Fault]) -> None:
    if host:
        move_to_host(host)
    if fresh:
        os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'python'}"
        os.execv(sys.executable, [sys.executable, __file__, json.dumps(options)])
    for fault in faults:
        install(*fault)
    train(options)


def open_store(served_at: str, host: str = "") -> dist.TCPStore:
    """Serves a Store at an address, after this thread has moved to a host if one is named."""
    if host:
        move_to_host(host)
    return dist.TCPStore(served_at, 0, is_master=True, wait_for_workers=False)


class Job:
    """A job of ranks, whose Store is in this process.

    Args:
        folder: For its files.
        names: The emulated hosts, if it is on several.
        environment: Variables of all processes.
        options: Options of `train`.

    Attributes:
        members: The process of each rank that takes part; the numbers of processes are in the order of their starts.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> None:
        self.folder, self.names, self.environment = folder, names, environment
        self.options = {"kind": "DecentralizedSGD", "folder": str(folder), **options}
        self.members: dict[int, int] = {}
        self._hosts = dict(enumerate(PLACEMENT))
        self._processes: list[Any] = []
        self._address = address(0) if names else "127.0.0.1"
        with concurrent.futures.ThreadPoolExecutor(1) as another:  # the host is that of a thread
            self._store = another.submit(open_store, self._address, names[0] if names else "").result()

    def start(
        self,
        rank: int,
        host: int | None = None,
        fresh: bool = False,
        faults: Sequence[Fault] = (),
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> int:
        """Starts a process, on a host if the job is on several, with options of its own; returns its number."""
        if host is not None:
            self._hosts[rank] = host
        where = self.names[self._hosts[rank]] if self.names else ""
        own = {
            "RANK": rank,
            "WORLD_SIZE": RANKS,
            "MASTER_ADDR": self._address,
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        variables = {name: str(value) for name, value in own.items()} | self.environment | (environment or {})
        arguments = (self.options | options, where, fresh, faults)
        log = self._log(len(self._processes))
        self._processes.append(harness.fork(run_rank, *arguments, log=log, environment=variables))
        return len(self._processes) - 1

    def start_all(self, environment: Mapping[str, str] | None = None) -> None:
        """Starts the first ranks, and waits until they train."""
        self.members = {rank: self.start(rank, environment=environment) for rank in range(RANKS)}
        self.agree()

    def join(self, rank: int, environment: Mapping[str, str] | None = None, **options: Any) -> int:
        """Starts a process that joins, as `start` does."""
        return self.start(rank, environment={"FOG_JOIN": "1", **(environment or {})}, **options)

    def admit(self, rank: int, **options: Any) -> int:
        """Starts a process that joins, and waits until it is a rank; returns its number."""
        self.members[rank] = self.join(rank, **options)
        self.agree()
        return self.members[rank]

    def lose(self, rank: int, *, agrees: bool = True) -> None:
        """Kills a rank, and waits until the others know it, unless they do not agree because of that."""
        number = self.members.pop(rank)
        self.kill(number)
        assert self.status(number) == -signal.SIGKILL
        if agrees:
            self.agree()

    def kill(self, number: int, signal_: int = signal.SIGKILL) -> None:
        os.kill(self._processes[number].pid, signal_)

    def is_alive(self, number: int) -> bool:
        return bool(self._processes[number].is_alive())

    def status(self, number: int) -> int:
        """Returns how a process ended, once it has."""
        self._processes[number].join(TIMEOUT)
        status = self._processes[number].exitcode
        assert status is not None, f"process {number} does not end\n{self.report()}"
        return int(status)

    def log(self, number: int) -> str:
        return self._log(number).read_text(errors="replace") if self._log(number).exists() else ""

    def _log(self, number: int) -> Path:
        return self.folder / f"{number}.log"

    def events(self, number: int, event: str) -> list[dict[str, Any]]:
        lines = [line for line in self.log(number).splitlines(True) if line.startswith('{"rank"')]
        told: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}\n")]
        return [each for each in told if each["event"] == event]

    def last(self, event: str, value: str) -> list[Any]:
        """Returns a value of each member's last event of a kind; None if there is none yet."""
        told = [self.events(self.members[rank], event) for rank in sorted(self.members)]
        return [each[-1][value] if each else None for each in told]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Waits until the condition holds."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.report()}"
            time.sleep(0.02)

    def agree(self) -> None:
        """Waits until all members have agreed that they take part."""
        living = sorted(self.members)
        self.until(
            lambda: all(each == living for each in self.last("epoch", "living")), f"no agreement on {living}"
        )

    def until_stopped(self, number: int) -> None:
        state = Path(f"/proc/{self._processes[number].pid}/stat")
        self.until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "it does not stop")

    def refused(self, rank: int, *reasons: str, status: int = 1, **options: Any) -> None:
        """Starts a process that joins and ends with these words; the job's ranks train on as before."""
        before = self.last("epoch", "epoch")
        new = self.join(rank, **options)
        assert self.status(new) == status, self.report()
        assert [each for each in reasons if each not in self.log(new)] == [], self.log(new)
        self.train_on()
        assert self.last("epoch", "epoch") == before, self.report()

    def train_on(self) -> None:
        """Checks that all members run."""
        gone = [rank for rank, number in self.members.items() if not self.is_alive(number)]
        assert gone == [], self.report()

    def cool(self) -> None:
        """Waits until the members have mixed without learning."""
        (self.folder / "cool").touch()
        self.until(lambda: None not in self.last("cooled", "step"), "no steps without learning")

    def end(self) -> list[dict[str, Any]]:
        """Ends the training; returns the last words of all members, which have ended well."""
        (self.folder / "end").touch()
        for number in self.members.values():
            assert self.status(number) == 0, self.report()
            assert "Traceback" not in self.log(number), self.report()
        return [self.events(self.members[rank], "end")[0] for rank in sorted(self.members)]

    def report(self) -> str:
        return "\n".join(
            f"== {number}: {process.exitcode}\n{self.log(number)}"
            for number, process in enumerate(self._processes)
        )

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job; `at` tells whether it is on "one host" or on "hosts", `first` variables of its first ranks."""
    with contextlib.ExitStack() as stack:

        def make(
            at: str = "one host",
            environment: Mapping[str, str] | None = None,
            first: Mapping[str, str] | None = None,
            **options: Any,
        ) -> Job:
            names = stack.enter_context(emulated_hosts(HOSTS)) if at == "hosts" else []
            common = (ON_HOSTS if names else {}) if environment is None else environment
            job = Job(tmp_path, names, common, **options)
            stack.callback(job.close)
            job.start_all(first)
            return job

        yield make


def end_alike(job: Job, joined: Sequence[int], *, in_step: bool = True) -> NDArray[np.float64]:
    """Ends a job whose members have made steps since, and returns their values: the same, because they only mix now."""
    job.cool()
    ends = job.end()
    steps = [each["step"] for each in ends]
    assert all(end > begin for end, begin in zip(steps, joined, strict=True)), (steps, joined)
    # Ranks that wait for their neighbors see the end at most two exchanges, of up to three steps, apart.
    assert not in_step or (min(steps) > max(joined) and max(steps) - min(steps) <= 12), steps
    values = np.array([each["values"] for each in ends])
    np.testing.assert_allclose(values, values[[0] * len(values)], rtol=0.0, atol=1e-5)
    return values


@pytest.mark.parametrize(
    "kind",
    [
        *(
            always := [
                "wrapper",
                "DecentralizedSGD",
                "DecentralizedSGD/patience/freezes",
                "DiLoCo/streaming/reschedules",
                "DecentralizedSGD/tuned",
            ]
        ),
        *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in always),
    ],
)
def test_a_process_joins_and_mixes(new_job: Callable[..., Job], kind: str) -> None:
    """Two ranks are lost, one after the other, and new processes take their numbers; the first one learns as they do.

    The second one comes when nobody learns: it must not change the parameters, because it begins with those of another.
    """
    job = new_job(kind=kind)
    job.lose(2, agrees=kind in IN_STEP)
    job.admit(2, fresh=kind == "wrapper")
    job.cool()
    before = job.last("cooled", "values")
    job.lose(1, agrees=kind in IN_STEP)
    job.admit(1)
    after = end_alike(job, job.last("epoch", "step"), in_step=kind in IN_STEP)
    # With its own parameters, the mean would be another by some 0.1. DiLoCo's outer momentum still moves it a little.
    np.testing.assert_allclose(after, before, rtol=0.0, atol=1e-2)


@pytest.mark.parametrize("kind", ["DecentralizedSGD", "DecentralizedSGD/awc", "LocalSGD"])
def test_a_process_that_joins_goes_on_at_the_position_in_the_data(
    new_job: Callable[..., Job], kind: str
) -> None:
    """A lost rank, and then a new number; each sample of a batch is used once as soon as the ranks have measured again."""
    length, batch = 1010, 40
    count = -(-length // batch)
    job = new_job(kind=kind, length=length, batch=batch, by_samples=True, environment={"FOG_MAX_RANKS": "5"})
    job.lose(2)
    job.admit(2)
    job.admit(4)
    joined = max(job.last("epoch", "step"))
    job.until(lambda: min(job.last("part", "step")) > joined + 60, "no steps")
    # The step in which a process joins is made with a batch from before; each rank's log has the step after it.
    of_step: dict[int, list[list[int]]] = {}
    for number in job.members.values():
        for event in job.events(number, "part")[1:]:
            of_step.setdefault(event["step"] - 1, []).append(event["samples"])
    job.end()
    late = [step for step in of_step if joined + 20 < step < joined + 60]
    assert len(late) == 39, sorted(of_step)
    for step in late:
        number = step % count
        expected = range(number * length // count, (number + 1) * length // count)
        assert sorted(itertools.chain(*of_step[step])) == list(expected), (step, of_step[step])
        assert len(of_step[step]) == 5 and min(map(len, of_step[step])) >= 1
    # From its first own step on, a process uses samples of the batch where the others are.
    first = next(each["step"] for each in job.events(job.members[4], "epoch") if 4 in each["living"])
    for event in job.events(job.members[4], "part"):
        if event["step"] > first:
            number = (event["step"] - 1) % count
            assert number * length // count <= min(event["samples"]), event
            assert max(event["samples"]) < (number + 1) * length // count, event


@pytest.mark.parametrize("way", ["tcp", "rma"])
def test_processes_join_on_each_kind_of_host(new_job: Callable[..., Job], way: str) -> None:
    """Beside living ranks, alone, on a new host, and on the host of others; at last in place of the lowest rank.

    Where data goes by RMA, it goes by TCP between these and the others.
    """
    job = new_job("hosts", {**ON_HOSTS, "FOG_BETWEEN_HOSTS": way, "UCX_TLS": "shm,self"})
    for rank, host in [(1, 0), (2, 1), (3, FREE), (0, FREE)]:
        job.lose(rank)
        job.admit(rank, host=host, fresh=rank == 0)
    end_alike(job, job.last("epoch", "step"))


@pytest.mark.parametrize(("at", "ranks"), [("one host", (2, 1, 3, 0)), ("hosts", (2, 0))])
def test_ranks_that_go_at_their_own_pace(
    new_job: Callable[..., Job], at: str, ranks: tuple[int, ...]
) -> None:
    """Nobody agrees because of a loss, so each epoch has the same ranks. At last the rank is lost that has answered."""
    job = new_job(at, kind="wrapper/async")
    for epoch, rank in enumerate(ranks, start=1):
        job.lose(rank, agrees=False)
        job.admit(rank)
        job.until(lambda: set(job.last("epoch", "epoch")) == {epoch}, "they are not in one epoch")
    job.end()


def check_averages(job: Job) -> None:
    """Compares the rounds of the last epoch with products by the mixing matrix of a ring.

    Args:
        job: One that records, with a learning rate of 0 and an exchange in each step; random numbers are added before.
    """
    (epoch,) = set(job.last("epoch", "epoch"))
    steps: list[dict[int, Any]] = []

    def common() -> list[int]:
        told = [job.events(job.members[rank], "record") for rank in sorted(job.members)]
        steps[:] = [{each["step"]: each for each in records if each["epoch"] == epoch} for records in told]
        return sorted(set.intersection(*(set(each) for each in steps)))

    job.until(lambda: len(common()) >= 10, "the ranks make no common steps")
    W = mixing_matrix(fogdist.topology.ring(len(job.members)))
    # In its first exchange a process that joins has the values of another rank, which it has got within the step.
    for t in common()[1:]:
        x, y = (np.array([each[t][when] for each in steps]) for when in ("before", "after"))
        np.testing.assert_allclose(y, W.T @ x, rtol=0.0, atol=1e-5)


def test_ranks_come_and_go(new_job: Callable[..., Job]) -> None:
    """Processes join at once, beyond the first numbers, are lost, and others take their numbers; so does the giver."""
    job = new_job(
        first={"FOG_MAX_RANKS": "6"}, rate=0.0, records=True
    )  # those that join learn it from the others
    job.members |= {5: job.join(5, fresh=True), 4: job.join(4)}
    job.agree()
    check_averages(job)
    for rank in (5, 1):
        job.lose(rank)
    job.admit(1)
    assert job.last("epoch", "lost") == [[5]] * 5, job.report()
    job.lose(1)  # which has joined
    job.admit(1)
    job.lose(0)  # which gave it its state
    job.members |= {0: job.join(0), 5: job.join(5)}
    job.agree()
    most = (
        "RANK: got 6; allowed for a process that joins this job are ranks below 6, the most that it can have"
    )
    job.refused(6, most)
    check_averages(job)
    job.end()


@pytest.mark.long
def test_a_process_that_joins_adds_its_share(new_job: Callable[..., Job]) -> None:
    """Sums over all ranks: those of before, and those of the process, which begins with another rank's average."""
    first = {"FOG_MAX_RANKS": "5"}
    job = new_job(kind="AsynchronousGossip", first=first, rate=0.0, apart=True, settles=True)
    job.cool()  # so that ranks have the mean of 1, 2, 3 and 4
    job.admit(4)
    job.cool()
    job.end()
    values = np.array(job.last("settled", "values"))
    np.testing.assert_allclose(values.sum(axis=0), 5 * 2.5, rtol=1e-5)
    np.testing.assert_allclose(values, 2.5, rtol=1e-3)


@pytest.mark.long
def test_a_graph_without_a_place_for_more_ranks(new_job: Callable[..., Job]) -> None:
    """Weights that do not sum to 1 mean nothing for more ranks: the process is refused. A lost rank's place is free."""
    job = new_job(first={"FOG_MAX_RANKS": "5"}, scale=0.9)
    job.refused(4, "the topology has no place for more ranks than 4")
    job.lose(2)
    job.admit(2)
    job.end()


def test_fewer_ranks_at_most_than_at_the_start(tmp_path: Path) -> None:
    job = Job(tmp_path, [], {"FOG_MAX_RANKS": "3"})
    numbers = [job.start(rank) for rank in range(RANKS)]
    assert [job.status(number) for number in numbers] == [1] * RANKS, job.report()
    allowed = "FOG_MAX_RANKS: got 3; allowed are numbers from the number of ranks at the start on, 4"
    assert allowed in job.log(0)


# --- a process that joins, or the rank that gives its state, is lost ----------------------------------------------

JOINER = "fogdist.elastic.joiner.Joiner"
# Where a process ends while it joins.
PHASES = [
    ("fog_pg._joining", "begin", "after"),
    (JOINER, "pull", "before"),
    (JOINER, "_read", "before"),
    (JOINER, "enter", "before"),
    (JOINER, "_await", "before"),
    (JOINER, "enter", "after"),
    (JOINER, "entries", "after"),
    ("fogdist.elastic.membership.Members", "_formed", "after"),
    ("fogdist.elastic.membership.Members", "_join", "after"),
]


def kill(job: Job) -> None:
    """In each phase; the others train on."""
    for phase in (PHASES[1:] if job.names else PHASES) if ALL else PHASES[4:6]:
        new = job.join(2, faults=[(*phase, "SIGKILL")])
        assert job.status(new) == -signal.SIGKILL, (phase, job.log(new))
        job.agree()
        job.train_on()


def stop(job: Job) -> None:
    """The others wait for it a few seconds, and count it as lost. Its number is free again when it has ended."""

    def taken_in() -> list[
        int
    ]:  # the epoch may have ended before a rank's next step, so it may be told in the log only
        return [job.log(number).count("of which [2] joined") for number in job.members.values()]

    before = taken_in()
    new = job.join(2, faults=[(JOINER, "enter", "after", "SIGSTOP")])
    job.until(lambda: taken_in() == [times + 1 for times in before], "it is not taken in")
    job.agree()
    job.kill(new)
    job.status(new)


def lose_the_giver(job: Job, method: str) -> None:
    """The process stops, the rank with the lowest number is killed, and the process goes on."""
    new = job.join(2, faults=[(JOINER, method, "before", "SIGSTOP")])
    job.until_stopped(new)
    job.lose(0)
    job.kill(new, signal.SIGCONT)
    job.members[2] = new
    job.agree()
    job.admit(0)
    job.lose(2)


def come_too_late(job: Job) -> None:
    """Two processes want one number; the one that comes too late is refused, and leaves nothing that others read."""
    late = job.join(2, faults=[(JOINER, "enter", "before", "SIGSTOP")])
    job.until_stopped(late)
    job.admit(2)
    job.kill(late, signal.SIGCONT)
    assert job.status(late) == 1
    assert "is refused: rank 2 still runs" in job.log(late)
    job.lose(3)
    job.admit(3)
    job.lose(2)


@pytest.mark.parametrize("at", ["one host", "hosts"])
def test_processes_that_fail_while_they_join(new_job: Callable[..., Job], at: str) -> None:
    """Each is to be rank 2 of a job that trains on; at last one comes that does not fail."""
    job = new_job(at)
    job.lose(2)
    kill(job)
    if ALL or at == "one host":
        lose_the_giver(job, "_read")
    if ALL:
        lose_the_giver(job, "enter")
        stop(job)
        come_too_late(job)
    job.admit(2)
    job.end()


@pytest.mark.long
def test_a_rank_that_is_stopped_keeps_its_number(new_job: Callable[..., Job]) -> None:
    """Nobody takes the number of a rank that counts as lost but runs, until its process has ended."""
    job = new_job(environment={"FOG_LOST_AFTER": "2"})
    stopped = job.members.pop(2)
    job.kill(stopped, signal.SIGSTOP)
    job.agree()
    job.refused(2, "rank 2 still runs; a process takes the number of a rank that is gone")
    job.kill(stopped, signal.SIGCONT)
    assert job.status(stopped) == 1
    assert "takes no part any more" in job.log(stopped) or "takes no further part" in job.log(stopped)
    job.admit(2)
    job.end()


@pytest.mark.long
def test_a_host_that_is_cut_off_is_replaced(new_job: Callable[..., Job]) -> None:
    """Nobody sees its processes end. Another process has the number when the link is back, and the old one ends."""
    job = new_job("hosts")
    old = job.members.pop(3)
    with cut_link(INTERFACE, namespace=job.names[2]):
        job.agree()
        job.admit(3, host=FREE)
    assert job.status(old) != 0, job.report()
    job.agree()
    job.end()


# --- a process that is refused ----------------------------------------------------------------------------------

STILL_RUNS = "still runs; a process takes the number of a rank that is gone"
ANOTHER_SECRET = {"FOG_JOB_SECRET": "another secret than the job's"}
DIFFERS = "must be the same as on the ranks of the job that this process joins"
# Requests that no joiner writes.
GARBAGE = ["garbage", "[1, 2]", '{"told": {"rank": 2}, "proof": 7}', "1", "", "[" * 100_000]


def test_who_is_refused(new_job: Callable[..., Job]) -> None:
    """Each learns the reason, and training goes on. The job has its secret from the environment."""
    job = new_job(environment={"FOG_JOB_SECRET": "the secret of this job"})
    for rank in (0, 1):  # the rank that answers is one of them
        job.refused(rank, f"rank {rank} {STILL_RUNS}")
    job.lose(2)
    job.refused(2, status=3, writes=GARBAGE[0])
    job.refused(2, "it does not know the job's secret (FOG_JOB_SECRET)", environment=ANOTHER_SECRET)
    assert job.log(0).count("ticket 3) is refused: its request is not complete") == 1, job.report()
    unknown = "does not know the job's secret: set FOG_JOB_SECRET as for the other ranks"
    job.refused(2, unknown, environment={"FOG_JOB_SECRET": ""})  # the Store does not have it
    size = f"WORLD_SIZE: got 5; allowed for a process that joins this job is {RANKS}, as at its start"
    job.refused(2, size, environment={"WORLD_SIZE": "5"})
    job.refused(2, f"the topology {DIFFERS}", graph="fully_connected")
    job.refused(2, f"model {DIFFERS}, but differs:", width=7)
    job.refused(2, f"model {DIFFERS}, but differs:", dtype="float64")
    other = "it makes fogdist.LocalSGD 0, the job has fogdist.DecentralizedSGD 0"
    job.refused(2, other, kind="LocalSGD")
    job.refused(2, "this process joins a running job, and ExactDiffusion", kind="ExactDiffusion")
    job.admit(2)
    assert all(each["loss"] < 3.0 for each in job.end()[:2]), job.report()


def test_who_is_refused_on_several_hosts(new_job: Callable[..., Job]) -> None:
    """For the reasons that only hosts have; the others are those of one host."""
    job = new_job("hosts")
    job.refused(0, f"rank 0 {STILL_RUNS}", host=FREE)
    job.lose(2)
    way = "FOG_BETWEEN_HOSTS is 'tcp' here, and 'auto' on the job's ranks"
    job.refused(2, way, environment={"FOG_BETWEEN_HOSTS": "tcp"})
    with cut_link(INTERFACE, peer=address(2), namespace=job.names[FREE]):
        job.refused(2, "it does not reach rank 3 on host", host=FREE)
    job.admit(2)
    job.end()


def test_a_job_that_cannot_be_joined(new_job: Callable[..., Job]) -> None:
    reason = "was started to join a running job as rank 2, but the job cannot be joined"
    new_job("one host", on_loss="raise").refused(2, reason)


# --- the rank that answers, without ranks -----------------------------------------------------------------------

GROUP = 7


class Answering:
    """A rank that answers, and what it asks the extension; joiners are children of the test."""

    admission: admissions.Admission

    def __init__(self) -> None:
        self.secret = "a secret of this test"
        self.store = dist.HashStore()
        self.judged: list[int] = []

    def job_secret(self) -> str:
        return self.secret

    def announced(self) -> int:
        return 0

    def announce(self, entry: str) -> bool:
        return bool(Path(f"/proc/{entry}").exists())

    def read_entry(self, entry: str) -> dict[str, Any]:
        return {"pid": int(entry), "is_visible": True, "addresses": []}

    def own_entry(self) -> str:
        return str(os.getpid())

    def ask(self, entry: object) -> int:
        """Asks as a joiner does; returns its ticket."""
        joiner = joiner_of(self.store, 10.0)
        joiner._entry = str(entry)
        joiner._objects = ["one"], "one"
        joiner._ticket = self.store.add("fog/join/count", 1)
        joiner._request()
        return joiner._ticket

    def poll(self, admission: admissions.Admission | None = None) -> None:
        member = Member(0, 1, 10.0, 0.0)

        def asked(request: Request, is_ready: bool, is_answered: bool) -> list[Action]:
            self.judged.append(request.ticket)
            return member.asked(0.0, request, "", runs=False, is_ready=is_ready, is_answered=is_answered)

        admission = admission or self.admission
        if not admission.answers():
            admission.publish_nonce()
        admission.poll(0, asked, lambda: {"one": {"values": torch.ones(1000)}}, [0])


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Answering:
    answering = Answering()
    monkeypatch.setattr(tickets._extension, "load", lambda: answering)
    answering.admission = admissions.Admission(answering.store, GROUP)  # which loads the extension
    answering.admission.publish_nonce()
    return answering


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def joiner_of(store: dist.Store, timeout: float) -> joiners.Joiner:
    """Returns a joiner that this process plays."""
    joiner = joiners.Joiner(_joining.World(store, GROUP, RANKS, {}, [], RANKS), 2, timeout)
    joiner._entry = str(os.getpid())
    return joiner


def states() -> int:
    """Returns how many states this process holds for joiners."""
    names = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(each.readlink()))
    return sum("fog_state" in name for name in names)


def until_states(number: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while states() != number:
        assert time.monotonic() < deadline, states()
        time.sleep(0.01)


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_is_refused_once(rank: Answering, text: str) -> None:
    """Whatever the Store contains; the next rank that answers does not read it again, and nothing stays but the reason."""
    ticket = rank.store.add("fog/join/count", 1)
    rank.store.set(f"fog/join/{ticket}/request", text)
    rank.poll()
    assert rank.store.get(f"fog/join/{ticket}/refused")
    assert not rank.store.check([f"fog/join/{ticket}/request"])
    keys = rank.store.num_keys()
    rank.poll(admissions.Admission(rank.store, GROUP))
    assert rank.judged == []
    assert rank.store.get("fog/join/first") == b"2"
    assert rank.store.num_keys() == keys


def test_an_address_that_cannot_be_read_is_refused(rank: Answering) -> None:
    """Also where nobody can read which ticket is the first."""
    rank.store.set("fog/join/first", "many")
    ticket = rank.ask("no address")
    rank.poll()
    assert b"its address cannot be read" in rank.store.get(f"fog/join/{ticket}/refused")
    assert rank.judged == [] and rank.store.get("fog/join/first") == b"2"


def test_wrong_types_are_refused(rank: Answering) -> None:
    """Of one that knows the secret, such as another version."""
    told = {"rank": 2, "entry": "1", "objects": ["one"], "at": "one", "nonce": "00", "challenge": "00"}
    wrong = [{"rank": "2"}, {"rank": True}, {"objects": [1]}, {"objects": 3}, {"entry": None}, {"another": 1}]
    for values in ({}, *wrong, {"nonce": []}):
        text = tickets.signed("request", told | values, group=GROUP, ticket=1)
        if not values:
            right = text
            assert tickets.request_from(GROUP, 1, text).rank == 2
        else:
            with pytest.raises(ValueError, match="its request is not complete"):
                tickets.request_from(GROUP, 1, text)
    rank.secret = "another secret of this test"
    with pytest.raises(ValueError, match="it does not know the job's secret"):
        tickets.request_from(GROUP, 1, right)


def test_a_proof_counts_once_and_in_one_job(rank: Answering, child: subprocess.Popen[bytes]) -> None:
    """A copy of a request is refused under another ticket and in another job, and is not answered by another rank."""
    ticket = rank.ask(child.pid)
    text = rank.store.get(f"fog/join/{ticket}/request")
    rank.poll()
    assert rank.judged == [ticket]
    again = rank.store.add("fog/join/count", 1)
    rank.store.set(f"fog/join/{again}/request", text)
    rank.poll()
    assert b"does not know the job's secret" in rank.store.get(f"fog/join/{again}/refused")
    # another job; a rank that has never seen it
    for group, is_refused in ((GROUP + 1, True), (GROUP, False)):
        other = dist.HashStore()
        other.add("fog/join/count", 1)
        other.set("fog/join/1/request", text)
        rank.judged.clear()
        rank.poll(admissions.Admission(other, group))
        assert other.check(["fog/join/1/refused"]) == is_refused
        assert rank.judged == [] and not other.check(["fog/join/1/answer"])
    rank.admission.leave_to_another(0)


def test_a_state_is_kept_only_for_a_process_that_comes_for_it(
    rank: Answering, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_PATIENCE", 1.0)
    rank.ask(child.pid)
    rank.poll()
    until_states(1)
    rank.admission.leave_to_another(1)  # a rank with a lower number answers now
    until_states(0)
    rank.ask(child.pid)
    rank.poll()
    until_states(1)
    child.kill()  # nobody polls again
    until_states(0)
    child.wait()
    rank.poll()
    assert rank.store.get("fog/join/first") == b"3"
    assert not rank.store.check(["fog/join/1/request"]) and not rank.store.check(["fog/join/2/answer"])


def test_a_ticket_that_its_process_has_left_is_over(
    rank: Answering, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that asks anew leaves its first ticket. It lives on, and the first copy must not live as long."""
    monkeypatch.setattr(admissions, "_EMPTY_TIMEOUT", 0.0)
    first = rank.ask(child.pid)
    rank.poll()
    until_states(1)
    tickets.delete(rank.store, first, "request", "answer")
    second = rank.ask(child.pid)
    rank.poll()
    assert rank.judged == [first, second]
    until_states(1)
    rank.poll()
    assert rank.store.get("fog/join/first") == b"2"
    rank.admission.leave_to_another(1)
    until_states(0)


@pytest.mark.parametrize("end", ["died", "failed"])
def test_a_process_that_could_not_join_leaves_no_ticket(
    rank: Answering, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """It has asked another rank and died, or it has failed and lives on."""
    monkeypatch.setattr(admissions, "_EMPTY_TIMEOUT", 0.0)
    joiner = joiner_of(rank.store, 10.0)
    joiner._ticket = rank.store.add("fog/join/count", 1)
    joiner._request()
    if end == "failed":
        joiner.leave()
    next_one = admissions.Admission(rank.store, GROUP)
    for _ in range(2):
        rank.poll(next_one)
    assert not rank.store.check(["fog/join/1/request"]) and rank.store.get("fog/join/first") == b"2"


@pytest.mark.parametrize("part", ["state", "file", "thread"])
def test_a_rank_that_cannot_give_its_state_trains_on(
    rank: Answering, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The process learns why, and does not ask again and again."""
    ticket = rank.ask(child.pid)

    def fail(*_: object) -> NoReturn:
        raise {"state": MemoryError, "file": OSError, "thread": RuntimeError}[part]("no more of these")

    if part == "file":
        monkeypatch.setattr(os, "memfd_create", fail)
    if part == "thread":
        monkeypatch.setattr(threading.Thread, "start", fail)
    rank.admission.poll(
        0, lambda request, *_: [Give(request)], fail if part == "state" else lambda: {"one": {}}, [3, 4]
    )
    assert b"rank 3 could not copy its state" in rank.store.get(f"fog/join/{ticket}/refused")
    assert b"no more of these" in rank.store.get(f"fog/join/{ticket}/refused")
    assert not rank.store.check([f"fog/join/{ticket}/request"])
    until_states(0)


@pytest.mark.usefixtures("rank")
def test_a_joiner_asks_again_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example if a firewall closes the port of the rank that gives the state: nobody is gone, and no state comes."""
    joiner = joiner_of(dist.HashStore(), 0.5)
    asked: list[int] = []

    def no_state(_: object) -> None:
        asked.append(joiner._ticket)
        assert time.monotonic() < end, "it asks without end"
        time.sleep(0.05)

    def answered(_: str) -> str:
        return tickets.signed("answer", {"living": []}, joiner._nonce, group=GROUP, ticket=joiner._ticket)

    monkeypatch.setattr(joiner, "_await", answered)
    monkeypatch.setattr(joiner, "_read", no_state)
    end = time.monotonic() + 10.0
    with pytest.raises(
        dist.DistBackendError, match=r"cannot join the job as rank 2: no state came within 0\.5 s"
    ):
        joiner.pull(["one"], "one")
    assert len(asked) > 1 and asked == sorted(set(asked))


@pytest.mark.parametrize(
    ("others", "timeout", "answer", "message"),
    [
        ([], 10.0, "", "no rank of the job is left"),
        (["1"], 0.1, "", r"had no answer within 0\.1 s"),
        (["1"], 10.0, "an answer", "does not come from a process that knows the job's secret"),
    ],
)
def test_a_joiner_says_why_it_ends(
    rank: Answering,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    others: list[str],
    timeout: float,
    answer: str,
    message: str,
) -> None:
    monkeypatch.setattr(joiners, "_WARN_AFTER", 0.0)
    joiner = joiner_of(rank.store, timeout)
    monkeypatch.setattr(joiner, "_others", lambda: others)
    if answer:
        rank.store.set("fog/join/1/answer", answer)
    with pytest.raises(dist.DistBackendError, match=message):
        joiner.pull(["one"], "one")
    assert ("joining as rank 2: no answer yet" in caplog.text) == (not answer)


@pytest.mark.usefixtures("rank")
def test_a_joiner_whose_state_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    joiner = joiner_of(dist.HashStore(), 10.0)
    monkeypatch.setattr(joiners, "Source", Mock(side_effect=OSError("its port is closed")))
    assert joiner._read({}) is None and joiner._failure == "its port is closed"
    monkeypatch.setattr(joiners, "Source", Mock(**{"return_value.read.return_value": None}))
    with pytest.raises(
        dist.DistBackendError, match="rank 2: the rank that answered could not write its state"
    ):
        joiner._read({})


@pytest.mark.usefixtures("rank")
def test_a_joiner_that_is_forgotten_does_not_wait() -> None:
    """A rank takes a joiner for ended if the connection breaks over which that one has got its state."""
    store = dist.HashStore()
    joiner = joiner_of(store, 10.0)
    joiner._objects = ["one"], "one"
    joiner._ticket = store.add("fog/join/count", 1)
    joiner._others = lambda: [str(os.getpid())]  # type: ignore[method-assign]
    joiner._request()
    tickets.delete(store, joiner._ticket, "request")
    with pytest.raises(dist.DistBackendError, match="rank 2: the rank that answers has taken it for ended"):
        joiner.enter()


def test_the_entry_of_a_later_process_stays() -> None:
    """A rank that was stopped may tell the Store of an epoch that is long past."""
    store = dist.HashStore()
    for epoch, entry in ((0, "first"), (3, "third"), (2, "second")):
        _joining.publish(store, 1, GROUP, RANKS, entry, epoch)
    assert _joining.entry_of(store, 1) == "third"
    assert _joining.read_world(store, RANKS).size == RANKS
    store.set(_joining._ENTRY.format(rank=1), json.dumps({"entry": 1}))
    with pytest.raises(
        RuntimeError, match="another version of fog than this process: rank 1 tells 1 as its 'entry'"
    ):
        _joining.read_world(store, RANKS)


# --- what it costs without joiners ----------------------------------------------------------------------------


def train_quietly(steps: int) -> list[int]:
    """Returns how many packets each connection to the Store has sent, before and after some steps."""
    fogdist.init()
    model = torch.nn.Linear(4, 4)
    fogdist.broadcast_parameters(model.state_dict(), 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = algorithms.DecentralizedSGD(sgd, model, on_loss="continue")
    store = dist.distributed_c10d._get_default_store()

    def packets() -> int:
        offset = 136  # of tcpi_segs_out in struct tcp_info
        infos = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232) for each in connections(store)]
        assert infos
        return sum(struct.unpack_from("I", info, offset)[0] for info in infos)

    def step() -> None:
        model(torch.ones(4)).sum().backward()
        optimizer.step()

    step()
    dist.barrier()
    before = packets()
    store.check(["a request"])
    asked = packets()
    assert asked > before
    for _ in range(steps):
        step()
    return [asked, packets()]


def test_steps_without_joiners_ask_the_store_nothing(new_world: Callable[..., World]) -> None:
    for before, after in new_world(2).run(train_quietly, 100):
        assert before <= after <= before + 1  # an acknowledgement may come late


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(
        1, signal.SIGKILL
    )  # PR_SET_PDEATHSIG: it ends with the server that it was forked from
    train(json.loads(sys.argv[1]))
