"""Tests of `fog run --keep-going`: ranks, agents and hosts that die, and what is left of the others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import fog_cli
import pytest
from fog_cli import UsageError, keep_going, launchers
from fog_cli.commands import run
from fog_cli.hosts import Host
from fog_cli.launchers import Job as Ranks
from fog_cli.programs import agent
from forked_programs import HOSTS, ForkedJob
from hosts import INTERFACE, address, cut_link, emulated_hosts, inside, move_to_host
from scripts import MARK, STUBBORN, WAITING, Job, started

pytestmark = pytest.mark.usefixtures("nothing_left")

FOG = ["-m", "fog_cli", "run", "--keep-going"]
TIMEOUT = 120.0  # enough for a busy machine


def job(folder: Path, script: str, words: Sequence[str], *arguments: object, **variables: str) -> ForkedJob:
    """Runs `fog run --keep-going` on a script."""
    (folder / "script.py").write_text(script)
    command = [*FOG, *words, str(folder / "script.py"), *map(str, arguments)]
    return ForkedJob(command, folder / "log.txt", variables)


def finished(
    folder: Path, script: str, words: Sequence[str], *arguments: object, **variables: str
) -> tuple[int, str]:
    """Runs a script to its end; returns the exit status and the output."""
    running = job(folder, script, words, *arguments, **variables)
    with started([running]):
        return running.wait(TIMEOUT), running.output


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def agent_and_guard(running: ForkedJob) -> tuple[int, int]:
    """Returns the processes of the agent of this host, and of its guard, which also adopts others."""
    (guard,) = children(running._process.pid)
    (found,) = set(children(guard)) & set(running.named("agent"))
    return found, guard


# --- commands and texts ---------------------------------------------------------------------------------------


def test_commands_of_agents() -> None:
    by_ssh = launchers.agent_by_ssh(Host("b", 2), 2222, "/p q")
    assert by_ssh[0] == "ssh" and by_ssh[-4:-1] == ["-p", "2222", "b"]
    assert by_ssh[-1] == f"exec env 'PYTHONPATH=/p q' {sys.executable} -m fog_cli.programs.agent"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return "train.py"


def plan(*words: str, **environment: str) -> Ranks:
    arguments = fog_cli.parser().parse_args(["run", "--keep-going", *words])
    return run.prepare(arguments, {"PATH": os.environ["PATH"], **environment})


def test_plans(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan("-np", "2", "--max-restarts", "3", script)
    assert (alone.addresses, alone.port, alone.max_restarts, len(alone.starts)) == (["127.0.0.1"], 0, 3, 1)
    hosts = ["-np", "3", "-H", "a:2,b:2", script]
    monkeypatch.setattr(run.shutil, "which", lambda name, **_: f"/bin/{name}")
    given = plan(*hosts, MASTER_ADDR="10.0.0.1", MASTER_PORT="4000")
    assert (given.addresses, given.port) == (["10.0.0.1", "b"], 4000) and plan(*hosts).addresses[0] == "a"
    monkeypatch.setattr(run.shutil, "which", lambda *_, **__: None)
    with pytest.raises(UsageError, match="there is no ssh on PATH"):
        plan(*hosts)


def test_what_the_supervisor_says(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a rank that nobody is left for, of an agent that could not serve the Store, and of a rank that lost another."""
    supervisor = keep_going.Supervisor(plan("-np", "2", "--max-restarts", "2", script))
    supervisor._agents[0] = agent = Mock()
    supervisor._fates[0].status = 0
    supervisor._undecided[1] = "ended by SIGKILL", -signal.SIGKILL
    supervisor._decide()
    agent.write.assert_called_once_with({"leave": 1})
    why = "it does not start again, as no rank is left that it could join"
    assert capsys.readouterr().err == f"fog run: rank 1 ended by SIGKILL; {why}; 0 ranks go on\n"

    told = {"event": "done", "failure": "the Store cannot be served: its port is taken"}
    supervisor._events.put(("told", 0, told))
    supervisor._handle()
    assert capsys.readouterr().err == f"fog run: the agent: {told['failure']}\n"
    assert supervisor._first_status == 128 + signal.SIGKILL

    others_end = keep_going.Supervisor(replace(plan("-np", "2", script), keeps_going=False))
    others_end._agents[0] = agent
    others_end._lose(1, keep_going.STATUS_OF_VICTIM, "has lost rank 0")
    assert others_end._deadline is not None and others_end._deadline[1] == others_end._end_ranks


# --- one host -------------------------------------------------------------------------------------------------

# Each rank may die; the others wait for its end, and go on.
MORTAL = """
import os, signal, subprocess, sys, time

rank = int(os.environ["RANK"])
for word in sys.argv[2:]:
    victim, how = word.split(":")
    if rank == int(victim):
        subprocess.Popen(["sleep", "600"])
        print("about to end", flush=True)
        print("words for stderr", file=sys.stderr, flush=True)
        os.kill(os.getpid(), int(how)) if int(how) < 100 else sys.exit(int(how) - 100)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("goes on", flush=True)
"""


def test_the_others_go_on_and_the_summary_names_the_dead(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MORTAL)
    end = tmp_path / "end"
    # The only one whose interpreters start anew.
    command = [sys.executable, *FOG, "-np", "4"]
    running = Job([tmp_path / "script.py", end, "1:11", "3:107"], 0, tmp_path / "log.txt", command)

    def is_over(output: str) -> bool:
        """What a lost rank had started ends with it, and not with the job."""
        return output.count(" ended ") == 2 and "sleep" not in map(name_of, running.processes())

    with started([running]):
        running.wait_for(is_over, TIMEOUT)
        end.touch()
        status = running.wait(TIMEOUT)
    lines = running.output.splitlines()
    assert "[0] goes on" in lines and "[2] goes on" in lines and "[1] goes on" not in lines
    assert "[1] about to end" in lines and "[3] words for stderr" in lines
    first = re.findall(
        r"fog run: rank (\d) \(process \d+\) ended (.*) after [\d.]+ s; (.*)$", running.output, re.M
    )
    assert sorted(each[:2] for each in first) == [("1", "by SIGSEGV"), ("3", "with exit status 7")]
    assert first[-1][2] == "2 ranks go on"
    assert status == {"1": 128 + 11, "3": 7}[first[0][0]]
    summary = running.output.partition("fog run: 2 of 4 ranks ended well\n")[2]
    assert re.fullmatch(
        r"  rank 1 \(process \d+\) ended by SIGSEGV after [\d.]+ s\n"
        r"  rank 3 \(process \d+\) ended with exit status 7 after [\d.]+ s\n",
        summary,
    ), running.output


def test_all_well_means_no_words(tmp_path: Path) -> None:
    assert finished(tmp_path, "print('here')", ["-np", "2"]) in [
        (0, "[0] here\n[1] here\n"),
        (0, "[1] here\n[0] here\n"),
    ]


# Some ranks fail in their first processes: before there is a group, or all of them after its first operation.
FAILS = """
import os, sys
failures, where = int(sys.argv[1]), sys.argv[2]
with open(__file__ + "." + os.environ["RANK"], "a") as starts:
    restarts = starts.tell()
    starts.write("x")
print("start", restarts, flush=True)
if where == "before" and os.environ["RANK"] == "1" and restarts < failures:
    sys.exit(3)
import torch
import torch.distributed as dist
dist.init_process_group("fog")
dist.all_reduce(torch.ones(1))
if where == "after" and restarts < failures:
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("failures", "where", "statuses"),
    [(1, "before", [0]), (9, "before", [143]), (1, "after", [0]), (9, "after", [1, 3])],
)
def test_a_job_that_nobody_can_join_starts_again_as_a_whole(
    tmp_path: Path, failures: int, where: str, statuses: list[int]
) -> None:
    """A rank would otherwise come back as one that joins the others, who wait for it, or are gone as well."""
    running = job(tmp_path, FAILS, ["-np", "3", "--max-restarts", "2"], failures, where)
    with started([running]):
        if statuses == [143]:  # the others wait for the rank that does not come
            running.wait_for(lambda output: "2 ranks go on" in output, TIMEOUT)
            running._process.terminate()
        assert running.wait(TIMEOUT) in statuses, running.output
    output = running.output
    assert ("fog run: 3 of 3 ranks ended well\n" in output) == (statuses == [0])
    assert "; no other has a group that it could join, so all ranks start again (1 of 2)\n" in output
    assert ("; started again, and ended well\n" in output) == (statuses == [0])


@pytest.mark.parametrize("who", ["agent", "guard", pytest.param("both", marks=pytest.mark.long)])
def test_a_killed_agent_leaves_nothing(tmp_path: Path, who: str) -> None:
    """If the guard lives, also ranks that ignore SIGTERM, and processes in sessions of their own."""
    running = job(tmp_path, STUBBORN if who == "agent" else WAITING, ["-np", "2"])
    with started([running]):
        running.wait_for(lambda output: output.count("ready") == 2, TIMEOUT)
        first, second = agent_and_guard(running)
        # A thread that serves the Store may have a lock of libc while the agent forks, see `forked_programs._Store`.
        assert len(os.listdir(f"/proc/{first}/task")) == 2
        for pid in {"agent": [first], "guard": [second], "both": [second, first]}[who]:
            os.kill(pid, signal.SIGKILL)
        assert running.wait(TIMEOUT) == (3 if who == "guard" else 137), running.output
    reason = {
        "both": "fog run: ranks 0, 1 lost with the agent, which ended by SIGKILL",
        "agent": "fog run: ranks 0, 1 lost with the agent, which ended by SIGKILL",
        "guard": "fog run: the guard of the agent ended by SIGKILL, so the agent ended its ranks",
    }
    assert reason[who] in running.output


# The rank that dies would hold the Store under other launchers. The others make a new group over it.
STORE = """
import datetime, os, signal, sys, time
import fogdist, torch
import torch.distributed as dist

victims = {int(word) for word in sys.argv[1:]}
dist.init_process_group("fog", timeout=datetime.timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
print("place", *(os.environ[name] for name in ["GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FOG_JOIN"]))
x = torch.tensor([float(rank)])
dist.all_reduce(x)
assert x.item() == size * (size - 1) / 2
if rank in victims:
    os.kill(os.getpid(), signal.SIGKILL)
others = [other for other in range(size) if other not in victims]
group = dist.new_group(others, use_local_synchronization=True)
x = torch.tensor([float(rank)])
dist.all_reduce(x, group=group)
print("sum", x.item(), flush=True)
"""


# --- several hosts --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hosts(folder: Path, count: int) -> Iterator[tuple[list[str], Mapping[str, str]]]:
    """Makes hosts that ssh reaches; returns their names, and variables."""
    with emulated_hosts(count) as names:
        (folder / "ssh").symlink_to("/bin/false")  # never called, but looked for
        own = {HOSTS: json.dumps({address(number): name for number, name in enumerate(names)})}
        yield names, own | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_two_hosts_by_ssh(tmp_path: Path) -> None:
    """The Store outlives rank zero."""
    with hosts(tmp_path, 2) as (_, variables):
        words = ["-np", "4", "-H", f"{address(0)}:2,{address(1)}:2", "-p", "22"]
        status, output = finished(tmp_path, STORE, words, 0, 3, **variables)
    expected = {"[1] sum 3.0", "[2] sum 3.0", "[1] place 0 1 2 0", "[2] place 1 0 2 0"}
    assert status == 137 and expected <= set(output.splitlines()), output
    assert re.search(rf"rank 3 \(process \d+ on {address(1)}\) ended by SIGKILL", output)
    assert "fog run: 2 of 4 ranks ended well\n" in output


def test_the_store_outlives_the_ranks_of_its_host(tmp_path: Path) -> None:
    """The first host has done its own ranks long before the second one needs the Store."""
    script = STORE.replace("others = [", "time.sleep(0.5 * rank)\nothers = [")
    with hosts(tmp_path, 2) as (_, variables):
        words = ["-np", "3", "-H", f"{address(0)}:1,{address(1)}:2", "-p", "22"]
        status, output = finished(tmp_path, script, words, 0, **variables)
    assert status == 137 and {"[1] sum 3.0", "[2] sum 3.0"} <= set(output.splitlines()), output


# Rank 0 ends only if it is told to.
RAISES = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("fog")
for step in range(3):
    if dist.get_rank() == 3 and step == 2:
        raise ValueError("no such file")
    try:
        dist.all_reduce(torch.ones(1))
    except dist.DistBackendError:
        if dist.get_rank() == 0:
            time.sleep(600)
        raise
"""


def test_without_the_option_a_rank_that_fails_ends_those_of_all_hosts(tmp_path: Path) -> None:
    """The last line names the cause, though others that have lost it end before it is known."""
    (tmp_path / "script.py").write_text(RAISES)
    with hosts(tmp_path, 2) as (_, variables):
        words = [*FOG[:-1], "-np", "4", "-H", f"{address(0)}:2,{address(1)}:2", "-p", "22"]
        running = ForkedJob([*words, tmp_path / "script.py"], tmp_path / "log.txt", variables)
        with started([running]):
            assert running.wait(TIMEOUT) == 1, running.output
    last = running.output.splitlines()[-1]
    assert re.search(rf"rank 3 \(process \d+ on {address(1)}\) ended with exit status 1", last), (
        running.output
    )
    assert "[3] [rank3]: ValueError: no such file" in running.output.splitlines()
    assert "go on" not in running.output and "goes on" not in running.output


def test_a_host_that_cannot_be_reached_ends_the_job(tmp_path: Path) -> None:
    """Its other ranks would wait for ever."""
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'no such host' >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    status, output = finished(tmp_path, STORE, ["-np", "4", "-H", "localhost:2,nosuchhost:2"], PATH=path)
    assert status == 255
    assert output.partition("2 ranks ended")[0].splitlines() == [
        "no such host",
        "fog run: ranks 2, 3 lost with the agent on nosuchhost, which ended with exit status 255",
        "fog run: the job cannot start without nosuchhost, so its other ranks are ended",
        "fog run: 0 of 4 ranks ended well",
        "  rank 2 was lost with the agent on nosuchhost, which ended with exit status 255",
        "  rank 3 was lost with the agent on nosuchhost, which ended with exit status 255",
    ]


def test_agents_try_the_stores_before_their_ranks_start(tmp_path: Path) -> None:
    """The address that the user has given for the first host is wrong. torch would try it for half an hour."""
    with hosts(tmp_path, 2) as (_, variables):
        words = ["-np", "2", "-H", f"{address(0)}:1,{address(1)}:1", "-p", "22"]
        status, output = finished(tmp_path, "print('starts')", words, **variables, MASTER_ADDR=address(7))
    assert status == 1 and "starts" not in output, output
    said = rf"fog run: the agent on {address(0)[:-1]}\d: the Store at {address(7)}:\d+ cannot be reached: "
    assert re.search(said, output), output


def test_a_first_host_that_cannot_be_reached_starts_nothing(tmp_path: Path) -> None:
    """It has the Store."""
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    status, output = finished(tmp_path, STORE, ["-np", "2", "-H", "nosuchhost:1,localhost:1"], PATH=path)
    assert status == 255
    assert output.splitlines() == [
        "fog run: rank 0 lost with the agent on nosuchhost, which ended with exit status 255",
        "fog run: the job cannot start without nosuchhost, so its other ranks are ended",
        "fog run: 0 of 2 ranks ended well",
        "  rank 0 was lost with the agent on nosuchhost, which ended with exit status 255",
    ]


JOINS_AGAIN = """
import os, signal
import torch, torch.distributed as dist
import fogdist
dist.init_process_group("fog")
fogdist.init()
rank, is_again = dist.get_rank(), os.environ["FOG_JOIN"] == "1"
model = torch.nn.Linear(4, 1)
fogdist.broadcast_parameters(model.state_dict(), 0)
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = fogdist.algorithms.DecentralizedSGD(sgd, model, on_loss="continue")
end = 10**6
while optimizer.steps < end:
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 3 and not is_again and optimizer.steps == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    now = fogdist.membership.current()
    if end == 10**6 and now.epoch > 0 and not now.lost:
        end = optimizer.steps + 50
        print("mixes with", len(now.living), "again" if is_again else "still", flush=True)
"""


def test_a_lost_rank_joins_again_on_its_host(tmp_path: Path) -> None:
    """With an agent on each of two hosts."""
    with hosts(tmp_path, 2) as (_, variables):
        words = ["-np", "4", "-H", f"{address(0)}:2,{address(1)}:2", "-p", "22", "--max-restarts", "1"]
        running = job(tmp_path, JOINS_AGAIN, words, **variables)
        with started([running]):
            assert running.wait(TIMEOUT) == 0, running.output
    mixing = re.findall(r"^\[(\d)\] mixes with 4 (\w+)$", running.output, re.MULTILINE)
    assert sorted(mixing) == [("0", "still"), ("1", "still"), ("2", "still"), ("3", "again")], running.output
    assert re.search(
        rf"rank 3 \(process \d+ on {address(1)}\) ended by SIGKILL .*; it starts again", running.output
    )


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_host_that_is_lost_ends_no_other(tmp_path: Path, lost: int) -> None:
    """Also not if it is the first one, whose agent has the Store."""
    script = (
        "import os, sys, time\nprint('ready', flush=True)\n"
        "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.02)\nprint('goes on')\n"
    )
    with hosts(tmp_path, 2) as (_, variables):
        words = ["-np", "2", "-H", f"{address(0)}:1,{address(1)}:1", "-p", "22"]
        running = job(tmp_path, script, words, tmp_path / "end", **variables)
        with started([running]):
            running.wait_for(lambda output: output.count("ready") == 2, TIMEOUT)
            (rank,) = running.named(f"rank-{lost}")
            parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(parent, signal.SIGKILL)
            running.wait_for(lambda output: " lost with the agent" in output, TIMEOUT)
            (tmp_path / "end").touch()
            assert running.wait(TIMEOUT) == 137, running.output
    reason = f"fog run: rank {lost} lost with the agent on {address(lost)}, which ended by SIGKILL"
    assert reason in running.output and f"[{1 - lost}] goes on\n" in running.output
    assert "fog run: 1 of 2 ranks ended well\n" in running.output


# --- the first host is lost, with the Store and with `fog run` --------------------------------------------------

# Output is lost with `fog run`, so each process has a file. Ranks end together once all mix again.
GOES_ON = """
import json, os, sys, time
import torch, torch.distributed as dist
import fogdist
folder = sys.argv[1]
rank = int(os.environ["RANK"])
log = open(f"{folder}/rank-{rank}", "a", buffering=1)
os.dup2(log.fileno(), 2)
with open(f"{folder}/variables-{rank}", "w") as file:
    json.dump(dict(os.environ), file)
dist.init_process_group("fog")
fogdist.init()
model = torch.nn.Linear(4, 1)
fogdist.broadcast_parameters(model.state_dict(), 0)
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = fogdist.algorithms.DecentralizedSGD(sgd, model, on_loss="continue")
epoch, end, at = None, 10**6, None
while optimizer.steps < end:
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    now = fogdist.membership.current()
    if now.epoch != epoch:
        epoch = now.epoch
        print("mixes", *now.living, file=log)
        if epoch > 0 and not now.lost:
            end = optimizer.steps + 20
    if epoch == 1 and 0 not in now.living and at is None:
        store = dist.distributed_c10d._get_default_store()
        try:  # until torch has another Store on all; one of them may have given up an exchange, so it is a step behind
            store.set(f"here {rank}", "1")
            if rank == now.living[0] and store.check([f"here {each}" for each in now.living]):
                store.set("sum", str(optimizer.steps + 3))
            at = int(store.get("sum")) if store.check(["sum"]) else None
        except RuntimeError:
            time.sleep(0.1)
    if optimizer.steps == at:
        group, x = dist.new_group(now.living, use_local_synchronization=True), torch.ones(1)
        dist.all_reduce(x, group=group)
        print("sum", int(x), file=log)
dist.all_reduce(torch.ones(1), group=fogdist.reconfigure())
print("ends", file=log)
"""


class Watched:
    """A job with a rank on each of some emulated hosts, whose ranks tell what they do in files.

    Args:
        folder: Theirs.
        names: Of the hosts.
        variables: Of the job.
    """

    def __init__(self, folder: Path, names: list[str], variables: Mapping[str, str]) -> None:
        self.folder, self.names, self.variables = folder, names, variables
        placed = ",".join(f"{address(host)}:1" for host in range(len(names)))
        self._words = [*FOG, "-np", str(len(names)), "-H", placed]
        self._script = [str(folder / "script.py"), str(folder)]
        (folder / "script.py").write_text(GOES_ON)

    def start(self, *words: str, first: Callable[[], object] | None = None) -> ForkedJob:
        """Starts all ranks from this host, after a call of a function in the process of `fog run`."""
        command = [*self._words, "-p", "22", *words, *self._script]
        return ForkedJob(command, self.folder / "log.txt", self.variables, first)

    def start_part(self, host: int, log: str) -> ForkedJob:
        """Starts the rank of a host there."""
        words = [*self._words, "--only-host", str(host), *self._script]
        first = partial(move_to_host, self.names[host])
        return ForkedJob(words, self.folder / log, self.variables, first)

    def join(self, rank: int, other: int) -> ForkedJob:
        """Starts a process on the host of a lost rank, as by hand; it begins at the Store of another host."""
        known = json.loads((self.folder / f"variables-{other}").read_text())
        del known[MARK]
        store, _, port = known["FOG_STORES"].split(",")[other].rpartition(":")
        known |= {"RANK": str(rank), "MASTER_ADDR": store, "MASTER_PORT": port, "FOG_JOIN": "1"}
        first = partial(move_to_host, self.names[rank])
        return ForkedJob(self._script, self.folder / "by_hand.txt", known, first)

    def told(self) -> dict[int, list[str]]:
        """Returns the lines of each rank."""
        found = {rank: self.folder / f"rank-{rank}" for rank in range(len(self.names))}
        return {rank: path.read_text().splitlines() if path.exists() else [] for rank, path in found.items()}

    def wait_for(self, line: str, *ranks: int, times: int = 1) -> None:
        """Waits until each of these ranks has told something, so often."""
        deadline = time.monotonic() + TIMEOUT
        while not all(self.told()[rank].count(line) >= times for rank in ranks):
            assert time.monotonic() < deadline, (line, self.told())
            time.sleep(0.02)

    def lose(self, running: ForkedJob, host: int) -> None:
        """Kills all that runs on a host, the agent before the ranks."""
        network = os.stat(f"/run/netns/{self.names[host]}").st_ino
        found = []
        for pid in running.processes():
            with contextlib.suppress(OSError):  # it has just ended
                if os.stat(f"/proc/{pid}/ns/net").st_ino == network:
                    found.append(pid)
        agents = set(running.named("agent"))
        for pid in sorted(found, key=lambda pid: pid not in agents):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_the_job_outlives_the_host_of_fog_run_and_of_the_store(tmp_path: Path) -> None:
    """A rank that is lost later starts again, and joins by the Store of another host; no process is left at the end."""
    with hosts(tmp_path, 3) as (names, variables):
        watched = Watched(tmp_path, names, variables)
        with started([watched.start("--max-restarts", "1")]) as (running,):
            watched.wait_for("mixes 0 1 2", 0, 1, 2)
            os.kill(running.pid, signal.SIGKILL)
            watched.lose(running, 0)
            watched.wait_for("sum 2", 1, 2)  # torch makes groups over the next Store
            os.kill(running.named("rank-2")[0], signal.SIGKILL)
            watched.wait_for("mixes 1", 1)
            watched.wait_for("mixes 1 2", 2, times=2)
            with started([watched.join(0, 1)]) as (by_hand,):
                assert by_hand.wait(TIMEOUT) == 0, by_hand.output
            watched.wait_for("ends", 0, 1, 2)


def test_the_job_outlives_a_first_host_that_says_no_more(tmp_path: Path) -> None:
    """Nothing tells the others of its end; `fog run` may be on it, or on another one, and then knows of no end either."""
    with hosts(tmp_path, 3) as (names, variables):
        watched = Watched(tmp_path, names, {**variables, "FOG_HOST_TIMEOUT": "4"})
        with started([watched.start()]) as (running,):
            watched.wait_for("mixes 0 1 2", 0, 1, 2)
            with cut_link(INTERFACE, namespace=names[0]):
                watched.wait_for("sum 2", 1, 2)
                watched.lose(running, 0)
            with started([watched.join(0, 2)]) as (by_hand,):
                assert by_hand.wait(TIMEOUT) == 0, by_hand.output
            watched.wait_for("ends", 0, 1, 2)


def decide_soon() -> None:
    agent._DECIDE_TIMEOUT = 0.5


def test_an_agent_decides_alone_while_fog_run_says_nothing(tmp_path: Path) -> None:
    """Its host may be gone without an end of the connection. If it comes back, it has no more to decide."""
    with hosts(tmp_path, 2) as (names, variables):
        watched = Watched(tmp_path, names, variables)
        with started([watched.start("--max-restarts", "1", first=decide_soon)]) as (running,):
            watched.wait_for("mixes 0 1", 0, 1)
            os.kill(running.pid, signal.SIGSTOP)
            os.kill(running.named("rank-1")[0], signal.SIGKILL)
            watched.wait_for("mixes 0 1", 1, times=2)
            os.kill(running.pid, signal.SIGCONT)
            assert running.wait(TIMEOUT) == 0, running.output
    assert "fog run: 2 of 2 ranks ended well\n" in running.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_order_to_end_ends_the_ranks_of_all_hosts(tmp_path: Path, number: int) -> None:
    with hosts(tmp_path, 2) as (names, variables):
        watched = Watched(tmp_path, names, variables)
        with started([watched.start("--max-restarts", "9")]) as (running,):
            watched.wait_for("mixes 0 1", 0, 1)
            os.kill(running.pid, number)
            assert running.wait(TIMEOUT) == 128 + number


def test_a_host_waits_for_another_one_that_was_never_started(tmp_path: Path) -> None:
    """In interpreters that start anew: two threads of the agent must not import torch at the same time."""
    (tmp_path / "script.py").touch()
    with hosts(tmp_path, 2) as (names, variables):
        command = [*inside(names[0]), sys.executable, *FOG, "-np", "2", "--only-host", "0"]
        own = {**variables, "MASTER_PORT": "29600", "FOG_JOB_SECRET": "the secret of this job"}
        words = ["-H", f"{address(0)}:1,{address(1)}:1", tmp_path / "script.py"]
        running = Job(words, 0, tmp_path / "log.txt", command, own)
        with started([running]):
            running.wait_for(
                lambda output: f"waits for the Stores at {address(1)}:29600\n" in output, TIMEOUT
            )
            os.kill(running.pid, signal.SIGTERM)
            assert running.wait(TIMEOUT) == 128 + signal.SIGTERM


def test_a_host_that_a_scheduler_replaces_joins_again(tmp_path: Path) -> None:
    """Each host starts its own part of the job, in any order; that of the first host comes back as a new one."""
    own = {"MASTER_PORT": "29600", "FOG_JOB_SECRET": "the secret of this job", "TORCHELASTIC_RUN_ID": "one"}
    with hosts(tmp_path, 2) as (names, variables):
        watched = Watched(tmp_path, names, {**variables, **own})
        with started([watched.start_part(1, "1.txt")]) as (second,):
            second.wait_for(lambda output: f"waits for the Stores at {address(0)}:29600\n" in output, 10.0)
            with started([watched.start_part(0, "0.txt")]) as (first,):
                watched.wait_for("mixes 0 1", 0, 1)
                with started([watched.start_part(1, "other.txt")]) as (other,):
                    assert other.wait(10.0) == 1
                assert (
                    "port 29600 of the job's Store: Address already in use; another job may" in other.output
                )
                os.kill(first.pid, signal.SIGKILL)
                watched.wait_for("mixes 1", 1)
            with started([watched.start_part(0, "again.txt")]) as (again,):
                assert again.wait(TIMEOUT) == 0, again.output
                assert second.wait(TIMEOUT) == 0, second.output
    assert "fog run" not in again.output


def test_new_agents_serve_their_stores_and_look_for_those_of_others_at_once(tmp_path: Path) -> None:
    """Two threads of an agent import torch and fog_pg, which import each other."""
    own = {"MASTER_PORT": "29600", "FOG_JOB_SECRET": "the secret of this job", "TORCHELASTIC_RUN_ID": "one"}
    (tmp_path / "script.py").touch()
    with hosts(tmp_path, 2) as (names, variables):
        placed = f"{address(0)}:1,{address(1)}:1"
        jobs = []
        for host, name in enumerate(names):
            words = [*FOG, "-np", "2", "-H", placed, "--only-host", str(host), str(tmp_path / "script.py")]
            launcher = [*inside(name), sys.executable]
            jobs.append(Job(words, 0, tmp_path / f"{host}.txt", launcher, {**variables, **own}))
        with started(jobs):
            assert [job.wait(TIMEOUT) for job in jobs] == [0, 0], [job.output for job in jobs]
