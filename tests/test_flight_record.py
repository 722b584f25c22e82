"""Tests of the record of operations in flight, read from outside the process, and of warnings of long waits."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import fogdist
import fogdist.bluefog.torch as bf
import pytest
import torch
import torch.distributed as dist
from fogdist import flight_record
from harness import init_process_group

from fog_pg import _C


def rank_one_comes_late() -> None:
    store = dist.distributed_c10d._get_default_store()
    fogdist.init()
    rank = dist.get_rank()
    dist.barrier()
    if rank == 0:
        store.set("pid", str(os.getpid()))
        bf.allreduce(torch.ones(3), name="late")
        fogdist.shutdown()
        return
    pid = int(store.get("pid"))
    deadline = time.monotonic() + 20
    while True:  # until the wait has been recorded
        seen = flight_record.read(pid)
        if seen.in_flight and seen.in_flight[0].awaited:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (seen.pid, seen.rank, seen.size) == (pid, 0, 2)
    (waiting,) = seen.in_flight
    assert (
        waiting.what == "allreduce(AVG, float32[3])"
        and waiting.awaited == [(1, os.getpid())]
        and waiting.awaited_count == 1
    )
    assert (
        1.0 <= waiting.age < 60
        and waiting.rank == 0
        and waiting.seconds == pytest.approx(waiting.age, abs=1e-6)
    )
    before = seen.operations[-2]
    assert before.what.startswith("barrier") and before.state == "done" and before.seconds < before.age
    assert {pid, os.getpid()} <= {process.pid for process in flight_record.read_all()}
    os.kill(pid, signal.SIGSTOP)  # a stopped process can be read too
    try:
        text = flight_record.report([flight_record.read(pid), flight_record.read(os.getpid())])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (
        f"process {pid}: rank 0 of 2" in text
        and f"waits for rank 1 (process {os.getpid()})" in text
        and "nothing in flight" in text
    )
    assert f"rank 1 (process {os.getpid()}) has not begun #{waiting.number} allreduce" in text, text
    assert ": rank 0 waits for it; the last that it began there is" in text, text
    # If the late rank is left out, the report says that it is not shown.
    assert f"process {os.getpid()} is not shown here: rank 0 waits" in flight_record.report(
        [flight_record.read(pid)]
    )
    bf.allreduce(torch.ones(3), name="late")
    last = flight_record.read(os.getpid()).operations[-1]
    assert last.state == "done" and last.key == waiting.key
    fogdist.shutdown()


def test_a_rank_that_comes_late(new_world):
    new_world(2).run(rank_one_comes_late)


def subgroup_of_another_backend() -> None:
    """Ranks have the numbers of the default group, even if fog has only a subgroup with other numbers."""
    import fog_pg  # noqa: F401

    init_process_group(30.0, "gloo")
    rank = dist.get_rank()
    group = dist.new_group([1, 2], backend="fog")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("pid1", str(os.getpid()))
        dist.all_reduce(torch.ones(3), group=group)
    elif rank == 2:
        pid = int(store.get("pid1"))
        deadline = time.monotonic() + 20
        while not any(operation.awaited for operation in flight_record.read(pid).in_flight):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        seen = flight_record.read(pid)
        assert (seen.rank, seen.size) == (1, 3) and seen.in_flight[0].awaited == [(1, os.getpid())]
        text = flight_record.report([seen, flight_record.read(os.getpid())])
        assert f"rank 2 (process {os.getpid()}) has not begun" in text and ": rank 1 waits for it" in text, (
            text
        )
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


def test_a_subgroup(new_world, tmp_path):
    world = new_world(3, initialize=False, environment={"FOG_TIMELINE": f"{tmp_path}/t"})
    world.run(subgroup_of_another_backend)
    world.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t1.json", "t2.json"]


def many_operations() -> None:
    """The oldest operation in flight keeps its place while hundreds of others come after it."""
    fogdist.init()
    rank = dist.get_rank()
    first = dist.irecv(torch.ones(1), 1, tag=5) if rank == 0 else None
    for _ in range(700):
        bf.allreduce(torch.ones(1))
    seen = flight_record.read(os.getpid())
    assert len(seen.operations) == 256
    if first is not None:
        assert len(seen.in_flight) == 1 and "float32[1]" in seen.in_flight[0].what, seen.in_flight
        assert seen.operations[0].state == "in flight"
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(1), 0, tag=5)
    if first is not None:
        first.wait()
    assert not flight_record.read(os.getpid()).in_flight
    fogdist.shutdown()


def test_many_operations(new_world):
    new_world(2).run(many_operations)


def test_report_says_how_many_operations_are_in_no_record() -> None:
    process = flight_record.Process(pid=7, rank=0, size=2, host="a", operations=[], unrecorded=3)
    assert "not recorded, as too many others were in flight: 3" in flight_record.report([process])
    assert "not recorded" not in flight_record.report([replace(process, unrecorded=0)])


def failed_operation() -> list[object]:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1))
    seen = flight_record.read(os.getpid())
    last = seen.operations[-1]
    return [last.what, last.state, seen.failed, [peer.rank for peer in seen.peers if peer.lost]]


def test_an_operation_that_failed(new_world):
    outcomes = new_world(2).run_raw(failed_operation)
    assert outcomes[0].value == ["allreduce(SUM, float32[1])", "failed", 1, [1]], outcomes[0]


def test_processes_without_a_record():
    with pytest.raises(ValueError, match="has no group of fog"):
        flight_record.read(os.getpid())
    with pytest.raises(ValueError, match="there is no such process"):
        flight_record.read(2**22 + 1)
    with pytest.raises(TypeError, match="pid must be an int"):
        flight_record.read("1")
    assert os.getpid() not in {process.pid for process in flight_record.read_all()}


def forked_child() -> str:
    dist.barrier()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _C.note_step()
        _C.note_epoch(3)
        _C.note_staleness([(0, 1)])
        os.write(write, b"x")
        time.sleep(5)
        os._exit(0)
    os.read(read, 1)
    try:
        with pytest.raises(ValueError, match="is a fork of process"):
            flight_record.read(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
    mine = flight_record.read(os.getpid())
    assert (mine.steps, mine.epoch) == (0, -1) and not any(peer.staleness >= 0 for peer in mine.peers)


def test_a_fork(new_world):
    """Its record is its parent's, and it must not write to that."""
    new_world(2).run(forked_child)


# --- long waits -----------------------------------------------------------------------------------------------


def wait_long() -> str:
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(2.5)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    # Regression: the time since the begin, computed from the deadline and a timeout of 615 years, overflowed.
    timeout = timedelta(days=225_000)
    backend.allreduce_named(torch.ones(1), dist.ReduceOp.SUM, timeout=timeout).wait()
    dist.barrier()
    return Path(os.readlink("/proc/self/fd/2")).read_text()


@pytest.mark.parametrize(("seconds", "warns"), [("1", True), ("0", False)])
def test_a_long_wait_is_warned_of(new_world, seconds, warns):
    texts = new_world(2, environment={"FOG_WARN_AFTER": seconds}).run(wait_long)
    expected = "has waited 1 s; not there: rank 1"
    assert texts[0].count(expected) == int(warns), texts[0]
    assert "has waited" not in texts[1]


def wrong_seconds() -> None:
    with pytest.raises(ValueError, match="FOG_WARN_AFTER: got '-1'; allowed are whole seconds from 0"):
        fogdist.init()


def test_a_wrong_number_of_seconds(new_world):
    new_world(2, initialize=False, environment={"FOG_WARN_AFTER": "-1"}).run(wrong_seconds)
