"""Tests of the command line `fog`: the arguments that each command accepts and refuses, and a few real runs."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import fog_cli
import pytest
from fog_cli import COMMANDS, UsageError, keep_going, launchers, machine, main, one_host, processes
from fog_cli.commands import bench, doctor, run, topology
from fog_cli.hosts import Host, read_hostfile
from fog_cli.programs.rank import LinePrefixer
from fog_cli.spawn import Ended, run_program
from forked_programs import ForkedJob
from scripts import ROOT, STUBBORN, WAITING, started

import fog_pg

DOCUMENTATION = (ROOT / "docs" / "cli.md").read_text()
TIMEOUT = 120.0  # enough for a busy machine


def fog(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `fog` and waits for its end."""
    return subprocess.run(
        [sys.executable, "-m", "fog_cli", *words],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def forked_fog(
    folder: Path, *words: str, first: Callable[[], None] | None = None, **variables: str
) -> tuple[int, str]:
    """Does the same without new interpreters; returns the exit status and all output."""
    running = ForkedJob(["-m", "fog_cli", *words], folder / "log.txt", variables, first)
    with started([running]):
        return running.wait(TIMEOUT), running.output


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns the parser of each command."""
    top = fog_cli.parser()
    (action,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


# --- all commands -------------------------------------------------------------------------------------------


def test_every_command_has_a_help_with_examples_and_its_options_in_the_documentation() -> None:
    table = DOCUMENTATION.partition("\n## ")[0]
    assert re.findall(r"^\| `fog (\w+)` \|", table, re.MULTILINE) == list(COMMANDS) == list(parsers())
    for name, parser in parsers().items():
        assert f"examples:\n  fog {name}" in parser.format_help() or f"fog {name}" in (parser.epilog or ""), (
            name
        )
        section = DOCUMENTATION.partition(f"\n## fog {name}\n")[2].partition("\n## ")[0]
        assert section, f"docs/cli.md has no section of fog {name}"
        options = {option for action in parser._actions for option in action.option_strings}
        options -= {"-h", "--help"}
        missing = [
            option for option in options if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", section)
        ]
        assert not missing, f"docs/cli.md, fog {name}: {missing}"
        unknown = set(re.findall(r"^\| `(-[\w-]+)", section, re.MULTILINE)) - options
        assert not unknown, f"docs/cli.md, fog {name}: no such options: {unknown}"


LIGHT = """
import contextlib, sys
from fog_cli import main
for words in (["--help"], ["run", "--help"], ["doctor", "--help"]):
    with contextlib.suppress(SystemExit):
        main(words)
heavy = sorted({"torch", "fog_pg", "matplotlib"} & set(sys.modules))
assert not heavy, heavy
"""


def test_torch_is_not_imported_by_what_does_without() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, capture_output=True, timeout=TIMEOUT)


# --- fog run: hosts -----------------------------------------------------------------------------------------


def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# ours\na slots=2\n\nb.org:4  # the new one\n  c slots = 1\n10.0.0.1\na\n[fe80::1%eth0]:2\n"
    )
    hosts = {"a": 3, "b.org": 4, "c": 1, "10.0.0.1": 1, "fe80::1%eth0": 2}
    assert read_hostfile(str(file)) == [Host(name, slots) for name, slots in hosts.items()]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a slots=2\nb slots=many\n", r"got 'b slots=many'; allowed are"),
        ("a slots=0\n", r"got 'a slots=0'.*one slot at least"),
        (None, "No such file or directory"),
        ("\udcff", "decode"),
    ],
)
def test_wrong_hostfile(tmp_path: Path, lines: str | None, message: str) -> None:
    file = tmp_path / "hosts"
    if lines is not None:
        file.write_bytes(lines.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=message) as caught:
        read_hostfile(str(file))
    assert f"--hostfile {file}" in str(caught.value)


# --- fog run: the command line ------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text("pass")
    (tmp_path / "package").mkdir()
    monkeypatch.chdir(tmp_path)
    return "train.py"


def prepared(*words: str, **environment: str) -> launchers.Job:
    arguments = fog_cli.parser().parse_args(["run", *words])
    return run.prepare(arguments, {"PATH": os.environ["PATH"], **environment})


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train.py", "--np", "9", "-x", "-m"], [sys.executable, "train.py", "--np", "9", "-x", "-m"]),
        (["python", "train.py", "-v"], [sys.executable, "train.py", "-v"]),
        (["python3", "-c", "pass"], [sys.executable, "-c", "pass"]),
        (["-m", "package.train", "-v"], [sys.executable, "-m", "package.train", "-v"]),
        (["--", "sh", "-c", "true"], ["sh", "-c", "true"]),
        (["nice", "-n", "5", "python"], ["nice", "-n", "5", "python"]),
    ],
)
def test_what_ranks_run(script: str, words: list[str], command: list[str]) -> None:
    assert prepared("-np", "2", *words).rank == [*launchers.RANK, *command]


def test_variables_of_ranks(script: str) -> None:
    words = shlex.split("--network-interface eth1 -x A=1=2 -x HOME -x B=")
    variables = prepared("-np", "2", *words, script, HOME="/h", OMP_NUM_THREADS="4").environment
    expected = {"A": "1=2", "B": "", "HOME": "/h", "OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1"}
    expected |= {
        "FOG_INTERFACE": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
    }
    assert {name: variables[name] for name in expected} == expected
    assert prepared("-np", "2", script).environment["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in prepared("-np", "1", script).environment


# The words after `fog` as in a shell, and a part of the error.
WRONG = r"""
run train.py | -np: it is missing; allowed are numbers from 1 on
run -np 2 | what shall the ranks run?
run -np 2 missing.py | missing.py: there is no such script
run -np 2 -- --no-option | --no-option: no option of fog run
run -np 2 no-such-program | no-such-program: there is no such script or program
run -np 4 -H a:1,b:2 train.py | -np: got 4; the hosts have 3 slots: a:1, b:2
run -np 2 -H a:b train.py | -H: got 'a:b'; allowed are 'host'
run -np 2 -H 'a b' train.py | -H: got 'a b'
run -np 2 -H ,a train.py | -H: got ''
run -np 2 -H a:-1 train.py | -H: got 'a:-1'
run -np 2 -H 'a;b:1' train.py | -H: got 'a;b:1'
run -np 2 -H a,-oProxyCommand=x train.py | -H: got '-oProxyCommand=x'
run -np 2 --hostfile missing train.py | --hostfile missing: No such file
run -np 2 --hostfile /dev/null train.py | -np: got 2; the hosts have 0 slots
run -np 2 -x 1A=2 train.py | -x: got '1A=2'
run -np 2 -x NOT_SET_HERE train.py | -x NOT_SET_HERE: it is not set here
run -np 2 --max-restarts 1 train.py | --max-restarts: it is an option of --keep-going
run -np 2 -H a,b --only-host 1 train.py | --only-host: it is an option of --keep-going
run -np 2 --keep-going --only-host 0 train.py | --only-host: got 0; -H or --hostfile must name such a host, and others
run -np 2 --keep-going -H a,b --only-host 2 train.py | --only-host: got 2; -H or --hostfile must name such a host
run -np 2 --keep-going -H a,b --only-host 1 -x MASTER_PORT=0 train.py | MASTER_PORT: got '0'; allowed are 1 to 65535
run -np 2 -H localhost,127.0.0.1 -x MASTER_PORT=many train.py | MASTER_PORT: got 'many'; allowed are 0 to 65535
advise -np 2 | Give --parameters and --step-time, or --model
advise -np 2 --model no.py | --model no.py: there is no such script
advise -np 2 --model no.py --step-time 1 | leave out
advise -np 9 -H a:1 --parameters 1M --step-time 1 | the hosts have 1 slots
topology ring -n 0 | size must be
dump 0 | 0: there is no such process
dump 99999999999999 | 99999999999999: there is no such process
"""


@pytest.mark.parametrize(("line", "message"), [line.split(" | ") for line in WRONG.strip().splitlines()])
def test_wrong_command_lines_start_nothing(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    for module, name in ((one_host, "run"), (keep_going, "run"), (bench, "run_program")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("something was started"))
    words = shlex.split(line)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fog {words[0]}: error: ") and message in error


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("run -np x t.py", "argument -np/--num-proc: got 'x'; allowed are numbers from 1 on"),
        ("run -np 0 t.py", "argument -np/--num-proc: got '0'"),
        ("run -np 2 -p 65536 t.py", "argument -p/--ssh-port: got '65536'; allowed are 1 to 65535"),
        ("run --keep-going -np 2 --max-restarts -1 t.py", "argument --max-restarts: got '-1'"),
        ("advise -np 1", "argument -np/--num-proc: got '1'; allowed are numbers from 2 on"),
        ("advise -np 2 --parameters x", "argument --parameters: got 'x'; allowed are 1000, 4K,"),
        ("advise -np 2 --step-time inf", "argument --step-time: got 'inf'"),
        ("bench -np 1", "argument -np/--num-proc: got '1'"),
        ("bench --seconds 0", "argument --seconds: got '0'"),
        ("top --interval nan", "argument --interval: got 'nan'; allowed are 0.1 to 3600"),
        ("run -np 2 --no-option t.py", "unrecognized arguments: --no-option"),
        ("run --no-option 3 -np 2 t.py", "unrecognized arguments: --no-option"),
        ("", "required: COMMAND"),
        ("no", "invalid choice: 'no'"),
    ],
)
def test_what_the_parser_refuses(capsys: pytest.CaptureFixture[str], line: str, named: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "usage: fog" in error and named in error


# --- fog run: output ----------------------------------------------------------------------------------------


def test_lines_get_the_rank_and_stay_whole() -> None:
    prefixer = LinePrefixer(b"[1] ")
    assert prefixer.lines(b"a\nb") == [b"[1] a\n"]
    assert prefixer.lines(b"c\n\nd\r") == [b"[1] bc\n", b"[1] \n"]  # "\r" may be the first half of "\r\n"
    assert prefixer.lines(b"\ne\r50%\r100%") == [b"[1] d\n", b"[1] e\n", b"[1] 50%\n"]
    assert prefixer.lines(b"") == [b"[1] 100%\n"]
    assert prefixer.lines(b"") == []


# Rank 1 ends with status 7 after both ranks have printed.
CONSENSUS = """
import sys
import fogdist, torch

fogdist.init()
rank = fogdist.rank()
x = fogdist.neighbor_allreduce(torch.tensor([float(rank)]))
for _ in range(20):
    print("-" * WIDTH)
print("average", x.item(), fogdist.size(), sys.argv[1:])
print("words for stderr", file=sys.stderr)
sys.stdout.write("no end of line")
torch.distributed.barrier()  # before the launcher ends the other rank
fogdist.shutdown()
sys.exit(7 if rank == 1 else 0)
"""


def test_output_and_status_of_ranks(tmp_path: Path) -> None:
    script, width = tmp_path / "consensus.py", 10_000
    script.write_text(f"WIDTH = {width}\n{CONSENSUS}")
    done = fog("run", "-np", "2", str(script), "fail", "a b", folder=tmp_path)
    lines = done.stdout.splitlines()
    for rank in (0, 1):
        own = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}] ")]
        assert own.count("-" * width) == 20 and own[-1] == "no end of line", done.stdout[-2000:]
        assert "average 0.5 2 ['fail', 'a b']" in own, done.stdout[-2000:]
        assert f"[{rank}] words for stderr" in done.stderr.splitlines(), done.stderr
    assert len(lines) == 2 * 22 and done.returncode == 7
    assert re.search(r"fog run: rank 1 \(process \d+\) ended with exit status 7", done.stderr)
    # torchrun has left no folder behind
    assert [entry.name for entry in tmp_path.iterdir()] == ["consensus.py"]


WAYS = {"torchrun's machinery": [], "an agent": ["--keep-going", "--max-restarts", "5"]}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL]
)
def test_signals_are_passed_on_and_nothing_is_left(tmp_path: Path, way: str, number: signal.Signals) -> None:
    with running_ranks(tmp_path, WAITING, way) as job:
        os.kill(job._process.pid, number)
        status = job.wait(TIMEOUT)
    # A killed process cannot pass on a signal; the system tells the ranks that it is gone.
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        stopped = {f"[{rank}] stopped by {number.name}" for rank in (0, 1)}
        assert stopped <= set(job.output.splitlines()), job.output
    assert "starts again" not in job.output


@pytest.mark.parametrize("way", WAYS)
def test_a_second_signal_kills_ranks_that_ignore_the_first(tmp_path: Path, way: str) -> None:
    """The ranks, and the processes that they have started, are in sessions of their own."""
    with running_ranks(tmp_path, STUBBORN, way) as job:
        os.kill(job._process.pid, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            job._process.wait(0.5)
        os.kill(job._process.pid, signal.SIGTERM)
        assert job.wait(TIMEOUT) == 128 + signal.SIGTERM


@contextlib.contextmanager
def running_ranks(folder: Path, script: str, way: str) -> Iterator[ForkedJob]:
    (folder / "script.py").write_text(script)
    words = ["-m", "fog_cli", "run", *WAYS[way], "-np", "2", str(folder / "script.py")]
    with started([ForkedJob(words, folder / "log.txt")]) as (job,):
        job.wait_for(lambda output: output.count("ready") == 2, TIMEOUT)
        yield job


RAISES = """
import torch
import torch.distributed as dist
dist.init_process_group("fog")
for step in range(3):
    if dist.get_rank() == 1 and step == 2:
        raise ValueError("no such file")
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_that_raises_is_named_and_the_others_are_brief(tmp_path: Path, way: str) -> None:
    (tmp_path / "script.py").write_text(RAISES)
    words = ["run", *WAYS[way][:1], "-np", "3", str(tmp_path / "script.py")]
    status, output = forked_fog(tmp_path, *words)
    assert status == 1, output
    assert re.search(r"rank 1 \(process \d+\) ended with exit status 1", output.splitlines()[-1]), output
    assert "[1] [rank1]: ValueError: no such file" in output.splitlines()
    for rank in (0, 2):
        # On a busy machine torch warns that it does not get the name of a host, and torchrun may end a rank before it raises.
        lines = re.findall(rf"^\[{rank}\] (?!\[W).*", output, re.MULTILINE)
        assert len(lines) == 1 or (not lines and not WAYS[way]), output
        for line in lines:
            assert f"{tmp_path / 'script.py'}:8: DistBackendError: fog: " in line and "rank 1 " in line, line
    _, output = forked_fog(tmp_path, *words[:-1], "-x", "FOG_RUN=0", words[-1])
    assert output.count("Traceback") > (1 if WAYS[way] else 0), output  # as above


def test_a_process_id_that_was_given_out_anew_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        ((pid, at),) = processes.identified([process.pid])
        assert pid == process.pid and (pid, at) in processes._with_descendants(
            processes.identified([os.getpid()])
        )
        assert processes._with_descendants([(pid, at - 1)]) == set()
        processes.send((pid, at - 1), signal.SIGKILL)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        processes.send((pid, at), signal.SIGKILL)
        assert process.wait(TIMEOUT) == -signal.SIGKILL


# --- fog doctor ---------------------------------------------------------------------------------------------


def cramp() -> None:
    libc = ctypes.CDLL(None)
    assert libc.unshare(0x40020000) == 0  # CLONE_NEWNET | CLONE_NEWNS
    assert libc.mount(None, b"/", None, ctypes.c_ulong(0x84000), None) == 0  # MS_REC | MS_SLAVE
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=1m") == 0
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))


def test_doctor_on_a_cramped_machine(tmp_path: Path) -> None:
    """With a tiny /dev/shm, no network and few descriptors, one host works, and the report names what is scarce."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    status, output = forked_fog(tmp_path, "doctor", first=cramp, FOG_CONFIRMED="1")
    assert status == 0 and "\nWhat fog needs on one host works." in output, output
    lines = re.findall(r"^  (ok|note|bad) +(.+?): (.*)\n(?: +-> (.*)\n)?", output, re.MULTILINE)
    found = {name: state for state, name, _, _ in lines}
    assert "bad" not in found.values()
    notes = {name for name, state in found.items() if state == "note"}
    assert {"descriptors", "shared memory", "unknown variables"} <= notes
    assert {"torch", "fog", "extension", "loopback", "ranks share memory"} <= set(found) - notes
    for name in ("start", "collectives", "neighbors", "windows"):
        assert found[f"one host, {name}"] == found[f"TCP, {name}"] == "ok", output
    advice = {name: each for _, name, _, each in lines}
    assert "ulimit -n" in advice["descriptors"] and "--shm-size" in advice["shared memory"]
    (unknown,) = (text for _, name, text, _ in lines if name == "unknown variables")
    of_tests = {"FOG_TEST_ALL", "FOG_SOAK_OPERATIONS"}  # set by `make test-long`
    assert set(unknown.split(", ")) - of_tests == {"FOG_CONFIRMED"}
    # MPI itself needs /dev/shm, and without it ends by SIGBUS.
    assert found["MPI RMA, start"] == "note" and "goes by TCP" in advice["MPI RMA, start"], output


def another_torch() -> None:
    info = types.ModuleType("fog_pg._build_info")
    info.TORCH_VERSIONS, info.VERSION, info.NATIVE_MPI = ("2.7.1+cu126",), "1.0", False  # type: ignore[attr-defined]
    sys.modules[info.__name__] = fog_pg._build_info = info  # type: ignore[attr-defined]


def no_torch() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("first", "variables", "shown"),
    [
        (another_torch, {}, ["built for torch 2.7.1+cu126", "pip install --no-build-isolation"]),
        (None, {"FOG_MPI_LIBRARY": "/etc/passwd"}, ["/etc/passwd", "-> unset FOG_MPI_LIBRARY"]),
        (None, {"FOG_HOST_TIMEOUT": "soon"}, ["FOG_HOST_TIMEOUT", "docs/environment.md"]),
        (no_torch, {}, ["torch", "pytorch.org"]),
    ],
)
def test_doctor_with_a_broken_installation(
    tmp_path: Path, first: Callable[[], None] | None, variables: dict[str, str], shown: list[str]
) -> None:
    status, output = forked_fog(tmp_path, "doctor", "--no-self-test", first=first, **variables)
    assert status == 1, output
    (bad,) = re.findall(r"^  bad .*\n(?: +->.*\n)?", output, re.MULTILINE)
    assert [text for text in shown if text not in bad] == [], bad
    assert "Not everything that fog needs on one host works" in output and "Traceback" not in output


def refuses(*_: object, **__: object) -> None:
    raise OSError(1, "it is forbidden")


@pytest.mark.parametrize(
    ("check", "changed", "by", "state", "text"),
    [
        ("ranks share memory", "os.memfd_create", refuses, "bad", "memfd_create: it is forbidden"),
        (
            "ranks share memory",
            "sys.executable",
            "/bin/false",
            "note",
            "cannot open another one's memory.* it failed",
        ),
        ("loopback", "socket.create_connection", refuses, "bad", "does not connect: it is forbidden"),
        ("host name", "socket.getaddrinfo", refuses, "note", "does not resolve: it is forbidden"),
        ("host name", "socket.getaddrinfo", lambda *_: [(0, 0, 0, "", ("10.0.0.1", 0))], "ok", "is 10.0.0.1"),
        ("shared memory", "shutil.disk_usage", refuses, "note", "could not be looked at: PermissionError"),
    ],
)
def test_what_doctor_finds_on_a_machine(
    monkeypatch: pytest.MonkeyPatch, check: str, changed: str, by: object, state: str, text: str
) -> None:
    monkeypatch.setattr(f"fog_cli.machine.{changed}", by)
    (found,) = (each for each in machine.findings() if each.name == check)
    assert found.state == state and re.search(text, found.text), found


def test_doctor_starts_no_ranks_on_an_unusable_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = []

    def run_no_program(name: str, **_: object) -> Ended:
        programs.append(name)
        return Ended(0, printed({"name": "torch", "begin": True}, {"name": "torch", "text": "2"}), "")

    monkeypatch.setattr(doctor, "run_program", run_no_program)
    monkeypatch.setattr(machine.socket, "create_connection", refuses)
    assert main(["doctor"]) == 1 and programs == ["facts"]
    output = capsys.readouterr().out
    assert "two ranks: not tried: see above" in output and output.endswith("one host works: loopback.\n")


def printed(*lines: dict[str, object], rank: int | None = None) -> str:
    return "".join(f"{'' if rank is None else f'[{rank}] '}{json.dumps(line)}\n" for line in lines)


def test_doctor_names_what_hangs_or_crashes() -> None:
    begun = {"name": "start", "begin": True}
    done = {"name": "torch", "text": "2"}
    hangs = run_program("facts", limit=0.0)
    hangs = replace(
        hangs, output=printed({"name": "torch", "begin": True}, done, {"name": "MPI", "begin": True})
    )
    found = {finding.name: finding for finding in doctor.loaded(hangs)}
    assert found["torch"].state == "ok" and found["MPI"].state == "note"
    assert "did not end in time" in found["MPI"].text and "FOG_MPI_LIBRARY" in found["MPI"].advice

    output = printed(begun, {"name": "start", "text": "fine"}, rank=0) + printed(begun, rank=1)
    crashed = Ended(139, output, "Fatal error\nfog run: rank 1 (process 7) ended by SIGSEGV")
    (found_one,) = doctor.tried(crashed, "one host")
    assert found_one.state == "bad" and "rank 1 (process 7) ended by SIGSEGV" in found_one.text
    assert "FOG_LOG_LEVEL=debug fog doctor" in found_one.advice
    (optional,) = doctor.tried(crashed, "TCP", optional="nothing to do")
    assert optional.state == "note" and optional.advice.endswith("nothing to do")
    (late,) = doctor.loaded(Ended(None, "", ""))
    assert (late.name, late.state) == ("Python", "bad") and "did not end in time" in late.text
    (silent,) = doctor.tried(Ended(1, "", "no torch"), "one host")
    assert silent.state == "bad" and "no torch" in silent.text


# --- fog topology -------------------------------------------------------------------------------------------


def test_topologies_are_those_of_fogdist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "cube", "-n", "8"]) == 2
    (listed,) = re.findall("^Names: (.*)\\.$", topology.EXAMPLES, re.MULTILINE)
    assert f"name must be one of {listed}, got 'cube'" in capsys.readouterr().err


def test_topology_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "one-peer-exp2", "ring", "-n", "16"]) == 0
    head, *rows = (re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines())
    assert [len(head), head[0], *(row[0] for row in rows)] == [8, "16 ranks", "one-peer-exp2", "ring"]
    # Four rounds of one peer each make the exact average.
    assert rows[0][1:] == ["4", "1", "1.00", "1.0000", "4", "4", "4.0"]

    assert main(["topology", "all", "-n", "4"]) == 0
    assert "one-peer-exp2" in capsys.readouterr().out


# --- fog bench ----------------------------------------------------------------------------------------------


def test_counts() -> None:
    counts = [1000, 4000, 1_500_000, 64 << 20, 2 * 10**9, 7 * 10**9]
    assert [fog_cli.count(text) for text in ("1000", "4K", "1.5M", "64Mi", "2g", "7B")] == counts
    for text in ("", "x", "-1", "4T", "0", "0.1", "4i", "4Bi"):
        with pytest.raises(argparse.ArgumentTypeError, match="allowed are 1000"):
            fog_cli.count(text)


def test_bench(tmp_path: Path) -> None:
    status, output = forked_fog(tmp_path, "bench", "--bytes", "4K", "--seconds", "0.01")
    assert status == 0, output
    rows = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines() if re.search(r" {2}\S", line)]
    assert rows[0] == ["operation", "bytes", "fog", "Gloo", "Gloo / fog"]
    assert [row[0] for row in rows[1:]] == ["neighbor_allreduce", "allreduce", "window put and update"]
    assert all(row[1] == "4,000" and re.fullmatch(r"[\d.]+ [um]s", row[2]) for row in rows[1:])
    assert [row[3] == row[4] == "-" for row in rows[1:]] == [False, False, True]


def test_bench_says_what_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "run_program", lambda *_, **__: Ended(-40, "", "no memory"))
    assert main(["bench", "-np", "9999"]) == 1
    shared, failed = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"fog bench: 9999 ranks share \d+ cores, and their times say little", shared)
    assert failed == "fog bench: it ended by signal 40: no memory. `fog doctor` says more"


def test_a_ratio_has_its_spread() -> None:
    """A slow moment changes neither the medians nor the ratio."""
    times = [(1e-3, 2e-3), (1e-3, 40e-3), (1e-3, 3e-3), (30e-3, 60e-3), (1e-3, 2.5e-3)]
    _, row = bench.table([{"name": "sum", "bytes": 8, "times": times}])
    assert re.split(r"\s{2,}", row) == ["sum", "8", "1.00 ms", "3.00 ms", "2.50 (2.00 to 40.00)"]


# --- timeline and dump ------------------------------------------------------------------------------------------


def test_timeline_merge(tmp_path, capsys):
    for rank in range(2):
        about = {"rank": rank, "size": 2, "host": "a", "clock": "a", "wall_clock_ns_at_zero": 0}
        (tmp_path / f"t{rank}.json").write_text(
            json.dumps({"name": "fog_timeline", "ph": "M", "pid": rank, "args": about})
        )
    output = tmp_path / "merged.json"
    assert fog_cli.main(["timeline", "merge", str(tmp_path / "t"), "-o", str(output)]) == 0
    assert "2 ranks" in capsys.readouterr().out and json.loads(output.read_text())["traceEvents"] == []
    assert fog_cli.main(["timeline", "merge", str(tmp_path / "t1.json"), "-o", str(output)]) == 0
    assert fog_cli.main(["timeline", "merge", str(tmp_path / "other"), "-o", str(output)]) == 2
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(KeyboardInterrupt, 130, "fog dump: interrupted\n"), (BrokenPipeError, 141, "")],
)
def test_an_interrupt_ends_a_command_in_a_line(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], status: int, said: str
) -> None:
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", Mock(write=written.append))
    monkeypatch.setattr("fog_cli.commands.dump.run", Mock(side_effect=error))
    assert main(["dump"]) == status and "".join(written) == said


@pytest.mark.parametrize("command", ["dump", "top"])
def test_nothing_to_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(os.getpid())]) == 2
    assert "has no group of fog" in capsys.readouterr().err
    monkeypatch.setattr("fogdist.observe.flight_record.read_all", list)
    assert main([command]) == 1
    assert capsys.readouterr().err.startswith(f"fog {command}: no process of yours on this host has a group")
