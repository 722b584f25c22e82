"""Bad arguments and ranks that disagree raise an exception, and never hang; far deadlines do not expire.

test_faults has the tests with ranks that are killed, stopped or absent.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import RUN_TIMEOUT, World, WorldPool, error_of, on_ranks, sizes
from operations import prepare
from reference import Checks
from torch import Tensor
from torch._C import _distributed_c10d as distributed_c10d

from fog_pg import _C

# The harness ends its world before, so an error that arrives only at the timeout fails the test.
LONG_TIMEOUT = 4 * RUN_TIMEOUT


# Only one rank passes bad arguments. Nothing is sent, so a good operation of all ranks works right afterwards.


# Calls on rank 0 of 3, each with the words that its message must contain. `x` has 12 elements, 4 for each rank, which
# `parts` cuts up; `matrix` has shape (4, 6).
BAD = r"""
dist.broadcast(ones(2), group_src=7) | root 7 3
dist.broadcast(ones(2), group_src=-1) | root -1
dist.reduce(ones(2), group_dst=7) | root 7 3
dist.gather(ones(2), None, group_dst=7) | root 7 3
dist.scatter(ones(2), None, group_src=7) | root 7 3
dist.gather(ones(2), None, dst=0) |
dist.scatter(ones(2), None, src=0) |
dist.all_to_all_single(ones(7), ones(7)) | 7 3
dist.all_to_all_single(ones(9), ones(6)) | 9|3 6|2
dist.all_to_all_single(ones(6), ones(6), [2, 2, 2], [2, 2, 1]) | 5|2,.2,.1 6
dist.all_to_all_single(ones(6), ones(6), [3, 3], [2, 2, 2]) | 2 3
dist.all_to_all_single(ones(6), ones(6), [2, 2, 2], [-2, 4, 4]) | -2
dist.all_to_all_single(ones(6), ones(6, dtype=torch.int32)) | (?i)int
dist.all_to_all_single(ones(()), ones(())) |
dist.all_reduce(1.0) | tensor
dist.all_reduce(torch.eye(3).to_sparse(), op.MAX) | (?i)sparse SUM
dist.all_reduce_coalesced([ones(2), ones(2, dtype=torch.int32)]) |
dist.reduce(ones(2, dtype=torch.complex64), 0, op.MAX) | (?i)max (?i)complex
dist.isend(ones(2), 0) | 0
dist.irecv(ones(2), 0) | 0
dist.isend(ones(2), group_dst=7) | 7 3
dist.irecv(ones(2), group_src=7) | 7 3
dist.isend(ones(2), 1, tag=-3) | tag -3
dist.irecv(ones(2), 1, tag=-3) | tag -3
dist.all_reduce(bools, op.AVG) | (?i)avg (?i)bool
dist.reduce(bools, 0, op.AVG) | (?i)avg (?i)bool
dist.reduce_scatter_tensor(bools[:1], bools, op.AVG) | (?i)avg (?i)bool
dist.all_to_all_single(x, x) | shares.memory.with
dist.all_to_all_single(x[:-3], x[3:]) | shares.memory.with
dist.all_to_all_single(matrix.t()[:3], matrix.t()[2:-1]) | shares.memory.with
dist.all_to_all(parts, parts) | outputs\[1\].*inputs\[1\]
dist.all_to_all([parts[0], parts[1], parts[1]], [ones(4)] * 3) | outputs\[2\].*outputs\[1\]
dist.all_to_all([ones(4), ones(4), parts[2]], parts) | outputs\[2\].*inputs\[2\]
dist.all_gather([x] * 3, ones(12)) | shares.memory.with
dist.all_gather([x[:4], x[4:8], x[7:11]], ones(4)) | outputs\[2\].*outputs\[1\]
dist.all_gather([matrix[:, :2], matrix[:, 1:3], matrix[:, 4:]], ones(4, 2)) | outputs\[1\].*outputs\[0\]
dist.all_gather(parts, parts[1]) | outputs\[1\].*inputs
dist.all_gather(parts, x[1:5]) | shares.memory.with
dist.all_gather_into_tensor(x, parts[1]) | output.*input
dist.all_gather_into_tensor(x, x[1:5]) | output.*input
together(dist.all_gather_into_tensor, (x, ones(4)), (ones(12), parts[0])) | output\[0\].*input\[1\]
dist.all_gather_coalesced([parts, parts, parts], [ones(4)] * 3) | outputs\[\d\].*outputs\[\d\]
dist.reduce_scatter(parts[1], parts) | outputs.*inputs
dist.reduce_scatter(x[1:5], parts) | outputs.*inputs
dist.reduce_scatter(parts[0], [parts[0]] * 3) | outputs.*inputs\[[12]\]
dist.reduce_scatter_tensor(parts[1], x) | output.*input
dist.reduce_scatter_tensor(x[1:5], x) | output.*input
together(dist.reduce_scatter_tensor, (parts[0], x), (x[4:8], ones(12))) | output\[1\].*input\[0\]
dist.gather(ones(4), [parts[0], parts[1], parts[1]], dst=0) | outputs\[2\].*outputs\[1\]
dist.gather(parts[1], parts, dst=0) | outputs\[1\].*inputs
dist.scatter(parts[1], parts, src=0) | outputs.*inputs\[1\]
dist.all_reduce_coalesced([x, x]) | shares.memory.with
backend.allreduce_coalesced([x[:5], x[4:]]) | tensors\[1\].*tensors\[0\]
backend.allreduce([x, x]) | 2.tensors one
backend.broadcast([parts[0], parts[1]]) | 2.tensors one
backend.allgather([parts, parts], [ones(4), ones(4)]) | 2.tensors one
backend.allreduce([torch.eye(3).to_sparse()] * 2) | 2.tensors one
backend.allreduce_named(ones(2, dtype=torch.complex64), op.PRODUCT) | (?i)product (?i)complex
dist.all_reduce(x[:8].unfold(0, 4, 2)) | share.memory
dist.broadcast(ones(1).expand(4), 0) | share.memory
dist.irecv(x.as_strided((2, 3), (4, 2)), 1) | share.memory
"""
# Of lists of tensors `t`, one for each of the 3 ranks, and of the tensors that stand for such lists.
OF_LISTS = """
dist.gather(ones(2), t, dst=0)
dist.scatter(ones(2), t, src=0)
dist.all_gather(t, ones(2))
dist.reduce_scatter(ones(2), t)
dist.all_to_all(t, [ones(2)] * 3)
dist.all_to_all([ones(2) for _ in range(3)], t)
dist.all_gather_into_tensor(torch.cat(t), ones(2))
dist.reduce_scatter_tensor(ones(2), torch.cat(t))
"""


def _together(operation: Callable[..., object], *calls: tuple[Tensor, Tensor]) -> None:
    with dist._coalescing_manager():
        for output, given in calls:
            operation(output, given)


def _bad_calls() -> Iterator[tuple[str, dict[str, object], list[str]]]:
    """Yields expressions, each with its names and the words that its message must contain."""
    ones, x = torch.ones, torch.ones(12)
    names = {"dist": dist, "torch": torch, "op": dist.ReduceOp, "ones": ones, "together": _together, "x": x}
    names |= {"parts": list(x.chunk(3)), "matrix": ones(4, 6), "bools": ones(3, dtype=torch.bool)}
    names["backend"] = dist.group.WORLD._get_backend(torch.device("cpu"))
    for line in BAD.strip().splitlines():
        call, _, shown = line.partition(" | ")
        yield call.removesuffix(" |"), names, shown.split()
    int32 = ones(2, dtype=torch.int32)
    for call in OF_LISTS.strip().splitlines():
        whole = "cat(t)" in call
        yield call, names | {"t": [ones(2) for _ in range(4)]}, ["8|4", "6|2|3"] if whole else ["4", "3"]
        yield call, names | {"t": [ones(2)]}, ["2|1", "6|2|3"]
        yield call, names | {"t": [int32] * 3 if whole else [ones(2), int32, ones(2)]}, ["(?i)int"]
        if "all_to_all" not in call:
            yield call, names | {"t": [ones(5), ones(2), ones(2)]}, ["9|5", "6|2"]
    for dtype in ("float16", "float32", "float64"):
        for name in ("BAND", "BOR", "BXOR"):
            yield f"dist.all_reduce(ones(2, dtype=torch.{dtype}), op.{name})", names, [f"(?i){name}", dtype]


@on_ranks(3)
def test_bad_arguments() -> None:
    with Checks() as checks:
        for call, names, shown in _bad_calls():
            if dist.get_rank() == 0:
                try:
                    eval(call, names)
                    checks.true(f"{call}: no error", False)
                except (ValueError, TypeError) as error:
                    missing = [pattern for pattern in shown if not re.search(pattern, str(error))]
                    checks.true(f"{call}: {missing} not in {error!r}", not missing)
                except BaseException as error:
                    checks.true(f"{call}: {error!r} instead of a ValueError or TypeError", False)
            good = prepare("all_reduce", torch.float32, (5,))
            good.start(False)
            good.verify(checks, f"all_reduce after {call}")


# --- ranks that disagree ------------------------------------------------------------------------------------

# Each case has its own group, so a failure does not disturb the next case.


def _exchange(numel: int, first: int, group: dist.ProcessGroup) -> None:
    """Exchanges data that waits, between hosts, for the other side's header; either rank begins."""
    rank = dist.get_rank(group)
    if rank != first:
        time.sleep(0.05)
    plan = _C.NeighborPlan(rank, 2, 0.5, [(1 - rank, 0.5)], [(1 - rank, 1.0)])
    group._get_backend(torch.device("cpu")).neighbor_allreduce(torch.zeros(numel), plan).wait()


def _message(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 0:
        dist.send(torch.zeros(numel, dtype=dtype), group_dst=1, group=group)
    else:
        dist.recv(torch.zeros(10), group_src=0, group=group)


# The call in group `g` by a rank with the argument `r`, 0 or 1; the words in the message of every rank;
# those of all_to_all_single are bytes.
_DISAGREEMENTS = r"""
dist.all_reduce(zeros(1000 + r), group=g) | 1000 1001
dist.all_reduce(zeros(100_000 + r), group=g) | 100000 100001
dist.all_reduce(zeros(3 + 99_999 * r), group=g) | 3 100002
dist.all_reduce(zeros(5 * r), group=g) | 5
dist.all_reduce(zeros([(4, 6), (6, 4)][r]), group=g) | 4\D{1,3}6 6\D{1,3}4
dist.all_reduce(zeros(8, dtype=types[r]), group=g) | (?i)float (?i)int
dist.all_reduce(zeros(8), sum_max[r], group=g) | (?i)sum (?i)max
dist.broadcast(zeros(10 + r), group=g, group_src=0) | 10 11
dist.broadcast(zeros(100_000 + r), group=g, group_src=0) | 100000 100001
dist.broadcast(zeros(8, dtype=types[r]), group=g, group_src=0) | (?i)float (?i)int
dist.broadcast(zeros(8), group=g, group_src=r) | (?i)root
dist.reduce(zeros(10 + r), group=g, group_dst=0) | 10 11
dist.reduce(zeros(8), op=sum_max[r], group=g, group_dst=0) | (?i)sum (?i)max
dist.reduce(zeros(8), group=g, group_dst=r) | (?i)root
dist.all_gather([zeros(10 + r) for _ in range(g.size())], zeros(10 + r), group=g) | 10 11
dist.all_gather_into_tensor(zeros(20 + 2 * r), zeros(10 + r), group=g) | 10|20 11|22
dist.gather(zeros(10 + r), None if r else [zeros(10), zeros(10)], group=g, group_dst=0) | 10 11
dist.gather(zeros(8), [zeros(8), zeros(8)], group=g, group_dst=r) | (?i)root
dist.scatter(zeros(10 + r), None if r else [zeros(10), zeros(10)], group=g, group_src=0) | 10 11
dist.reduce_scatter_tensor(zeros(10 + r), zeros(20 + 2 * r), group=g) | 10|20 11|22
dist.all_to_all([zeros(10 + r), zeros(10 + r)], [zeros(10 + r)] * 2, group=g) | 10 11
dist.all_to_all_single(zeros(10), zeros(10), [5, 5], [[5, 5], [4, 6]][r], group=g) | 20 16|24
dist.all_reduce_coalesced([zeros(6) for _ in range(2 + r)], group=g) | 2|12 3|18
dist.all_reduce(zeros(8), group=g) if r else dist.broadcast(zeros(8), group=g, group_src=0) | (?i)all_?reduce (?i)broadcast
dist.all_reduce(zeros(8), group=g) if r else dist.barrier(g) | (?i)all_?reduce (?i)barrier
exchange(600_000 + r, 0, g) | neighbor_allreduce ranks.disagree
exchange(600_000 + r, 1, g) | neighbor_allreduce ranks.disagree
"""
# Only the receiver of a message, 10 numbers, needs to know: it is longer, shorter, much longer, or of another type.
_MESSAGES = r"""
message(12, torch.float32, g) | 10
message(8, torch.float32, g) | 10
message(200_000, torch.float32, g) | 10
message(10, torch.int32, g) | (?i)float (?i)int
"""
DISAGREEMENTS, MESSAGES = (
    {call: words.split() for call, words in (line.split(" | ") for line in table.strip().splitlines())}
    for table in (_DISAGREEMENTS, _MESSAGES)
)
# All of more ranks depend on one that disagrees.
OF_ALL = [list(DISAGREEMENTS)[place] for place in (0, 1, 6, 14)]


def _state(group: dist.ProcessGroup) -> distributed_c10d.ErrorType:
    backend = group._get_backend(torch.device("cpu"))
    wrapper = distributed_c10d._ProcessGroupWrapper(backend, backend)  # torch 2.13 asks only in this class
    return wrapper.get_error()


def disagree(calls: list[str]) -> None:
    """The last rank passes other arguments than all others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = {"dist": dist, "torch": torch, "zeros": torch.zeros, "exchange": _exchange, "message": _message}
    names |= {"types": [torch.float32, torch.int32], "sum_max": [dist.ReduceOp.SUM, dist.ReduceOp.MAX]}
    with Checks() as checks:
        for name in calls:
            shown = (DISAGREEMENTS | MESSAGES)[name]
            group = dist.new_group(timeout=timedelta(seconds=LONG_TIMEOUT))
            checks.equal(
                f"{name}: the group's state before", _state(group), distributed_c10d.ErrorType.SUCCESS
            )
            error = ""
            try:
                eval(name, names | {"r": int(rank == size - 1), "g": group})
            except dist.DistBackendError as raised:
                error = str(raised)
            except BaseException as raised:
                checks.true(f"{name}: {raised!r} instead of a DistBackendError on rank {rank}", False)
            if error:  # otherwise this rank may not know of the failure yet
                checks.true(f"{name}: the group's state", _state(group) != distributed_c10d.ErrorType.SUCCESS)
            named = [rf"(?i)rank\W*{size - 1}\b"] if size > 2 and rank < size - 1 else []
            if name in DISAGREEMENTS or rank == 1:
                for pattern in [*shown, *named]:
                    checks.true(f"{name}: {pattern!r} is not in {error!r}", bool(re.search(pattern, error)))
            good = prepare("all_reduce", torch.float32, (5,))
            good.start(False)
            good.verify(checks, f"all_reduce of the world after {name}")


WAYS = {
    "memory": {},
    "tcp": {"_FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "tcp"},
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_disagree(new_world: Callable[..., World], way: str) -> None:
    world = new_world(2, timeout=LONG_TIMEOUT, environment=WAYS[way])
    world.run(disagree, [*DISAGREEMENTS, *MESSAGES])


@pytest.mark.parametrize("size", sizes([3], [5]))
def test_one_rank_disagrees_with_the_others(worlds: WorldPool, size: int) -> None:
    worlds(size).run(disagree, OF_ALL)


def broadcast_of_another_shape() -> list[str]:
    """Returns the errors of the broadcast and of the operation after it on this rank."""

    def broadcast(size: int) -> None:
        dist.broadcast(torch.zeros(size), 0)
        dist.barrier()

    return [error_of(lambda: broadcast(3 + dist.get_rank())), error_of(lambda: broadcast(2))]


@pytest.mark.parametrize("confirm", ["0", "1"])
def test_a_root_that_does_not_wait_fails_in_its_next_operation(
    new_world: Callable[..., World], confirm: str
) -> None:
    world = new_world(2, timeout=LONG_TIMEOUT, environment={"_FOG_CONFIRM": confirm})
    for said in world.run(broadcast_of_another_shape):
        # either the broadcast fails, or the barrier after it; all later operations fail too
        for text in said:
            assert "float32[3]" in text and "float32[4]" in text, said


# --- deadlines ----------------------------------------------------------------------------------------------


def far_deadlines(timeout: timedelta) -> None:
    """All functions with a timeout accept one that overflows when it is added to a clock of nanoseconds."""
    import fogdist

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import fog_pg  # noqa: F401

    dist.init_process_group("fog", store=store, rank=rank, world_size=size, timeout=timeout)
    fogdist.init()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    for numel in (10, 200_000):
        dist.all_reduce(torch.zeros(numel))
    # The other rank comes late, so a deadline that wrongly expires at once would show.
    if rank == 1:
        time.sleep(0.1)
    work = dist.barrier(async_op=True)
    assert work is not None and work.wait(timeout)
    dist.monitored_barrier(timeout=timeout)
    backend.allreduce_named(torch.zeros(3), dist.ReduceOp.SUM, timeout=timeout).wait()
    window = fogdist.Window(torch.zeros(4), timeout=timeout)
    other = 1 - rank
    window.put(torch.ones(4), timeout=timeout)
    with window.lock(timeout=timeout):
        window.get(timeout=timeout)
    window.update(timeout=timeout)
    dist.barrier()
    if rank == 1:
        time.sleep(0.1)
    window.free(timeout=timeout)
    raw = backend.create_window(torch.zeros(4), "raw", [other], [other], timeout=timeout)
    if rank == 0:
        raw.signal(other, timeout=timeout).wait()
    else:
        raw.wait_signal(other, timeout=timeout).wait()
    raw.write(torch.ones(2), other, 0, timeout=timeout).wait()
    raw.free(timeout)


@pytest.mark.parametrize(
    "timeout", [timedelta.max, timedelta(days=300 * 365)], ids=["the largest", "300 years"]
)
def test_far_deadlines_do_not_expire(new_world: Callable[..., World], timeout: timedelta) -> None:
    new_world(2, initialize=False).run(far_deadlines, timeout)
