"""Tests of `fog top`: the numbers that ranks publish, what changes between two looks, the table and the page."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from fogdist import flight_record
from fogdist.flight_record import Operation, Peer, Process
from scripts import ROOT

# The tests do not need an installed command line.
sys.path.append(str(ROOT / "python"))
from fog_cli import looks, main
from fog_cli.commands import top
from fog_cli.looks import COLUMNS, Watch, cells, duration, is_bad, row_of
from fog_cli.page import page


def operation(**values: object) -> Operation:
    given = {
        "what": "allreduce(SUM, float32[3])",
        "group": "0",
        "rank": 0,
        "number": 7,
        "key": 7,
        "state": "done",
        "age": 3.0,
        "seconds": 1.0,
        "awaited": [],
        "awaited_count": 0,
    }
    return Operation(**(given | values))


def process(**values: object) -> Process:
    given = {"pid": 71, "rank": 0, "size": 3, "host": "a", "operations": [], "unrecorded": 0}
    given |= {"script": "a.py"}
    return Process(**(given | values))


# --- what changes between two looks ---------------------------------------------------------------------------


def test_rates_and_waits_are_those_since_the_last_look() -> None:
    before = process(steps=10, peers=[Peer(1, 2.0, -1, False), Peer(2, 4.0, 3, False)])
    now = process(
        steps=16,
        step_age=0.5,
        failed=2,
        epoch=4,
        peers=[Peer(1, 3.0, -1, False), Peer(2, 4.0, 6, True), Peer(3, 0.0, 5, False)],
        operations=[operation()],
    )
    row = row_of(now, before, 4.0, "runs")
    assert (row.rate, row.steps, row.step_age, row.failed, row.membership) == (1.5, 16, 0.5, 2, 4)
    assert row.waits == {1: 0.25} and row.staleness == {3: 5} and row.lost == [2]
    assert (row.number, row.operation_state, row.operation_age) == (7, "done", 2.0)
    first = row_of(now, None, 4.0, "runs")
    assert first.rate is None and first.waits == {}
    assert row_of(process(), None, 1.0, "runs").membership is None


def test_the_oldest_operation_in_flight_is_shown() -> None:
    waiting = operation(
        number=8, state="in flight", age=12.0, seconds=12.0, awaited=[(2, 72)], awaited_count=1
    )
    row = row_of(
        process(operations=[operation(), waiting, operation(number=9, state="in flight")]), None, 1.0, "runs"
    )
    assert (row.number, row.operation_age, row.waits_for, row.waits) == (8, 12.0, [2], {2: 1.0})
    shown = dict(zip(COLUMNS, cells(row)))
    assert shown["operation"] == "#8 allreduce(SUM, float32[3]) … waits for 2" and shown["age"] == "12.0 s"


def test_a_process_that_ended_keeps_its_row() -> None:
    found = [process(job=9), process(pid=72, rank=1, job=9), process(pid=73, size=5, job=8, started=86400.0)]
    watch = Watch(lambda: found, lambda processes: [f"late: {len(processes)}"], lambda _: "runs")
    assert [(job.size, len(job.rows), job.late) for job in watch.look(1.0)] == [
        (3, 2, ["late: 2"]),
        (5, 1, ["late: 1"]),
    ]
    found = [process(steps=2, job=9)]
    jobs = watch.look(2.0)
    assert [row.state for row in jobs[0].rows] == ["runs", "ended"] and jobs[0].rows[0].rate == 2.0
    when = time.strftime("%F %T", time.localtime(0))
    assert looks.title(jobs[0]) == f"a.py, started {when}: 1 of 3 ranks are on this host"
    grown = replace(jobs[0], size=1, rows=[replace(jobs[0].rows[0], rank=rank) for rank in range(2)])
    assert looks.title(grown).endswith("2 of 2 ranks are on this host")
    assert is_bad(jobs[0].rows[1]) and not is_bad(jobs[0].rows[0])


def test_a_report_is_by_job() -> None:
    found = [process(job=9, pid=72, rank=1), process(job=8, pid=80, started=5.0), process(job=9)]
    blocks = flight_record.report(found).split("\n\n")
    assert [re.findall(r"process (\d+)", block) for block in blocks] == [["71", "72"], ["80"]]
    assert all(block.startswith("a.py, started ") for block in blocks)


def test_texts() -> None:
    assert [duration(each) for each in (0.0123, 0.9999, 12.34, 75, 7322)] == [
        "12 ms",
        "1.0 s",
        "12.3 s",
        "75.0 s",
        "2 h 2 min",
    ]
    assert looks.top({1: 0.1, 2: 0.5, 3: 0.5, 4: 0.0, 5: 0.2}) == [(2, 0.5), (3, 0.5), (5, 0.2)]


class _Tags(HTMLParser):
    """Checks that elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_shows_everything_and_loads_nothing() -> None:
    names = [
        process(host="<host>", operations=[operation(what="f(<x>)", state="failed")], failed=1),
        process(pid=72, rank=1, peers=[Peer(0, 0.0, -1, False), Peer(2, 0.5, 9, False)]),
    ]
    watch = Watch(lambda: names, lambda _: ["rank 0 is <late>"], lambda _: "runs")
    watch.look(1.0)
    names[1] = replace(names[1], peers=[Peer(0, 0.25, -1, False), Peer(2, 1.5, 9, False)])
    text = page(watch.look(3.0), "here & now", "today", 2.0)
    tags = _Tags()
    tags.feed(text)
    assert tags.open == [] and tags.links == [] and "<script" not in text and "@import" not in text
    for shown in ("<host>", "#7 f(<x>) failed", "rank 0 is <late>", "fog top: here & now", "12%", "50% +9"):
        assert shown in tags.texts, shown
    tags = _Tags()
    tags.feed(page([], "a", "today", 1.0))
    assert "No process of yours on this host has a group of fog." in tags.texts


# --- real ranks -----------------------------------------------------------------------------------------------


def numbers_of_training() -> list[object]:
    """Rank 0 comes late in each round; the others wait for it."""
    fogdist.init()
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 1)
    optimizer = fogdist.DistributedAdaptWithCombineOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model
    )
    for _ in range(5):
        if rank == 0:
            time.sleep(0.2)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        dist.barrier()
    flight_record.note_epoch(3)
    seen = flight_record.read(os.getpid())
    fogdist.shutdown()
    waited = {peer.rank: peer.waited for peer in seen.peers}
    assert (seen.script, seen.job) == (os.path.basename(sys.argv[0]), _first_group().id)
    assert 0 <= time.time() - seen.started < 3600
    return [seen.steps, seen.epoch, 0 <= seen.step_age < 60, seen.begun > 5, seen.failed, waited]


def _first_group() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def test_ranks_publish_steps_and_waits(new_world):
    found = new_world(2).run(numbers_of_training)
    for rank, (steps, epoch, has_age, has_begun, failed, _) in enumerate(found):
        assert (steps, epoch, has_age, has_begun, failed) == (5, 3, True, True, 0), rank
    assert found[1][-1][0] > 0.5 > found[0][-1].get(1, 0.0), found


def staleness_of_a_slow_rank() -> dict[int, int]:
    fogdist.init()
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = fogdist.DecentralizedDataParallel(model, optimizer, mode="async")
    for _ in range(3 if rank == 0 else 6):
        wrapped(torch.ones(4)).sum().backward()
        optimizer.step()
    store = dist.distributed_c10d._get_default_store()
    seen = {peer.rank: peer.staleness for peer in flight_record.read(os.getpid()).peers}
    steps = flight_record.read(os.getpid()).steps
    store.set(f"done{rank}", "")
    store.wait(["done0", "done1"])
    assert steps == (3 if rank == 0 else 6)
    return seen


def test_ranks_publish_staleness(new_world):
    found = new_world(2).run(staleness_of_a_slow_rank)
    assert found[1][0] >= 1, found  # rank 1 has made more exchanges than rank 0


def switches(pid: int) -> list[str]:
    """Returns how often each thread of a process gave its core away."""
    return [
        line
        for status in sorted(Path(f"/proc/{pid}/task").glob("*/status"))
        for line in status.read_text().splitlines()
        if "ctxt_switches" in line
    ]


def a_look_at_a_stopped_rank() -> str | None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 0:
        store.set("pid", str(os.getpid()))
        dist.barrier()
        return None
    pid = int(store.get("pid"))
    os.kill(pid, signal.SIGSTOP)
    try:
        # A thread that has not stopped yet would still switch.
        while not all(") T " in status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/stat")):
            time.sleep(0.01)
        before = switches(pid)
        watch = Watch(flight_record.read_all, flight_record.blamed)
        watch.look()
        rows = [row for job in watch.look() for row in job.rows if row.pid == pid]
        after = switches(pid)
    finally:
        os.kill(pid, signal.SIGCONT)
    dist.barrier()
    assert before == after and len(before) > 2
    (row,) = rows
    return row.state


def test_a_look_wakes_nobody(new_world):
    assert new_world(2).run(a_look_at_a_stopped_rank) == [None, "stopped"]


def commands(folder: str) -> None:
    """Rank 1 looks at rank 0 by each form of the command."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 0:
        store.set("pid", str(os.getpid()))
        dist.barrier()
        return
    pid = store.get("pid").decode()
    assert main(["top", "--interval", "0.1", "--html", f"{folder}/top.html", pid]) == 0
    text = Path(folder, "top.html").read_text()
    assert f"<td>{pid}</td>" in text and os.listdir(folder) == ["top.html"]
    assert os.stat(f"{folder}/top.html").st_mode & 0o777 == 0o644
    lines = Path(folder, "out")
    descriptor, before = os.open(lines, os.O_WRONLY | os.O_CREAT), os.dup(1)
    os.dup2(descriptor, 1)
    try:
        assert main(["top", "--interval", "0.1", "--json", pid]) == 0
        sys.stdout.flush()
    finally:
        os.dup2(before, 1)
    (job,) = json.loads(lines.read_text())["jobs"]
    assert job["size"] == 2 and [row["pid"] for row in job["rows"]] == [int(pid)]
    dist.barrier()


def test_forms_of_the_command(new_world, tmp_path):
    new_world(2).run(commands, str(tmp_path))


# --- the command line -----------------------------------------------------------------------------------------


def test_the_error_names_the_package_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top", "--once"]) == 2
    assert "the table needs the package rich: pip install rich, or the extra `top`" in capsys.readouterr().err


def test_nothing_to_show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(flight_record, "read_all", list)
    assert main(["top", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"jobs": []}


def test_a_page_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(flight_record, "read_all", list)
    others, page_file = tmp_path / "others", tmp_path / "top.html"
    others.touch()
    (tmp_path / f"top.html.part-{os.getpid()}").symlink_to(others)  # made by somebody who guesses names
    assert main(["top", "--html", str(page_file)]) == 1 and page_file.stat().st_size > 0
    assert others.stat().st_size == 0
    assert main(["top", "--html", str(tmp_path / "none" / "top.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


# --- several hosts --------------------------------------------------------------------------------------------

SSH = """#!/bin/sh
while [ "$1" != "-p" ]; do shift; done
shift 2
case "$1" in
a|b) host=$1; shift; exec sh -c "$*" ;;
{cases}
*) echo "ssh: cannot resolve $1" >&2; exit 255 ;;
esac
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces ssh: hosts a and b are this one, others are shell commands, and the rest does not exist."""

    def replace_(**commands: str) -> None:
        (tmp_path / "ssh").write_text(
            SSH.format(cases="\n".join(f"{name}) {command} ;;" for name, command in commands.items()))
        )
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "python")]))

    return replace_


def watched(*jobs: dict[str, object]) -> str:
    """Returns the shell command of a host that shows jobs."""
    return f"echo '{json.dumps({'jobs': jobs})}'; exec sleep 600"


def seen(host: str, *processes: Process) -> dict[str, object]:
    watch = Watch(lambda: processes, lambda _: [f"rank 9 is late on {host}"], lambda _: "runs")
    watch.look(1.0)
    return asdict(watch.look(2.0)[0])


def test_jobs_of_several_hosts_are_one(ssh: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    waits = [Peer(0, 1.0, 4, False)]
    ssh(
        c=watched(seen("c", process(rank=2, host="c"), process(rank=0, pid=5, host="c", peers=waits))),
        d=watched(seen("d", process(rank=1, host="d"))),
    )
    assert main(["top", "-H", "c,d:4", "-p", "22", "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert [(row["rank"], row["host"]) for row in job["rows"]] == [(0, "c"), (1, "d"), (2, "c")]
    assert job["late"] == ["rank 9 is late on c", "rank 9 is late on d"]
    assert looks.Job.from_json(job).rows[0].staleness == {0: 4}


def test_a_host_that_cannot_be_seen_is_named(
    ssh: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ssh(c=watched(seen("c", process())), d='echo \'{"jobs": [{"name": 1}]}\'')
    page_file = tmp_path / "top.html"
    assert main(["top", "-H", "c,d,none", "-p", "22", "--html", str(page_file)]) == 1
    told = capsys.readouterr().err
    assert "none: ssh has ended with exit status 255: ssh: cannot resolve none" in told
    assert 'd: got \'{"jobs": [{"name": 1}]}\'; is fog there of another version?' in told
    assert "cannot resolve none" in page_file.read_text() and "are on c, d, none" in page_file.read_text()


def a_look_at_two_names_of_this_host(folder: str) -> list[tuple[int, int]] | None:
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "python")])
    dist.barrier()
    found = None
    if dist.get_rank() == 1:
        output = subprocess.run(
            [sys.executable, "-m", "fog_cli", "top", "-H", "a,b", "-p", "22", "--interval", "0.1", "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        rows = [row for job in json.loads(output.stdout)["jobs"] for row in job["rows"]]
        found = [(row["rank"], row["pid"]) for row in rows if row["pid"] in (os.getpid(), os.getppid())]
    dist.barrier()
    return found or [(dist.get_rank(), os.getpid())]


def test_hosts_that_are_this_one(ssh: Callable[..., None], new_world, tmp_path: Path) -> None:
    """The real thing but for the network: a rank that two hosts show has one row."""
    ssh()
    found = new_world(2).run(a_look_at_two_names_of_this_host, str(tmp_path))
    assert len(found[1]) == 1 and found[1][0][0] == 1


def test_nothing_is_left_running(ssh: Callable[..., None], tmp_path: Path) -> None:
    ssh(c=f"echo $$ > {tmp_path}/pid; {watched(seen('c', process()))}")
    assert main(["top", "-H", "c", "-p", "22", "--json"]) == 0
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_the_table() -> None:
    console = pytest.importorskip("rich.console")
    watch = Watch(
        lambda: [process(operations=[operation()], steps=3, step_age=2.0)],
        lambda _: ["rank 1 is late"],
        lambda _: "runs",
    )
    shown = console.Console(width=200, record=True, file=io.StringIO())
    shown.print(top.table(watch.look(1.0)))
    text = shown.export_text()
    assert re.search(r"rank +process +host +state", text) and "1 of 3 ranks are on this host" in text
    assert "#7 allreduce(SUM, float32[3])" in text and "rank 1 is late" in text
