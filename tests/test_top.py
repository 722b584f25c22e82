"""Tests of `fog top`: the numbers that ranks publish, what changes between two samples, and the table."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fogdist
import fogdist.bluefog.torch as bf
import pytest
import torch
import torch.distributed as dist
from fog_cli import main
from fog_cli.commands import top
from fog_cli.commands.top import Watch, cells, duration, row_of
from fogdist import flight_record
from fogdist.observe.flight_record import Operation, Peer, Process

from fog_pg import _extension


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


# --- what changes between two samples ---------------------------------------------------------------------------


def test_rates_and_waits_are_those_since_the_last_sample() -> None:
    before = process(steps=10, peers=[Peer(1, 2.0, -1, False), Peer(2, 4.0, 3, False)])
    now = process(
        steps=16,
        step_age=0.5,
        failed=2,
        epoch=4,
        peers=[Peer(1, 3.0, -1, False), Peer(2, 4.0, 6, True), Peer(3, 0.0, 5, False)],
        operations=[operation()],
    )
    row = row_of(now, before, 4.0)
    assert (row.rate, row.waits) == (1.5, {1: 0.25})
    expected = {"steps": "16", "steps/s": "1.5", "last step": "500 ms", "failed": "2", "membership": "4"}
    expected |= {"stale": "3: 5", "waits most for": "1: 25%", "lost": "2", "age": "2.0 s"}
    assert expected.items() <= cells(row).items()
    first = row_of(process(), None, 4.0)
    assert first.rate is None and first.waits == {} and cells(first)["membership"] == ""


def test_the_oldest_operation_in_flight_is_shown() -> None:
    waiting = operation(
        number=8, state="in flight", age=12.0, seconds=12.0, awaited=[(2, 72)], awaited_count=1
    )
    row = row_of(
        process(operations=[operation(), waiting, operation(number=9, state="in flight")]), None, 1.0
    )
    assert row.waits == {2: 1.0}
    shown = cells(row)
    assert shown["operation"] == "#8 allreduce(SUM, float32[3]) … waits for 2" and shown["age"] == "12.0 s"


def test_a_process_that_ended_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [process(job=9), process(pid=72, rank=1, job=9), process(pid=73, size=5, job=8, started=86400.0)]
    monkeypatch.setattr(time, "monotonic", iter([1.0, 2.0]).__next__)
    monkeypatch.setattr(flight_record, "blamed", lambda processes: [f"late: {len(processes)}"])
    watch = Watch(lambda: found)
    jobs = watch.sample()
    assert [len(rows) for rows in jobs] == [2, 1] and re.findall("late: .", top.table(jobs)) == [
        "late: 2",
        "late: 1",
    ]
    found = [process(steps=2, job=9)]
    first, second = watch.sample()
    assert [row.process.state for row in first] == ["runs", "ended"] and first[0].rate == 2.0
    when = time.strftime("%F %T", time.localtime(0))
    assert top.table([first]).startswith(f"a.py, started {when}: 1 of 3 ranks are on this host\n")
    assert ": 0 of 5 ranks are on this host\n" in top.table([second])
    grown = [row_of(process(rank=rank, size=1), None, 1.0) for rank in range(2)]
    assert ": 2 of 2 ranks are on this host\n" in top.table([grown])


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
    assert top.largest({1: 0.1, 2: 0.5, 3: 0.5, 4: 0.0, 5: 0.2}) == [(2, 0.5), (3, 0.5), (5, 0.2)]


# --- real ranks -----------------------------------------------------------------------------------------------


def numbers_of_training() -> list[object]:
    """Rank 0 comes late in each round; the others wait for it."""
    fogdist.init()
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 1)
    optimizer = bf.DistributedAdaptWithCombineOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(5):
        if rank == 0:
            time.sleep(0.2)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        dist.barrier()
    _extension.load().note_epoch(3)
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


def a_sample_of_a_stopped_rank() -> str | None:
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
        watch = Watch(flight_record.read_all)
        watch.sample()
        rows = [row for job in watch.sample() for row in job if row.process.pid == pid]
        after = switches(pid)
    finally:
        os.kill(pid, signal.SIGCONT)
    dist.barrier()
    assert before == after and len(before) > 2
    (row,) = rows
    return str(row.process.state)


def test_a_sample_wakes_nobody(new_world):
    assert new_world(2).run(a_sample_of_a_stopped_rank) == [None, "stopped"]


def commands(folder: str) -> None:
    """Rank 1 shows rank 0 by the command."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 0:
        store.set("pid", str(os.getpid()))
        dist.barrier()
        return
    pid = store.get("pid").decode()
    lines = Path(folder, "out")
    descriptor, before = os.open(lines, os.O_WRONLY | os.O_CREAT), os.dup(1)
    os.dup2(descriptor, 1)
    try:
        assert main(["top", "--interval", "0.1", pid]) == 0
        sys.stdout.flush()
    finally:
        os.dup2(before, 1)
    title, _, row = lines.read_text().splitlines()
    assert main(["dump", pid]) == 0
    assert title.endswith("1 of 2 ranks are on this host") and row.split()[:2] + row.split()[3:4] == [
        "0",
        pid,
        "runs",
    ]
    dist.barrier()


def test_the_command_shows_a_rank(new_world, tmp_path):
    new_world(2).run(commands, str(tmp_path))


# --- the command line -----------------------------------------------------------------------------------------


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Live until Ctrl-C in a terminal, and once elsewhere."""
    found = [process(operations=[operation()], steps=3, step_age=2.0, job=9), process(pid=73, job=8)]
    watch = Watch(lambda: found)
    monkeypatch.setattr(flight_record, "blamed", lambda _: ["rank 1 is late"])
    monkeypatch.setattr(top, "_watch", lambda _: watch)
    assert main(["top", "--interval", "0.1"]) == 0
    once = capsys.readouterr().out
    first, second = once.split("\n\n")
    assert re.search(r"1 of 3 ranks are on this host\nrank +process +host +state", first) and " 71 " in first
    assert (
        "#7 allreduce(SUM, float32[3])" in first and first.endswith("\nrank 1 is late") and " 73 " in second
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(time, "sleep", Mock(side_effect=[None, KeyboardInterrupt]))
    assert main(["top"]) == 0
    assert capsys.readouterr().out == 2 * (top._CLEAR + once)
