"""Tests of the messages about the job's members that `fogdist.elastic` sends, and of the ranks that count as silent."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import World
from hosts import run_on_hosts
from test_hangs import backend, fifo, hold_the_gil, let_go
from test_tcp import APART

from fog_pg import _C, _extension

__all__ = ["fifo"]

pytestmark = pytest.mark.usefixtures("no_shared_memory_left")

KIB, MIB = 1 << 10, 1 << 20
RANKS = 3
VICTIM = RANKS - 1
# The ways between ranks of one host.
WAYS = {"shared memory": {"FOG_BETWEEN_HOSTS": "tcp"}, "tcp": APART}
# In one part, at the limit of a part, in several parts, and as long as is allowed.
SIZES = [0, 1, 8 * KIB, 8 * KIB + 1, 300 * KIB, MIB]
# The most messages, and bytes of messages, that wait for a program.
MOST, MOST_BYTES = 4096, 16 * MIB
SECONDS = 20.0  # enough for a busy machine
EPOCH = 7

Message = tuple[int, bytes]


@pytest.fixture
def new_ranks(new_world: Callable[..., World]) -> Callable[..., World]:
    """Makes a world whose ranks reach each other in one of `WAYS`."""

    def make(way: str, ranks: int = RANKS, **environment: str) -> World:
        return new_world(ranks, environment=WAYS[way] | environment)

    return make


def take(number: int) -> list[Message]:
    """Waits for messages."""
    taken: list[Message] = []
    end = time.monotonic() + SECONDS
    while len(taken) < number and time.monotonic() < end:
        if _C.wait_membership(1.0):
            taken += _C.take_membership()
    return taken


def of_size(size: int, rank: int) -> bytes:
    return bytes([65 + rank]) * size


def exchange() -> None:
    """Each rank sends messages of each size to each other rank."""
    me, size = dist.get_rank(), dist.get_world_size()
    others = [rank for rank in range(size) if rank != me]
    for length in SIZES:
        for other in others:
            assert _C.send_membership(other, 0, of_size(length, me))
    taken = take(len(SIZES) * len(others))
    for other in others:
        sent = [of_size(length, other) for length in SIZES]
        assert [text for source, text in taken if source == other] == sent
    assert len(taken) == len(SIZES) * len(others)
    assert not _C.wait_membership(0.0) and _C.take_membership() == []


@pytest.mark.parametrize("way", WAYS)
def test_messages_on_one_host(new_ranks: Callable[..., World], way: str) -> None:
    new_ranks(way).run(exchange)


def test_messages_between_hosts(tmp_path: Path) -> None:
    run_on_hosts(tmp_path, [0, 0, 1], __name__, [("exchange", [])])


def refuse() -> None:
    me, other = dist.get_rank(), 1 - dist.get_rank()
    for arguments, words in [
        ((me, 0, b""), f"rank: got {me}; allowed are the job's ranks other than this one, from 0 to below 2"),
        ((-1, 0, b""), "rank: got -1"),
        ((2, 0, b""), "rank: got 2"),
        ((other, -1, b""), "epoch: got -1; allowed is 0 or more"),
        ((other, 0, bytes(MIB + 1)), "payload: got 1048577 bytes; allowed are at most 1048576"),
    ]:
        with pytest.raises(ValueError, match=words):
            _C.send_membership(*arguments)
    for arguments, words in [((-1, b""), "epoch: got -1"), ((0, bytes(MIB + 1)), "payload: got 1048577")]:
        with pytest.raises(ValueError, match=words):
            _C.answer_membership(*arguments)
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout_s: got (-1|nan); allowed are 0 seconds or more"):
            _C.wait_membership(seconds)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _C.send_membership(other, 0, "text")  # type: ignore[arg-type]
    dist.barrier()
    assert _C.take_membership() == []


def test_bad_arguments_are_refused(new_ranks: Callable[..., World]) -> None:
    new_ranks("shared memory", 2).run(refuse)


def without_a_group() -> None:
    """Only the process of a job has ways to others."""
    assert not _C.send_membership(0, 0, b"")
    assert not _C.wait_membership(0.0) and _C.take_membership() == []


def test_a_process_without_a_job_sends_nothing(new_world: Callable[..., World]) -> None:
    new_world(1, initialize=False).run(without_a_group)


# --- what becomes of groups and ranks ---------------------------------------------------------------------------


def exchange_without_groups() -> None:
    """The default group has failed, and a second one was destroyed; nothing comes after the last one is destroyed."""
    second = dist.new_group()
    dist.barrier()
    dist.destroy_process_group(second)
    store = dist.distributed_c10d._get_default_store()
    store.add("passed the barrier", 1)
    if dist.get_rank() == 0:
        while store.add("passed the barrier", 0) < dist.get_world_size():
            time.sleep(0.002)
        backend().abort()
    with pytest.raises(dist.DistBackendError):
        while True:
            dist.barrier()
    exchange()
    if dist.get_rank() == 0:
        store.wait(["exchanged"])
        assert _C.send_membership(1, 0, b"never taken")
        store.wait(["destroyed"])
        assert _C.send_membership(1, 0, b"comes to no group")
    elif dist.get_rank() == 1:
        store.set("exchanged", "")
        assert _C.wait_membership(SECONDS)
        dist.destroy_process_group()
        assert _C.take_membership() == []
        store.set("destroyed", "")
        assert not _C.wait_membership(0.3)


@pytest.mark.parametrize("way", WAYS)
def test_messages_after_groups_have_ended(new_ranks: Callable[..., World], way: str) -> None:
    new_ranks(way).run(exchange_without_groups)


def survive(pids: list[int], stops: bool) -> None:
    """The victim stops or ends, and is lost; what it had sent is still there."""
    me, living = dist.get_rank(), [rank for rank in range(RANKS) if rank != VICTIM]
    if me == VICTIM:
        for other in living:
            assert _C.send_membership(other, 0, b"last")
        time.sleep(0.2)  # it has left this process
        os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)
    assert _C.wait_membership(SECONDS)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1))
    end = time.monotonic() + SECONDS
    while backend().lost_ranks() != [VICTIM] and time.monotonic() < end:
        time.sleep(0.01)
    assert (backend().lost_ranks(), backend().silent_ranks()) == ([VICTIM], [VICTIM] if stops else [])
    assert not _C.send_membership(VICTIM, 0, b"too late")
    other = 1 - me
    assert _C.send_membership(other, 0, b"goes on")
    assert sorted(take(2)) == sorted([(VICTIM, b"last"), (other, b"goes on")])
    if stops:  # its end is reported now, and this rank may still hear of it
        if me == 0:
            os.kill(pids[VICTIM], signal.SIGKILL)
        while backend().silent_ranks() and time.monotonic() < end:
            time.sleep(0.01)
        assert (backend().lost_ranks(), backend().silent_ranks()) == ([VICTIM], [])


@pytest.mark.parametrize(
    ("way", "stops"), [("shared memory", False), ("tcp", False), ("shared memory", True)]
)
def test_a_lost_rank(new_ranks: Callable[..., World], way: str, stops: bool) -> None:
    """Between hosts the end of a stopped rank stays unknown: its connection is closed when it is lost."""
    world = new_ranks(way, **({"FOG_LOST_AFTER": "1"} if stops else {}))
    outcomes = world.run_raw(survive, [world.pid(rank) for rank in range(RANKS)], stops)
    assert [outcome.state for outcome in outcomes] == ["returned", "returned", "died"], outcomes


def hear_nothing(pids: list[int]) -> tuple[int, int]:
    """Rank 1 is stopped while rank 0 sends; returns how many messages rank 0 could send, and how many came at last."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        taken = take(1)
        end = time.monotonic() + SECONDS
        while taken[-1][1] != b"end" and time.monotonic() < end:
            _C.wait_membership(0.1)
            taken += _C.take_membership()
        return 0, sum(len(text) == MIB for _, text in taken)
    state = Path(f"/proc/{pids[1]}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    sent = 0
    while _C.send_membership(1, 0, bytes(MIB)):
        sent += 1
    os.kill(pids[1], signal.SIGCONT)
    while not _C.send_membership(1, 0, b"end"):
        time.sleep(0.01)
    return sent, 0


@pytest.mark.parametrize("way", WAYS)
def test_little_waits_for_a_rank_that_does_not_read(new_ranks: Callable[..., World], way: str) -> None:
    world = new_ranks(way, 2)
    (sent, _), (_, come) = world.run(hear_nothing, [world.pid(rank) for rank in range(2)])
    assert MOST_BYTES // MIB <= sent <= MOST_BYTES // MIB + 16  # the system's buffers hold the rest
    assert come >= min(sent, MOST_BYTES // MIB - 1)


def overflow(number: int, size: int) -> list[int]:
    """Rank 0 sends more messages than wait for a program; returns the numbers of those that rank 1 takes."""
    if dist.get_rank() == 0:
        for i in range(number):
            while not _C.send_membership(1, 0, i.to_bytes(4, "big") + bytes(size - 4)):
                time.sleep(0.001)  # too many are on their way
    dist.barrier()  # comes after them
    return [int.from_bytes(text[:4], "big") for _, text in _C.take_membership()]


def test_the_oldest_messages_give_way(new_ranks: Callable[..., World]) -> None:
    world = new_ranks("shared memory", 2)
    assert world.run(overflow, MOST + 10, 4)[1] == list(range(10, MOST + 10))
    most = MOST_BYTES // (MIB // 2)
    assert world.run(overflow, most + 3, MIB // 2)[1] == list(range(3, most + 3))


# --- answers ------------------------------------------------------------------------------------------------


def answer(fifo: str) -> None:
    """Rank 1 holds Python's lock in one call, and answers what rank 0 asks meanwhile."""
    dist.barrier()
    if dist.get_rank() == 1:
        _C.answer_membership(EPOCH - 1, b"an earlier one")
        _C.answer_membership(EPOCH, of_size(MIB, 1))
        dist.barrier()
        hold_the_gil(fifo)
        questions = [(0, b"before"), (0, b"in it"), (0, b"after it")]
        dist.barrier()
        assert _C.take_membership() == questions  # and no answer to an answer
        return
    _C.answer_membership(EPOCH, b"goes to nobody, as nobody asks")
    dist.barrier()
    time.sleep(0.2)  # rank 1 is in the call
    for epoch, question, answers in [
        (EPOCH - 1, b"before", 1),
        (EPOCH, b"in it", 1),
        (EPOCH + 1, b"after it", 0),
    ]:
        begin = time.monotonic()
        assert _C.send_membership(1, epoch, question)
        if answers:
            assert take(1) == [(1, of_size(MIB, 1))]
            assert time.monotonic() - begin < 5.0
    let_go(fifo)
    dist.barrier()  # comes after an answer
    assert _C.take_membership() == []


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_answers_while_its_program_computes(
    new_ranks: Callable[..., World], way: str, fifo: str
) -> None:
    new_ranks(way, 2).run(answer, fifo)


def wait_in_a_thread() -> float:
    """Returns how long a message takes to a thread that waits, while both programs sleep."""
    waits: list[float] = []
    if dist.get_rank() == 1:
        thread = threading.Thread(target=lambda: waits.extend([_C.wait_membership(SECONDS), time.time()]))
        thread.start()
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)
        sent = time.time()
        assert _C.send_membership(1, 0, b"")
        return sent
    thread.join()
    assert waits[0] and _C.take_membership() == [(0, b"")]
    return waits[1]


@pytest.mark.alone
@pytest.mark.parametrize("way", WAYS)
def test_a_message_wakes_a_rank_that_sleeps(new_ranks: Callable[..., World], way: str) -> None:
    """Without operations in flight, nothing else would look for messages for 100 ms."""
    world = new_ranks(way, 2)
    delays = []
    for _ in range(5):
        sent, came = world.run(wait_in_a_thread)
        delays.append(came - sent)
    assert sorted(delays)[len(delays) // 2] < 0.02, delays


# --- a process that joins -----------------------------------------------------------------------------------


def entry() -> tuple[str, int]:
    return _C.own_entry(), backend().id


def until_there(file: Path) -> str:
    end = time.monotonic() + SECONDS
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.01)
    return file.read_text()


def write(file: Path, text: str) -> None:
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


def greet(others: list[int], me: int) -> None:
    for other in others:
        assert _C.send_membership(other, 0, of_size(MIB, me))
    assert sorted(take(len(others))) == [(other, of_size(MIB, other)) for other in others]


def join(folder: str, rank: int, size: int, entries: list[str], group: int) -> None:
    """Joins the job of the members with these entries, as `fog_pg._joining` and `fogdist.elastic` do."""
    extension: Any = _extension.load()
    store, timeout = dist.HashStore(), timedelta(seconds=SECONDS)
    extension.prepare_to_join(rank, size, entries, store, timeout)
    options = extension.ProcessGroupFog.Options()
    whole = extension.add_whole(group, rank, [0] * max(size, rank + 1), "it joins", store, options)
    write(Path(folder, "entry"), extension.own_entry())
    members = dict(enumerate(entries))
    assert extension.connect_with(members, False, timeout) == list(members)
    greet(list(members), rank)
    until_there(Path(folder, "end"))
    del whole


def admit(folder: str, rank: int) -> None:
    end = time.monotonic() + SECONDS
    while rank < dist.get_world_size() and backend().lost_ranks() != [rank]:
        assert time.monotonic() < end
        time.sleep(0.01)
    if rank < dist.get_world_size():  # what the process before has said is not of the one that joins
        assert _C.wait_membership(SECONDS)
    entries = {rank: until_there(Path(folder, "entry"))}
    assert _C.connect_with(entries, True, timedelta(seconds=SECONDS)) == [rank]
    greet([rank], dist.get_rank())


def say(rank: int) -> None:
    """The rank that is lost next says something."""
    if dist.get_rank() == rank:
        for other in range(rank):
            assert _C.send_membership(other, 0, b"of the process before")
    dist.barrier()


@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_joins(
    new_ranks: Callable[..., World], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a further rank by shared memory, and in the place of a lost one by TCP."""
    common = {"FOG_MAX_RANKS": "3", "FOG_JOB_SECRET": "0123456789abcdef" * 4}
    world = new_ranks(way, 2 if way == "shared memory" else 3, **common)
    told = world.run(entry)
    if way == "tcp":
        world.run(say, 2)
        world.kill(2)
    size = world.size
    joiner = harness.fork(
        join,
        *(str(tmp_path), 2, size, [text for text, _ in told[:2]], told[0][1]),
        log=tmp_path / "joiner.log",
        environment=WAYS[way] | common,
    )
    try:
        outcomes = world.run_raw(admit, str(tmp_path), 2)
        assert [each.state for each in outcomes[:2]] == ["returned"] * 2, (
            outcomes,
            (tmp_path / "joiner.log").read_text(),
        )
        write(tmp_path / "end", json.dumps(True))
        joiner.join(SECONDS)
        assert joiner.exitcode == 0, (tmp_path / "joiner.log").read_text()
    finally:
        joiner.kill()
        joiner.join()
