"""Tests of processes that join a running job: each algorithm, losses before and after, and who is refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import fogdist
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import algorithms, joining
from fogdist.state_transfer import read_file
from fogdist.topology import mixing_matrix
from harness import ALL, World
from hosts import connections
from numpy.typing import NDArray
from scripts import ROOT

from fog_pg import _joining

TIMEOUT = 180.0  # enough for a busy machine
RANKS = 4
# A joining process has this time from its start to its first exchange on a machine with a core for it
# (docs/membership.md); tests only check that it joins.
OWN_PACE = [
    "wrapper/async",
    "WinPut",
    "PullGet",
    "WindowPushSum",
    "WindowPushSum/async",
    "WindowPushSum/patience",
    "AsynchronousGossip",
]
KINDS = [
    "wrapper",
    "DecentralizedSGD",
    "DecentralizedSGD/awc",
    "DecentralizedSGD/cta",
    "LocalSGD",
    "DecentralizedAdamW",
    "GossipPGA",
    "PushSumSGD",
    "DiLoCo",
    "ChocoSGD",
    "LEAD",
    "DeepSqueeze",
    "AdaptThenCombine",
    "wrapper/patience",
    "DecentralizedSGD/patience",
    *OWN_PACE,
]

SCRIPT = """
import ctypes, json, os, signal, sys, time
from datetime import timedelta
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test that is killed leaves no rank
import torch
import torch.distributed as dist
import fogdist

options = json.loads(sys.argv[1])
dist.init_process_group("fog", timeout=timedelta(seconds=60))
make = getattr(fogdist, options.get("graph", "RingGraph"))
if "scale" in options:  # weights that do not sum to 1
    def make(size):
        graph = fogdist.RingGraph(size)
        for i, j in graph.edges:
            graph[i][j]["weight"] *= options["scale"]
        return graph
fogdist.init(make, is_weighted="scale" in options)
rank = dist.get_rank()
is_newcomer = bool(int(os.environ.get("FOG_JOIN") or 0))
if is_newcomer and options.get("newcomer_writes"):  # no request of its own
    from fog_pg import _joining
    store = _joining.store_of_first(dist.group.WORLD._get_backend(torch.device("cpu")))
    store.set(f"fog/join/{store.add('fog/join/count', 1)}/request", options["newcomer_writes"])
    sys.exit(3)
torch.manual_seed(rank)
dtype = torch.float64 if is_newcomer and options.get("newcomer_dtype") else torch.float32
width = 7 if is_newcomer and options.get("newcomer_width") else 6
model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)).to(dtype)
fogdist.broadcast_parameters(model.state_dict(), 0)
kind, _, order = options["kind"].partition("/")
on_loss = options.get("on_loss", "continue")
if kind == "DecentralizedAdamW":
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
else:
    inner = torch.optim.SGD(model.parameters(), lr=options.get("rate", 0.05), momentum=0.5)
modes = {"async": {"mode": "async"}, "patience": {"patience": 5.0}}
if "apart" in options:  # ranks begin with multiples of the same values
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank + 1.0)
if kind == "wrapper":
    called = fogdist.DecentralizedDataParallel(model, inner, on_loss=on_loss, broadcast="apart" not in options, **modes.get(order, {}))
    optimizer, count = inner, lambda: called.round
else:
    more = {"LocalSGD": {"local_steps": 3}, "DiLoCo": {"local_steps": 2}, "GossipPGA": {"period": 3}}.get(kind, {})
    if order == "patience":
        more |= modes[order]
    elif order and order != "async":
        more |= {"order": order}
    if kind in ("ChocoSGD", "LEAD", "DeepSqueeze"):
        more = {"compression": fogdist.compression.Int4(), "gamma": 0.9}
    optimizer = getattr(fogdist.algorithms, kind)(inner, model, on_loss=on_loss, **more)
    if order == "async":
        optimizer.force_barrier = False
    called, count = model, lambda: optimizer.steps
weights = torch.tensor([[1.0], [-1.0], [2.0], [0.5]], dtype=dtype)

def say(**values):
    print(json.dumps({"rank": rank, "pid": os.getpid(), **values}), flush=True)

def values():
    with torch.no_grad():
        return torch.cat([p.reshape(-1) for p in model.parameters()]).double()

say(event="made", calls=0)
known, losses = -1, []
while count() < options["steps"] and not os.path.exists(options["end"]):
    x = torch.randn(16, 4, dtype=dtype)
    optimizer.zero_grad()
    loss = ((called(x) - x @ weights) ** 2).mean()
    loss.backward()
    if options.get("records"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
    before = values()
    optimizer.step()
    losses.append(loss.item())
    now = fogdist.membership.current()
    if now.epoch != known:
        known = now.epoch
        say(event="epoch", epoch=known, living=now.living, lost=sorted(now.lost), step=count())
    if options.get("records"):
        record = {"epoch": now.epoch, "before": before.tolist(), "after": values().tolist()}
        with open(f"{options['records']}/{os.getpid()}", "a") as file:
            print(json.dumps({"step": count(), **record}), file=file)
    time.sleep(options.get("pause", 0.01))
if options.get("settles"):
    optimizer.settle()
    weights = optimizer.push_sum_weights() if kind == "WindowPushSum" else [1.0]
    say(event="settled", weights=weights, values=values().tolist())
say(event="end", step=count(), loss=sum(losses[-20:]) / len(losses[-20:]), norm=float(values().norm()))
"""


# Requests that no newcomer writes.
GARBAGE = ["garbage", "[1, 2]", '{"request": {"rank": 2}, "proof": 7}', "1", "", "[" * 100_000]


class Job:
    """A job of ranks on this host, whose Store is in this process."""

    address = "127.0.0.1"

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.port = self.open_store()
        self.options = {"kind": "DecentralizedSGD", "steps": 100_000, "end": str(folder / "end"), **options}
        self.processes: list[tuple[subprocess.Popen[bytes], Path]] = []
        (folder / "script.py").write_text(SCRIPT)

    def open_store(self) -> int:
        """Returns the Store's port."""
        self.store = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False)
        return self.store.port

    def before(self, rank: int) -> list[str]:
        """Returns the words before the command of a rank."""
        return []

    def start(self, rank: int, **environment: str) -> int:
        """Starts a process; returns its number."""
        log = self.folder / f"{len(self.processes)}.log"
        own = {
            "RANK": rank,
            "WORLD_SIZE": RANKS,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}:{ROOT / 'tests'}",
        }
        variables = os.environ | {name: str(value) for name, value in own.items()} | environment
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *self.before(rank),
                    sys.executable,
                    str(self.folder / "script.py"),
                    json.dumps(self.options),
                ],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append((process, log))
        return len(self.processes) - 1

    def join(self, rank: int, **environment: str) -> int:
        """Starts a process that joins; returns its number."""
        return self.start(rank, FOG_JOIN="1", **environment)

    def kill(self, number: int, signal_: int = signal.SIGKILL) -> None:
        self.processes[number][0].send_signal(signal_)

    def log(self, number: int) -> str:
        return self.processes[number][1].read_text(errors="replace")

    def events(self, number: int, event: str) -> list[dict[str, Any]]:
        lines = [line for line in self.log(number).splitlines() if line.startswith('{"rank"')]
        told: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [each for each in told if each["event"] == event]

    def start_all(self) -> None:
        """Starts the first ranks, and waits until they train."""
        for rank in range(RANKS):
            self.start(rank)
        self.until(
            lambda: all(self.events(number, "epoch") for number in range(RANKS)), "the ranks do not train"
        )

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Waits until the condition holds."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.report()}"
            time.sleep(0.02)

    def until_living(self, numbers: list[int], living: list[int]) -> None:
        """Waits until these processes have agreed that these ranks take part."""

        def agreed() -> bool:
            told = [self.events(number, "epoch") for number in numbers]
            return all(each and each[-1]["living"] == living for each in told)

        self.until(agreed, f"processes {numbers} do not agree on {living}")

    def end(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Ends the training; returns the last words of these processes, which have ended well."""
        (self.folder / "end").touch()
        for number in numbers:
            try:
                status = self.processes[number][0].wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                raise AssertionError(self.report()) from None
            assert status == 0, self.report()
        return [self.events(number, "end")[0] for number in numbers]

    def report(self) -> str:
        texts = [
            f"== {number}: {self.processes[number][0].poll()}\n{self.log(number)}"
            for number in range(len(self.processes))
        ]
        return "\n".join(texts)

    def close(self) -> None:
        for process, _ in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Job:
            job = Job(tmp_path, **options)
            stack.callback(job.close)
            job.start_all()
            return job

        yield make


def lose(job: Job, number: int, others: list[int], living: list[int]) -> None:
    job.kill(number)
    job.until_living(others, living)


def until_stopped(job: Job, number: int) -> None:
    state = Path(f"/proc/{job.processes[number][0].pid}/stat")
    job.until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "it does not stop")


@pytest.mark.parametrize(
    "kind", [*KINDS[:2], *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[2:])]
)
def test_a_process_joins_and_mixes(new_job: Callable[..., Job], kind: str) -> None:
    """Rank 2 is lost and a new process takes its number; all train on, and end close to each other."""
    job = new_job(kind=kind)
    is_in_step = kind not in OWN_PACE and not kind.endswith("/patience")
    if not is_in_step:  # nobody meets because of the loss
        job.kill(2)
        job.processes[2][0].wait()
    else:
        lose(job, 2, [0, 1, 3], [0, 1, 3])
    new = job.join(2)
    everyone = [0, 1, 3, new]
    job.until(lambda: job.events(new, "epoch"), "the process does not join")
    job.until_living(everyone, [0, 1, 2, 3])
    joined = [job.events(number, "epoch")[-1]["step"] for number in everyone]
    time.sleep(1.0)
    ends = job.end(everyone)
    steps = [each["step"] for each in ends]
    assert all(end > begin for end, begin in zip(steps, joined, strict=True)), (steps, joined)
    assert not is_in_step or (min(steps) > max(joined) and max(steps) - min(steps) <= 12), steps
    norms = [each["norm"] for each in ends]
    assert max(norms) - min(norms) < 0.2 * max(norms), norms
    assert all(each["loss"] < 3.0 for each in ends[:3]), [each["loss"] for each in ends]
    assert "Traceback" not in job.log(0) + job.log(1) + job.log(3) + job.log(new), job.report()


def test_ranks_that_go_at_their_own_pace_are_replaced_one_by_one(new_job: Callable[..., Job]) -> None:
    """Nobody meets because of a loss, so each epoch has the same ranks. At last the rank is lost that has answered."""
    job = new_job(kind="wrapper/async")
    now = list(range(RANKS))
    for epoch, rank in enumerate((2, 1, 3, 0), start=1):
        job.kill(now[rank])
        job.processes[now[rank]][0].wait()
        now[rank] = job.join(rank)
        job.until(
            lambda: all(job.events(number, "epoch")[-1:] for number in now), "the process does not join"
        )
        job.until_living(now, [0, 1, 2, 3])
        job.until(
            lambda: {job.events(number, "epoch")[-1]["epoch"] for number in now} == {epoch},
            "they are not in one epoch",
        )
    job.end(now)


def test_further_losses_and_joins(new_job: Callable[..., Job]) -> None:
    """A joined process is lost, its place is taken again, and the rank that gave it its state is lost then."""
    job = new_job()
    lose(job, 1, [0, 2, 3], [0, 2, 3])
    first = job.join(1)
    job.until_living([0, first, 2, 3], [0, 1, 2, 3])
    lose(job, first, [0, 2, 3], [0, 2, 3])
    second = job.join(1)
    job.until_living([0, second, 2, 3], [0, 1, 2, 3])
    lose(job, 0, [second, 2, 3], [1, 2, 3])
    third = job.join(0)
    job.until_living([third, second, 2, 3], [0, 1, 2, 3])
    job.end([third, second, 2, 3])


@pytest.mark.long
def test_two_processes_join_at_once(new_job: Callable[..., Job]) -> None:
    job = new_job(kind="wrapper")
    for number in (1, 2):
        job.kill(number)
    job.until_living([0, 3], [0, 3])
    new = [job.join(1), job.join(2)]
    job.until_living([0, 3, *new], [0, 1, 2, 3])
    job.end([0, 3, *new])


def check_averages(job: Job, members: dict[int, int], epoch: int, W: NDArray[np.float64]) -> None:
    """Compares the rounds of an epoch with products of matrices.

    Args:
        job: One that records, with a learning rate of 0 and an exchange in each step; random numbers are added before.
        members: The processes by rank.
        epoch: The epoch.
        W: Its mixing matrix.
    """

    def of(number: int) -> dict[int, Any]:
        file = Path(job.options["records"]) / str(job.processes[number][0].pid)
        told = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        return {each["step"]: each for each in told if each["epoch"] == epoch}

    steps: list[dict[int, Any]] = []

    def common() -> set[int]:
        steps[:] = [of(members[rank]) for rank in sorted(members)]
        return set.intersection(*(set(each) for each in steps))

    job.until(lambda: len(common()) >= 10, "the ranks make no common steps")
    # In its first exchange a process that joins has the values of another rank, which it has got within the step.
    for t in sorted(common())[1:]:
        x, y = (np.array([each[t][when] for each in steps]) for when in ("before", "after"))
        np.testing.assert_allclose(y, W.T @ x, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["WindowPushSum/async", pytest.param("AsynchronousGossip", marks=pytest.mark.long)]
)
def test_a_process_that_joins_adds_its_share(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Sums over all ranks: those of before, and those of the process, which begins with another rank's average."""
    monkeypatch.setenv("FOG_MAX_RANKS", "5")
    job = new_job(kind=kind, rate=0.0, apart=True, settles=True)
    time.sleep(3.0)  # until ranks have the mean of 1, 2, 3 and 4
    new = job.join(4)
    everyone = [0, 1, 2, 3, new]
    job.until_living(everyone, [0, 1, 2, 3, 4])
    time.sleep(1.0)
    job.end(everyone)
    settled = [job.events(number, "settled")[0] for number in everyone]
    weights = np.array([each["weights"] for each in settled])
    if kind.startswith("WindowPushSum"):
        np.testing.assert_allclose(weights.sum(axis=0), 5.0, rtol=1e-9)
        assert np.ptp(weights) > 0.0
    values = np.array([each["values"] for each in settled])
    np.testing.assert_allclose((weights[:, :1] * values).sum(axis=0), 5 * 2.5, rtol=1e-5)
    np.testing.assert_allclose(values, 2.5, rtol=1e-3)


def test_new_numbers(new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes join with numbers beyond the first ones, are lost, and others take these numbers; a further one is refused."""
    monkeypatch.setenv("FOG_MAX_RANKS", "6")
    job = new_job(rate=0.0, records=str(tmp_path), pause=0.1)
    everyone = {rank: rank for rank in range(RANKS)}
    monkeypatch.delenv("FOG_MAX_RANKS")  # a process that joins learns it from the others
    everyone |= {5: job.join(5), 4: job.join(4)}
    job.until_living(list(everyone.values()), sorted(everyone))
    six = mixing_matrix(fogdist.RingGraph(6))
    check_averages(job, everyone, job.events(0, "epoch")[-1]["epoch"], six)
    lose(job, everyone[5], [everyone[rank] for rank in range(5)], [0, 1, 2, 3, 4])
    lose(job, 1, [0, 2, 3, everyone[4]], [0, 2, 3, 4])
    everyone[1] = job.join(1)
    job.until_living([everyone[rank] for rank in range(5)], [0, 1, 2, 3, 4])
    assert all(job.events(everyone[rank], "epoch")[-1]["lost"] == [5] for rank in range(5)), job.report()
    everyone[5] = job.join(5)
    new = job.join(6)
    job.until_living(list(everyone.values()), sorted(everyone))
    assert job.processes[new][0].wait(TIMEOUT) == 1, job.report()
    message = (
        "RANK: got 6; allowed for a process that joins this job are ranks below 6, the most that it can have"
    )
    assert message in job.log(new)
    check_averages(job, everyone, job.events(0, "epoch")[-1]["epoch"], six)
    job.end(list(everyone.values()))


@pytest.mark.long
def test_a_graph_without_a_place_for_more_ranks(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that do not sum to 1 mean nothing for more ranks: the process is refused. A lost rank's place is free."""
    monkeypatch.setenv("FOG_MAX_RANKS", "5")
    job = new_job(scale=0.9)
    new = job.join(4)
    assert job.processes[new][0].wait(TIMEOUT) == 1, job.report()
    assert "the topology has no place for more ranks than 4" in job.log(new)
    lose(job, 2, [0, 1, 3], [0, 1, 3])
    again = job.join(2)
    job.until_living([0, 1, again, 3], [0, 1, 2, 3])
    job.end([0, 1, again, 3])


def test_fewer_ranks_at_most_than_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOG_MAX_RANKS", "3")
    job = Job(tmp_path)
    try:
        numbers = [job.start(rank) for rank in range(RANKS)]
        assert [job.processes[number][0].wait(TIMEOUT) for number in numbers] == [1] * RANKS, job.report()
        assert (
            "FOG_MAX_RANKS: got 3; allowed are numbers from the number of ranks at the start on, 4"
            in job.log(0)
        )
    finally:
        job.close()


# --- a process that joins is lost -------------------------------------------------------------------------------

# Where a process ends while it joins: the method, and whether before or after it.
PHASES = [
    ("fog_pg._joining", "begin", "after"),
    ("fogdist.joining.Newcomer", "pull", "before"),
    ("fogdist.joining.Newcomer", "_read", "before"),
    ("fogdist.joining.Newcomer", "enter", "before"),
    ("fogdist.joining.Newcomer", "_await", "before"),
    ("fogdist.joining.Newcomer", "enter", "after"),
    ("fogdist.joining.Newcomer", "entries", "after"),
    ("fogdist.membership.Members", "_formed", "after"),
    ("fogdist.membership.Members", "_join", "after"),
]

# Imported by Python at its start, from the folder of FAULTY, before the script.
SITE = """
import importlib, os, signal

def install(owner, name, when, how):
    failed = []

    def fail():
        if not failed:
            failed.append(True)
            os.kill(os.getpid(), getattr(signal, how))

    module, _, cls = owner.rpartition(".") if owner.rpartition(".")[2][0].isupper() else (owner, "", "")
    holder = importlib.import_module(module)
    holder = getattr(holder, cls) if cls else holder
    original = getattr(holder, name)
    def wrapped(*arguments, **options):
        if when == "before":
            fail()
        result = original(*arguments, **options)
        if when == "after":
            fail()
        return result
    setattr(holder, name, wrapped)

# After the script's own imports: when it first asks for its group.
import torch.distributed as dist
init = dist.init_process_group
def init_process_group(*arguments, **options):
    for fault in os.environ["FOG_TEST_FAULT"].split(","):
        install(*fault.split(" "))
    return init(*arguments, **options)
dist.init_process_group = init_process_group
"""


def faulty(
    folder: Path, phase: tuple[str, str, str], how: str, *more: tuple[str, str, str]
) -> dict[str, str]:
    """Returns variables by which a process fails in a phase, and in more of them."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    path = f"{folder / 'site'}:{ROOT}:{ROOT / 'python'}:{ROOT / 'tests'}"
    faults = ",".join(" ".join((*each, how)) for each in (phase, *more))
    return {"FOG_TEST_FAULT": faults, "PYTHONPATH": path}


def test_a_process_that_is_killed_while_it_joins(new_job: Callable[..., Job], tmp_path: Path) -> None:
    """In each phase; the others train on, and then a process joins that is not killed."""
    job = new_job()
    rest = [0, 1, 3]
    lose(job, 2, rest, [0, 1, 3])
    for phase in PHASES if ALL else PHASES[4:6]:
        new = job.join(2, **faulty(tmp_path, phase, "SIGKILL"))
        assert job.processes[new][0].wait(TIMEOUT) == -signal.SIGKILL, (phase, job.log(new))
        job.until_living(rest, [0, 1, 3])
        assert [job.processes[number][0].poll() for number in rest] == [None] * 3, (phase, job.report())
    new = job.join(2)
    job.until_living([*rest, new], [0, 1, 2, 3])
    job.end([*rest, new])


@pytest.mark.long
def test_a_process_that_stops_while_it_joins(new_job: Callable[..., Job], tmp_path: Path) -> None:
    """The others wait for it a few seconds, and count it as lost. Its number is free again when it has ended."""
    job = new_job()
    rest = [0, 1, 3]
    lose(job, 2, rest, [0, 1, 3])
    new = job.join(2, **faulty(tmp_path, ("fogdist.joining.Newcomer", "enter", "after"), "SIGSTOP"))
    job.until(lambda: all(job.events(number, "epoch")[-1]["epoch"] >= 3 for number in rest), "no third epoch")
    job.until_living(rest, [0, 1, 3])
    job.kill(new)
    job.processes[new][0].wait(TIMEOUT)
    again = job.join(2)
    job.until_living([*rest, again], [0, 1, 2, 3])
    job.end([*rest, again])


@pytest.mark.long
def test_one_of_two_processes_that_join_at_once_stops(new_job: Callable[..., Job], tmp_path: Path) -> None:
    """The ranks wait for it a few seconds. The other process does not, and is a rank by then."""
    job = new_job(pause=0.5)  # so that one look sees both
    for number in (1, 2):
        job.kill(number)
    job.until_living([0, 3], [0, 3])
    before, after = (("fogdist.joining.Newcomer", "enter", when) for when in ("before", "after"))
    new = [
        job.join(1, **faulty(tmp_path, before, "SIGSTOP", after)),
        job.join(2, **faulty(tmp_path, before, "SIGSTOP")),
    ]
    for number in new:
        until_stopped(job, number)
    for number in new:
        job.kill(number, signal.SIGCONT)
    job.until_living([0, 3, new[1]], [0, 2, 3])
    assert "of which [1, 2] joined" in job.log(0), job.report()
    job.kill(new[0])
    job.end([0, 3, new[1]])


@pytest.mark.parametrize(
    "phase",
    [
        ("fogdist.joining.Newcomer", "_read", "before"),
        pytest.param(("fogdist.joining.Newcomer", "enter", "before"), marks=pytest.mark.long),
    ],
)
def test_the_rank_that_gives_its_state_is_lost(
    new_job: Callable[..., Job], tmp_path: Path, phase: tuple[str, str, str]
) -> None:
    """The process stops, the rank with the lowest number is killed, and the process goes on."""
    job = new_job()
    lose(job, 2, [0, 1, 3], [0, 1, 3])
    new = job.join(2, **faulty(tmp_path, phase, "SIGSTOP"))
    until_stopped(job, new)
    lose(job, 0, [1, 3], [1, 3])
    job.kill(new, signal.SIGCONT)
    job.until_living([1, new, 3], [1, 2, 3])
    job.end([1, new, 3])


@pytest.mark.long
def test_a_late_process_does_not_take_the_place_of_another(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    """Two processes want one number; the one that comes too late is refused, and leaves nothing that others read."""
    job = new_job()
    lose(job, 2, [0, 1, 3], [0, 1, 3])
    late = job.join(2, **faulty(tmp_path, ("fogdist.joining.Newcomer", "enter", "before"), "SIGSTOP"))
    until_stopped(job, late)
    first = job.join(2)
    job.until_living([0, 1, first, 3], [0, 1, 2, 3])
    job.kill(late, signal.SIGCONT)
    assert job.processes[late][0].wait(TIMEOUT) == 1
    assert "is refused: rank 2 still runs" in job.log(late)
    lose(job, 3, [0, 1, first], [0, 1, 2])
    new = job.join(3)
    job.until_living([0, 1, first, new], [0, 1, 2, 3])
    job.end([0, 1, first, new])


@pytest.mark.long
def test_a_rank_that_is_stopped_keeps_its_number(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes the number of a rank that counts as lost but runs, until its process has ended."""
    monkeypatch.setenv("FOG_LOST_AFTER", "2")
    job = new_job()
    job.kill(2, signal.SIGSTOP)
    job.until_living([0, 1, 3], [0, 1, 3])
    epochs = [job.events(number, "epoch")[-1]["epoch"] for number in (0, 1, 3)]
    assert "rank 2 still runs; a process takes the number of a rank that is gone" in refused(job, 2)
    assert [job.events(number, "epoch")[-1]["epoch"] for number in (0, 1, 3)] == epochs, job.report()
    job.kill(2, signal.SIGCONT)
    assert job.processes[2][0].wait(TIMEOUT) == 1
    assert "takes no part any more" in job.log(2) or "takes no further part" in job.log(2), job.report()
    new = job.join(2)
    job.until_living([0, 1, new, 3], [0, 1, 2, 3])
    job.end([0, 1, new, 3])


# --- a process that is refused ----------------------------------------------------------------------------------


def refused(job: Job, rank: int, **environment: str) -> str:
    """Returns the last line of a process that is refused; the job's ranks train on."""
    new = job.join(rank, **environment)
    try:
        status = job.processes[new][0].wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        raise AssertionError(job.report()) from None
    assert status == 1, job.report()
    assert [job.processes[number][0].poll() for number in (0, 1, 3)] == [None] * 3, job.report()
    return re.sub(
        r"^(\[rank\d\]: )+", "", [line for line in job.log(new).splitlines() if "Error: " in line][-1]
    )


def test_who_is_refused(new_job: Callable[..., Job]) -> None:
    """Each learns the reason, and training goes on."""
    job = new_job()
    assert "rank 1 still runs; a process takes the number of a rank that is gone" in refused(job, 1)
    lose(job, 2, [0, 1, 3], [0, 1, 3])
    wrong = "another secret than the job's"
    job.options["newcomer_writes"] = GARBAGE[0]
    assert job.processes[job.join(2)][0].wait(TIMEOUT) == 3, job.report()
    del job.options["newcomer_writes"]
    assert "it does not know the job's secret (FOG_JOB_SECRET)" in refused(job, 2, FOG_JOB_SECRET=wrong)
    assert job.log(0).count("ticket 2) is refused: its request is not complete") == 1, job.report()
    message = f"WORLD_SIZE: got 5; allowed for a process that joins this job is {RANKS}, as at its start"
    assert message in refused(job, 2, WORLD_SIZE="5")
    job.options["graph"] = "FullyConnectedGraph"
    new = job.join(2)
    assert job.processes[new][0].wait(TIMEOUT) == 1, job.report()
    assert "the topology must be the same as on the ranks of the job that this process joins" in job.log(new)
    del job.options["graph"]
    for option in ("newcomer_width", "newcomer_dtype"):
        job.options[option] = True
        new = job.join(2)
        assert job.processes[new][0].wait(TIMEOUT) == 1, job.report()
        assert (
            "model must be the same as on the ranks of the job that this process joins, but differs:"
            in job.log(new)
        )
        del job.options[option]
    job.options["kind"] = "LocalSGD"
    assert "it makes fogdist.LocalSGD 0, the job has fogdist.DecentralizedSGD 0" in refused(job, 2)
    for kind in ("ExactDiffusion", "GradientAllreduce"):
        job.options["kind"] = kind
        assert f"this process joins a running job, and {kind}" in refused(job, 2)
    job.options["kind"] = "DecentralizedSGD"
    new = job.join(2)
    job.until_living([0, 1, 3, new], [0, 1, 2, 3])
    ends = job.end([0, 1, 3, new])
    assert all(each["loss"] < 3.0 for each in ends[:3]), ends


def test_a_job_that_raises_on_losses_cannot_be_joined(new_job: Callable[..., Job]) -> None:
    job = new_job(on_loss="raise")
    new = job.join(2)
    assert job.processes[new][0].wait(TIMEOUT) == 1
    assert (
        "this process was started to join a running job as rank 2, but the job cannot be joined"
        in job.log(new)
    )
    assert [process.poll() for process, _ in job.processes[:RANKS]] == [None] * RANKS, job.report()


def test_a_secret_of_the_environment(new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nobody joins: the Store does not have it."""
    monkeypatch.setenv("FOG_JOB_SECRET", "the secret of this job")
    job = new_job()
    lose(job, 2, [0, 1, 3], [0, 1, 3])
    message = "does not know the job's secret: set FOG_JOB_SECRET as for the other ranks"
    assert message in refused(job, 2, FOG_JOB_SECRET="")
    new = job.join(2)
    job.until_living([0, 1, 3, new], [0, 1, 2, 3])
    job.end([0, 1, 3, new])


# --- the rank that answers, without ranks -----------------------------------------------------------------------


class Extension:
    """What the rank that answers asks the extension; newcomers are children of the test."""

    def __init__(self) -> None:
        self.secret = "a secret of this test"

    def job_secret(self) -> str:
        return self.secret

    def announced(self) -> int:
        return 0

    def announce(self, entry: str) -> bool:
        return bool(Path(f"/proc/{entry}").exists())

    def read_entry(self, entry: str) -> dict[str, Any]:
        return {"pid": int(entry), "is_visible": True}

    def own_entry(self) -> str:
        return str(os.getpid())


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Extension:
    fake = Extension()
    monkeypatch.setattr(joining._extension, "load", lambda: fake)
    return fake


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


GROUP = 7


def ask(store: dist.Store, entry: object, group: int = GROUP) -> int:
    """Asks as a newcomer does; returns its ticket."""
    newcomer = joining.Newcomer(_joining.World(store, group, RANKS, {}, {}, RANKS), 2, 10.0)
    newcomer._entry = str(entry)
    newcomer._seats = ["one"], "one"
    newcomer._ticket = store.add("fog/join/count", 1)
    newcomer._request()
    return newcomer._ticket


def look(door: joining.Door, judged: list[int]) -> None:
    def judge(request: joining.Request) -> str:
        judged.append(request.ticket)
        return ""

    door.look(0, judge, lambda: {"one": {"values": torch.ones(1000)}}, [0])


def newcomer_of(store: dist.Store, timeout: float) -> joining.Newcomer:
    """Returns a newcomer that this process plays."""
    newcomer = joining.Newcomer(_joining.World(store, GROUP, RANKS, {}, {}, RANKS), 2, timeout)
    newcomer._entry = str(os.getpid())
    return newcomer


def states() -> int:
    """Returns how many states this process holds for newcomers."""
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


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_is_refused_once(text: str) -> None:
    """Whatever the Store contains; the next rank that answers does not meet it again, and nothing stays but the reason."""
    store = dist.HashStore()
    door = joining.Door(store, GROUP)
    ticket = store.add("fog/join/count", 1)
    store.set(f"fog/join/{ticket}/request", text)
    judged: list[int] = []
    look(door, judged)
    assert store.get(f"fog/join/{ticket}/refused")
    assert not store.check([f"fog/join/{ticket}/request"])
    keys = store.num_keys()
    look(joining.Door(store, GROUP), judged)
    assert judged == []
    assert store.get("fog/join/first") == b"2"
    assert store.num_keys() == keys


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "2"},
        {"rank": True},
        {"seats": [1]},
        {"seats": 3},
        {"entry": None},
        {"another": 1},
        {"nonce": []},
    ],
)
def test_wrong_types_are_refused(extension: Extension, wrong: dict[str, Any]) -> None:
    """Of one that knows the secret, such as another version."""
    told = {"rank": 2, "entry": "1", "seats": ["one"], "seat": "one", "nonce": "00", "challenge": "00"}
    for values, allowed in ((told, True), (told | wrong, False)):
        asked = json.dumps(values)
        text = json.dumps(
            {"request": asked, "proof": joining._proof("request", asked, group=GROUP, ticket=1)}
        )
        if allowed:
            assert joining.Request.from_text(GROUP, 1, text).rank == 2
        else:
            with pytest.raises(ValueError, match="its request is not complete"):
                joining.Request.from_text(GROUP, 1, text)
    extension.secret = "another secret of this test"
    with pytest.raises(ValueError, match="it does not know the job's secret"):
        joining.Request.from_text(GROUP, 1, text)


@pytest.mark.usefixtures("extension")
def test_a_proof_counts_once_and_in_one_job(child: subprocess.Popen[bytes]) -> None:
    """A copy of a request is refused under another ticket and in another job, and is not answered by another rank."""
    store = dist.HashStore()
    door = joining.Door(store, GROUP)
    door.publish_nonce()
    ticket = ask(store, child.pid)
    text = store.get(f"fog/join/{ticket}/request")
    judged: list[int] = []
    look(door, judged)
    assert judged == [ticket]
    again = store.add("fog/join/count", 1)
    store.set(f"fog/join/{again}/request", text)
    look(door, judged)
    assert b"does not know the job's secret" in store.get(f"fog/join/{again}/refused")
    for group, is_refused in (
        (GROUP + 1, True),
        (GROUP, False),
    ):  # another job; a rank that has never seen it
        other = dist.HashStore()
        other.add("fog/join/count", 1)
        other.set("fog/join/1/request", text)
        judged.clear()
        look(joining.Door(other, group), judged)
        assert other.check(["fog/join/1/refused"]) == is_refused
        assert judged == [] and not other.check(["fog/join/1/answer"])
    door.leave_to_another(0)


@pytest.mark.usefixtures("extension")
def test_a_state_is_kept_only_for_a_process_that_lives(child: subprocess.Popen[bytes]) -> None:
    store = dist.HashStore()
    door = joining.Door(store, GROUP)
    door.publish_nonce()
    judged: list[int] = []
    ask(store, child.pid)
    look(door, judged)
    until_states(1)
    door.leave_to_another(1)  # a rank with a lower number answers now
    until_states(0)
    ask(store, child.pid)
    look(door, judged)
    until_states(1)
    child.kill()  # nobody looks again
    until_states(0)
    child.wait()
    look(door, judged)
    assert store.get("fog/join/first") == b"3"
    assert not store.check(["fog/join/1/request"]) and not store.check(["fog/join/2/answer"])


@pytest.mark.usefixtures("extension")
def test_a_ticket_that_its_process_has_left_is_over(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that asks anew leaves its first ticket. It lives on, and the first copy must not live as long."""
    monkeypatch.setattr(joining, "_EMPTY_TIMEOUT", 0.0)
    store = dist.HashStore()
    door = joining.Door(store, GROUP)
    door.publish_nonce()
    judged: list[int] = []
    first = ask(store, child.pid)
    look(door, judged)
    until_states(1)
    joining._delete(store, first, "request", "giver", "answer")
    second = ask(store, child.pid)
    look(door, judged)
    assert judged == [first, second]
    until_states(1)
    look(door, judged)
    assert store.get("fog/join/first") == b"2"
    door.leave_to_another(1)
    until_states(0)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("part", ["state", "file", "thread"])
def test_a_rank_that_cannot_give_its_state_trains_on(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The process learns why, and does not ask again and again."""
    store = dist.HashStore()
    door = joining.Door(store, GROUP)
    door.publish_nonce()
    ticket = ask(store, child.pid)

    def fail(*_: object) -> NoReturn:
        raise {"state": MemoryError, "file": OSError, "thread": RuntimeError}[part]("no more of these")

    if part == "file":
        monkeypatch.setattr(os, "memfd_create", fail)
    if part == "thread":
        monkeypatch.setattr(threading.Thread, "start", fail)
    door.look(0, lambda _: "", fail if part == "state" else lambda: {"one": {}}, [3, 4])
    assert b"rank 3 could not copy its state" in store.get(f"fog/join/{ticket}/refused")
    assert b"no more of these" in store.get(f"fog/join/{ticket}/refused")
    assert not store.check([f"fog/join/{ticket}/request"])
    until_states(0)


@pytest.mark.usefixtures("extension")
def test_a_rank_that_is_stopped_while_it_writes_its_state() -> None:
    """Its process lives, so the newcomer must not wait for it without end."""
    file = os.memfd_create("fog_state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with pytest.raises(
            TimeoutError, match=f"process {os.getpid()} has not written its state within 0.1 s"
        ):
            read_file(os.getpid(), file, 0.1)
    finally:
        os.close(file)


@pytest.mark.usefixtures("extension")
def test_a_newcomer_asks_again_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example if a firewall closes the port of the rank that gives the state: nobody is gone, and no state comes."""
    newcomer = newcomer_of(dist.HashStore(), 0.5)
    asked: list[int] = []

    def no_state(_: object) -> None:
        asked.append(newcomer._ticket)
        assert time.monotonic() < end, "it asks without end"
        time.sleep(0.05)

    def answered(_: str) -> str:
        place = json.dumps({"living": []})
        proof = joining._proof("answer", newcomer._nonce, place, group=GROUP, ticket=newcomer._ticket)
        return json.dumps({"place": place, "proof": proof})

    monkeypatch.setattr(newcomer, "_await", answered)
    monkeypatch.setattr(newcomer, "_read", no_state)
    end = time.monotonic() + 10.0
    with pytest.raises(
        dist.DistBackendError, match=r"cannot join the job as rank 2: no state came within 0\.5 s"
    ):
        newcomer.pull(["one"], "one")
    assert len(asked) > 1 and asked == sorted(set(asked))


@pytest.mark.usefixtures("extension")
def test_a_newcomer_that_is_forgotten_does_not_wait() -> None:
    """A rank takes a newcomer for ended if the connection breaks over which that one has got its state."""
    store = dist.HashStore()
    newcomer = newcomer_of(store, 10.0)
    newcomer._seats = ["one"], "one"
    newcomer._ticket = store.add("fog/join/count", 1)
    newcomer._others = lambda: [str(os.getpid())]  # type: ignore[method-assign]
    newcomer._request()
    joining._delete(store, newcomer._ticket, "request")
    with pytest.raises(dist.DistBackendError, match="rank 2: the rank that answers has taken it for ended"):
        newcomer.enter()


def test_the_entry_of_a_later_process_stays() -> None:
    """A rank that was stopped may tell the Store of an epoch that is long past."""
    store = dist.HashStore()
    for epoch, entry in ((0, "first"), (3, "third"), (2, "second")):
        _joining.publish(store, 1, GROUP, RANKS, entry, epoch)
    assert _joining.entry_of(store, 1) == "third"
    assert _joining.read_world(store, RANKS).size == RANKS


def test_a_job_of_another_version() -> None:
    """Which knew of no hosts yet."""
    store = dist.HashStore()
    store.set("fog/world/entry/1", json.dumps({"entry": "one", "id": GROUP, "size": RANKS, "epoch": 0}))
    with pytest.raises(
        RuntimeError, match="another version of fog than this process: rank 1 does not tell its 'host'"
    ):
        _joining.read_world(store, RANKS)


# --- what it costs without newcomers ----------------------------------------------------------------------------

QUIET = """
import ctypes, mmap
import torch.distributed as dist
from fogdist.joining import Door

class NoStore:
    def __getattr__(self, name):
        raise AssertionError(f"the Store is asked: {name}")

door = Door(NoStore(), 0)
libc = ctypes.CDLL(None)
syscall, prctl = libc.syscall, libc.prctl
assert door.is_quiet(0)
PR_SET_SECCOMP, SECCOMP_MODE_STRICT, SYS_exit = 22, 1, 60
assert prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0) == 0
for _ in range(10_000):
    if not door.is_quiet(0):
        syscall(SYS_exit, 1)
syscall(SYS_exit, 0)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the system call is that of x86_64")
def test_looking_for_newcomers_makes_no_system_call() -> None:
    """A process that may make none but exit looks ten thousand times; any other would kill it."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'python'}"}
    done = subprocess.run([sys.executable, "-c", QUIET], env=environment, timeout=TIMEOUT, check=False)
    assert done.returncode == 0


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
    fogdist.barrier()
    before = packets()
    store.check(["a request"])
    asked = packets()
    assert asked > before
    for _ in range(steps):
        step()
    return [asked, packets()]


def test_steps_without_newcomers_ask_the_store_nothing(new_world: Callable[..., World]) -> None:
    for before, after in new_world(2).run(train_quietly, 100):
        assert before <= after <= before + 1  # an acknowledgement may come late
