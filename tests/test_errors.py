"""Bad arguments, disagreements and absent peers raise an exception, and never hang.

test_faults has the tests with killed and stopped ranks.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, WorldPool, exception_of, sizes
from operations import prepare
from reference import Checks
from torch import Tensor

pytestmark = pytest.mark.skipif(BACKEND != "fog", reason="other backends hang or crash here")

# Much longer than any of these tests may take, so an error that arrives only at the timeout fails the test.
LONG_TIMEOUT = 60.0
SOON = 5.0
SHORT_TIMEOUT = 2.0


# Only one rank passes bad arguments. Nothing is sent, so a good operation of all ranks works right afterwards.


def _bad_calls() -> dict[str, tuple[Callable[[], object], list[str]]]:
    """Returns calls that are wrong on rank 0 of 3, each with the words that its message must contain."""
    size = dist.get_world_size()
    ones = torch.ones
    calls: dict[str, tuple[Callable[[], object], list[str]]] = {
        "broadcast root": (lambda: dist.broadcast(ones(2), group_src=7), ["root", "7", "3"]),
        "broadcast negative root": (lambda: dist.broadcast(ones(2), group_src=-1), ["root", "-1"]),
        "reduce root": (lambda: dist.reduce(ones(2), group_dst=7), ["root", "7", "3"]),
        "gather root": (lambda: dist.gather(ones(2), None, group_dst=7), ["root", "7", "3"]),
        "scatter root": (lambda: dist.scatter(ones(2), None, group_src=7), ["root", "7", "3"]),
        "gather without list": (lambda: dist.gather(ones(2), None, dst=0), []),
        "gather list too long": (lambda: dist.gather(ones(2), [ones(2)] * 4, dst=0), ["4", "3"]),
        "gather shape": (lambda: dist.gather(ones(2), [ones(2), ones(5), ones(2)], dst=0), ["2", "5"]),
        "scatter without list": (lambda: dist.scatter(ones(2), None, src=0), []),
        "scatter list too long": (lambda: dist.scatter(ones(2), [ones(2)] * 4, src=0), ["4", "3"]),
        "scatter shape": (lambda: dist.scatter(ones(2), [ones(2), ones(5), ones(2)], src=0), ["2", "5"]),
        "all_gather list too long": (lambda: dist.all_gather([ones(2)] * 4, ones(2)), ["4", "3"]),
        "all_gather list too short": (lambda: dist.all_gather([ones(2)], ones(2)), ["1", "3"]),
        "all_gather shape": (lambda: dist.all_gather([ones(2), ones(5), ones(2)], ones(2)), ["2", "5"]),
        "all_gather dtype": (lambda: dist.all_gather([ones(2, dtype=torch.float64)] * 3, ones(2)), ["float"]),
        "all_gather_into_tensor size": (lambda: dist.all_gather_into_tensor(ones(7), ones(2)), ["7", "6|2"]),
        "all_gather_into_tensor dtype": (
            lambda: dist.all_gather_into_tensor(ones(6, dtype=torch.int32), ones(2)),
            ["(?i)int"],
        ),
        "reduce_scatter list too long": (lambda: dist.reduce_scatter(ones(2), [ones(2)] * 4), ["4", "3"]),
        "reduce_scatter shape": (
            lambda: dist.reduce_scatter(ones(2), [ones(5), ones(2), ones(2)]),
            ["2", "5"],
        ),
        "reduce_scatter dtype": (
            lambda: dist.reduce_scatter(ones(2), [ones(2), ones(2, dtype=torch.int32), ones(2)]),
            ["(?i)int"],
        ),
        "reduce_scatter_tensor size": (lambda: dist.reduce_scatter_tensor(ones(2), ones(7)), ["7", "6|2"]),
        "reduce_scatter_tensor dtype": (
            lambda: dist.reduce_scatter_tensor(ones(2), ones(6, dtype=torch.int32)),
            ["(?i)int"],
        ),
        "all_to_all list too long": (lambda: dist.all_to_all([ones(2)] * 4, [ones(2)] * 3), ["4", "3"]),
        "all_to_all list too short": (lambda: dist.all_to_all([ones(2)] * 3, [ones(2)] * 2), ["2", "3"]),
        "all_to_all dtype": (
            lambda: dist.all_to_all([ones(2)] * 3, [ones(2, dtype=torch.int32)] * 3),
            ["(?i)int"],
        ),
        "all_to_all_single rows": (lambda: dist.all_to_all_single(ones(7), ones(7)), ["7", "3"]),
        "all_to_all_single output": (lambda: dist.all_to_all_single(ones(9), ones(6)), ["9|3", "6|2"]),
        "all_to_all_single splits": (
            lambda: dist.all_to_all_single(ones(6), ones(6), [2, 2, 2], [2, 2, 1]),
            ["5|2, 2, 1", "6"],
        ),
        "all_to_all_single number of splits": (
            lambda: dist.all_to_all_single(ones(6), ones(6), [3, 3], [2, 2, 2]),
            ["2", "3"],
        ),
        "all_to_all_single negative split": (
            lambda: dist.all_to_all_single(ones(6), ones(6), [2, 2, 2], [-2, 4, 4]),
            ["-2"],
        ),
        "all_to_all_single dtype": (
            lambda: dist.all_to_all_single(ones(6), ones(6, dtype=torch.int32)),
            ["(?i)int"],
        ),
        "all_to_all_single zero-dimensional": (lambda: dist.all_to_all_single(ones(()), ones(())), []),
        "all_reduce of a number": (lambda: dist.all_reduce(1.0), ["tensor"]),
        "sparse maximum": (
            lambda: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX),
            ["(?i)sparse", "SUM"],
        ),
        "coalesced dtypes": (lambda: dist.all_reduce_coalesced([ones(2), ones(2, dtype=torch.int32)]), []),
        "complex maximum": (
            lambda: dist.reduce(ones(2, dtype=torch.complex64), 0, dist.ReduceOp.MAX),
            ["(?i)max", "(?i)complex"],
        ),
        "send to itself": (lambda: dist.isend(ones(2), 0), ["0"]),
        "recv from itself": (lambda: dist.irecv(ones(2), 0), ["0"]),
        "send rank": (lambda: dist.isend(ones(2), group_dst=7), ["7", "3"]),
        "recv rank": (lambda: dist.irecv(ones(2), group_src=7), ["7", "3"]),
        "send tag": (lambda: dist.isend(ones(2), 1, tag=-3), ["tag", "-3"]),
        "recv tag": (lambda: dist.irecv(ones(2), 1, tag=-3), ["tag", "-3"]),
    }
    calls |= _shared_memory(size)
    for name, call in {
        "all_reduce": lambda t: dist.all_reduce(t, dist.ReduceOp.AVG),
        "reduce": lambda t: dist.reduce(t, 0, dist.ReduceOp.AVG),
        "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t[:1], t, dist.ReduceOp.AVG),
    }.items():
        calls[f"{name} AVG of bools"] = (
            lambda c=call: c(ones(size, dtype=torch.bool)),
            ["(?i)avg", "(?i)bool"],
        )
    for dtype in (torch.float16, torch.float32, torch.float64):
        for op in ("BAND", "BOR", "BXOR"):
            tensor = ones(2, dtype=dtype)
            calls[f"all_reduce {op} {dtype}"] = (
                lambda o=op, t=tensor: dist.all_reduce(t, getattr(dist.ReduceOp, o)),
                [f"(?i){op}", _type_pattern(dtype)],
            )
    return calls


def _shared_memory(size: int) -> dict[str, tuple[Callable[[], object], list[str]]]:
    """Returns calls whose outputs overlap memory that is still to be read or written."""
    ones, x = torch.ones, torch.ones(4 * size)
    parts = list(x.chunk(size))  # the first one is for rank 0
    matrix = ones(4, 2 * size)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    several, shares = ["shares memory with"], ["share memory"]

    def together(operation: Callable[..., object], calls: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with dist._coalescing_manager():
            for output, input in calls:
                operation(output, input)

    return {
        "all_to_all_single in place": (lambda: dist.all_to_all_single(x, x), several),
        "all_to_all_single shifted": (lambda: dist.all_to_all_single(x[:-size], x[size:]), several),
        "all_to_all_single columns": (
            lambda: dist.all_to_all_single(matrix.t()[:size], matrix.t()[size - 1 : -1]),
            several,
        ),
        "all_to_all in place": (lambda: dist.all_to_all(parts, parts), [r"outputs\[1\].*inputs\[1\]"]),
        "all_to_all one output twice": (
            lambda: dist.all_to_all([parts[0], parts[1], parts[1]], [ones(4)] * 3),
            [r"outputs\[2\].*outputs\[1\]"],
        ),
        "all_to_all output in input": (
            lambda: dist.all_to_all([ones(4), ones(4), parts[2]], parts),
            [r"outputs\[2\].*inputs\[2\]"],
        ),
        "all_gather one output thrice": (lambda: dist.all_gather([x] * size, ones(x.numel())), several),
        "all_gather outputs that overlap": (
            lambda: dist.all_gather([x[:4], x[4:8], x[7:11]], ones(4)),
            [r"outputs\[2\].*outputs\[1\]"],
        ),
        "all_gather columns that overlap": (
            lambda: dist.all_gather([matrix[:, :2], matrix[:, 1:3], matrix[:, 4:]], ones(4, 2)),
            [r"outputs\[1\].*outputs\[0\]"],
        ),
        "all_gather input in another's place": (
            lambda: dist.all_gather(parts, parts[1]),
            [r"outputs\[1\].*inputs"],
        ),
        "all_gather input shifted": (lambda: dist.all_gather(parts, x[1:5]), several),
        "all_gather_into_tensor another's place": (
            lambda: dist.all_gather_into_tensor(x, parts[1]),
            ["output.*input"],
        ),
        "all_gather_into_tensor shifted": (lambda: dist.all_gather_into_tensor(x, x[1:5]), ["output.*input"]),
        "all_gather coalesced": (
            lambda: together(dist.all_gather_into_tensor, [(x, ones(4)), (ones(4 * size), parts[0])]),
            [r"output\[0\].*input\[1\]"],
        ),
        "all_gather_coalesced": (
            lambda: dist.all_gather_coalesced([parts, parts, parts], [ones(4)] * size),
            [r"outputs\[\d\].*outputs\[\d\]"],
        ),
        "reduce_scatter output in another's place": (
            lambda: dist.reduce_scatter(parts[1], parts),
            ["outputs.*inputs"],
        ),
        "reduce_scatter shifted": (lambda: dist.reduce_scatter(x[1:5], parts), ["outputs.*inputs"]),
        "reduce_scatter all in one": (
            lambda: dist.reduce_scatter(parts[0], [parts[0]] * size),
            [r"outputs.*inputs\[[12]\]"],
        ),
        "reduce_scatter_tensor another's place": (
            lambda: dist.reduce_scatter_tensor(parts[1], x),
            ["output.*input"],
        ),
        "reduce_scatter_tensor shifted": (lambda: dist.reduce_scatter_tensor(x[1:5], x), ["output.*input"]),
        "reduce_scatter coalesced": (
            lambda: together(dist.reduce_scatter_tensor, [(parts[0], x), (x[4:8], ones(4 * size))]),
            [r"output\[1\].*input\[0\]"],
        ),
        "gather one output twice": (
            lambda: dist.gather(ones(4), [parts[0], parts[1], parts[1]], dst=0),
            [r"outputs\[2\].*outputs\[1\]"],
        ),
        "gather input in another's place": (
            lambda: dist.gather(parts[1], parts, dst=0),
            [r"outputs\[1\].*inputs"],
        ),
        "scatter output in another's place": (
            lambda: dist.scatter(parts[1], parts, src=0),
            [r"outputs.*inputs\[1\]"],
        ),
        "all_reduce_coalesced twice": (lambda: dist.all_reduce_coalesced([x, x]), several),
        "allreduce_coalesced overlap": (
            lambda: backend.allreduce_coalesced([x[:5], x[4:]]),
            [r"tensors\[1\].*tensors\[0\]"],
        ),
        "several tensors of a rank": (lambda: backend.allreduce([x, x]), several),
        "several tensors broadcast": (lambda: backend.broadcast([parts[0], x[2:6]]), several),
        "windows of one tensor": (lambda: dist.all_reduce(x[:8].unfold(0, 4, 2)), shares),
        "expanded": (lambda: dist.broadcast(ones(1).expand(4), 0), shares),
        "strides that meet": (lambda: dist.irecv(x.as_strided((2, 3), (4, 2)), 1), shares),
    }


def _type_pattern(dtype: torch.dtype) -> str:
    """Returns a pattern for the name of a dtype as written in Python or C++."""
    names = {
        torch.bool: "bool",
        torch.uint8: "uint8|byte",
        torch.int32: "int32|int",
        torch.int64: "int64|long",
        torch.float16: "float16|half",
        torch.float32: "float32|float",
        torch.float64: "float64|double",
    }
    return f"(?i:{names[dtype]})"


def bad_arguments() -> None:
    bad = _bad_calls()
    with Checks() as checks:
        for name, (call, shown) in bad.items():
            if dist.get_rank() == 0:
                try:
                    call()
                    checks.true(f"{name}: no error", False)
                except (ValueError, TypeError) as error:
                    for pattern in shown:
                        checks.true(
                            f"{name}: {pattern!r} is not in {error!r}", bool(re.search(pattern, str(error)))
                        )
                except BaseException as error:
                    checks.true(f"{name}: {error!r} instead of a ValueError or TypeError", False)
            good = prepare("all_reduce", torch.float32, (5,))
            good.start(False)
            good.verify(checks, f"all_reduce after {name}")


def test_bad_arguments(worlds: WorldPool) -> None:
    worlds(3).run(bad_arguments)


# Each case of ranks that disagree has its own group, so a failure does not disturb the next case.


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# name -> (the call of this rank in this group, the words that every rank's message must contain)
_Call = Callable[[int, dist.ProcessGroup], object]
DISAGREEMENTS: dict[str, tuple[_Call, list[str]]] = {
    "all_reduce size": (lambda r, g: dist.all_reduce(_zeros(1000 + r), group=g), ["1000", "1001"]),
    "all_reduce large size": (
        lambda r, g: dist.all_reduce(_zeros(100_000 + r), group=g),
        ["100000", "100001"],
    ),
    "all_reduce small and large": (
        lambda r, g: dist.all_reduce(_zeros(3 + 99_999 * r), group=g),
        ["3", "100002"],
    ),
    "all_reduce empty and not": (lambda r, g: dist.all_reduce(_zeros(5 * r), group=g), ["5"]),
    "all_reduce shape": (
        lambda r, g: dist.all_reduce(_zeros(*[(4, 6), (6, 4)][r]), group=g),
        [r"4\D{1,3}6", r"6\D{1,3}4"],
    ),
    "all_reduce dtype": (
        lambda r, g: dist.all_reduce(_zeros(8, dtype=[torch.float32, torch.int32][r]), group=g),
        [_type_pattern(torch.float32), _type_pattern(torch.int32)],
    ),
    "all_reduce op": (
        lambda r, g: dist.all_reduce(_zeros(8), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][r], group=g),
        ["(?i)sum", "(?i)max"],
    ),
    "broadcast size": (lambda r, g: dist.broadcast(_zeros(10 + r), group=g, group_src=0), ["10", "11"]),
    "broadcast large size": (
        lambda r, g: dist.broadcast(_zeros(100_000 + r), group=g, group_src=0),
        ["100000", "100001"],
    ),
    "broadcast dtype": (
        lambda r, g: dist.broadcast(_zeros(8, dtype=[torch.float32, torch.int32][r]), group=g, group_src=0),
        [_type_pattern(torch.float32), _type_pattern(torch.int32)],
    ),
    "broadcast root": (lambda r, g: dist.broadcast(_zeros(8), group=g, group_src=r), ["(?i)root"]),
    "reduce size": (lambda r, g: dist.reduce(_zeros(10 + r), group=g, group_dst=0), ["10", "11"]),
    "reduce op": (
        lambda r, g: dist.reduce(
            _zeros(8), op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][r], group=g, group_dst=0
        ),
        ["(?i)sum", "(?i)max"],
    ),
    "reduce root": (lambda r, g: dist.reduce(_zeros(8), group=g, group_dst=r), ["(?i)root"]),
    "all_gather size": (
        lambda r, g: dist.all_gather([_zeros(10 + r), _zeros(10 + r)], _zeros(10 + r), group=g),
        ["10", "11"],
    ),
    "all_gather_into_tensor size": (
        lambda r, g: dist.all_gather_into_tensor(_zeros(20 + 2 * r), _zeros(10 + r), group=g),
        ["10|20", "11|22"],
    ),
    "gather size": (
        lambda r, g: dist.gather(
            _zeros(10 + r), [_zeros(10), _zeros(10)] if r == 0 else None, group=g, group_dst=0
        ),
        ["10", "11"],
    ),
    "gather root": (
        lambda r, g: dist.gather(_zeros(8), [_zeros(8), _zeros(8)], group=g, group_dst=r),
        ["(?i)root"],
    ),
    "scatter size": (
        lambda r, g: dist.scatter(
            _zeros(10 + r), [_zeros(10), _zeros(10)] if r == 0 else None, group=g, group_src=0
        ),
        ["10", "11"],
    ),
    "reduce_scatter_tensor size": (
        lambda r, g: dist.reduce_scatter_tensor(_zeros(10 + r), _zeros(20 + 2 * r), group=g),
        ["10|20", "11|22"],
    ),
    "all_to_all size": (
        lambda r, g: dist.all_to_all([_zeros(10 + r), _zeros(10 + r)], [_zeros(10 + r)] * 2, group=g),
        ["10", "11"],
    ),
    "all_to_all_single splits": (
        lambda r, g: dist.all_to_all_single(_zeros(10), _zeros(10), [5, 5], [[5, 5], [4, 6]][r], group=g),
        ["20", "16|24"],  # in bytes of float32
    ),
    "number of coalesced tensors": (
        lambda r, g: dist.all_reduce_coalesced([_zeros(6) for _ in range(2 + r)], group=g),
        ["2|12", "3|18"],
    ),
    "operation": (
        lambda r, g: (
            dist.all_reduce(_zeros(8), group=g) if r else dist.broadcast(_zeros(8), group=g, group_src=0)
        ),
        ["(?i)all_?reduce", "(?i)broadcast"],
    ),
    "operation and barrier": (
        lambda r, g: dist.all_reduce(_zeros(8), group=g) if r else dist.barrier(g),
        ["(?i)all_?reduce", "(?i)barrier"],
    ),
}


def disagree(names: list[str]) -> None:
    rank = dist.get_rank()
    with Checks() as checks:
        for name in names:
            call, shown = DISAGREEMENTS[name]
            group = dist.new_group(timeout=timedelta(seconds=LONG_TIMEOUT))
            begin = time.monotonic()
            try:
                call(rank, group)
                checks.true(f"{name}: no error on rank {rank}", False)
            except dist.DistBackendError as error:
                for pattern in shown:
                    checks.true(
                        f"{name}: {pattern!r} is not in {error}", bool(re.search(pattern, str(error)))
                    )
            except BaseException as error:
                checks.true(f"{name}: {error!r} instead of a DistBackendError on rank {rank}", False)
            seconds = time.monotonic() - begin
            checks.true(f"{name}: the error took {seconds:.1f} s", seconds < SOON)
            good = prepare("all_reduce", torch.float32, (5,))
            good.start(False)
            good.verify(checks, f"all_reduce of the world after {name}")


@pytest.mark.parametrize("name", list(DISAGREEMENTS))
def test_ranks_that_disagree(worlds: WorldPool, name: str) -> None:
    worlds(2).run(disagree, [name], timeout=20)


def one_disagrees(kind: str) -> tuple[str, float]:
    """Rank 2, of 3 or more, passes another tensor. All ranks depend on it, so all get the error."""
    other = dist.get_rank() == 2
    group = dist.new_group(timeout=timedelta(seconds=LONG_TIMEOUT))
    begin = time.monotonic()
    try:
        if kind == "all_reduce":
            dist.all_reduce(_zeros(1001 if other else 1000), group=group)
        elif kind == "large all_reduce":
            dist.all_reduce(_zeros(300_001 if other else 300_000), group=group)
        elif kind == "all_gather":
            size = 101 if other else 100
            dist.all_gather([_zeros(size) for _ in range(dist.get_world_size())], _zeros(size), group=group)
        else:
            dist.all_reduce(_zeros(8), dist.ReduceOp.MAX if other else dist.ReduceOp.SUM, group=group)
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - begin
    return "no error", time.monotonic() - begin


@pytest.mark.parametrize("size", sizes([3], [5]))
@pytest.mark.parametrize("kind", ["all_reduce", "large all_reduce", "all_gather", "operator"])
def test_one_rank_disagrees_with_the_others(worlds: WorldPool, size: int, kind: str) -> None:
    for rank, (message, seconds) in enumerate(worlds(size).run(one_disagrees, kind, timeout=20)):
        assert message != "no error", f"rank {rank}"
        assert seconds < SOON, f"rank {rank}: {message}"
        if rank != 2:
            assert re.search(r"(?i)rank\W*2\b", message), f"rank {rank} does not name rank 2: {message}"


def broadcast_of_another_shape() -> list[str]:
    """Returns the errors of the broadcast and of the operation after it on this rank."""
    said = []
    for size in (3 + dist.get_rank(), 2):
        try:
            dist.broadcast(torch.zeros(size), 0)
            dist.barrier()
            said.append("")
        except dist.DistBackendError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("confirm", ["0", "1"])
def test_a_root_that_does_not_wait_fails_in_its_next_operation(
    new_world: Callable[..., World], confirm: str
) -> None:
    world = new_world(2, timeout=LONG_TIMEOUT, environment={"FOG_CONFIRM": confirm})
    for said in world.run(broadcast_of_another_shape):
        # either the broadcast fails, or the barrier after it; all later operations fail too
        for text in said:
            assert "float32[3]" in text and "float32[4]" in text, said


def message_mismatch(kind: str) -> str:
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=LONG_TIMEOUT))
    numel = {"longer": 12, "shorter": 8, "much longer": 200_000, "dtype": 10}[kind]
    dtype = torch.int32 if kind == "dtype" else torch.float32
    try:
        if rank == 0:
            dist.send(_zeros(numel, dtype=dtype), group_dst=1, group=group)
        else:
            dist.recv(_zeros(10), group_src=0, group=group)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["longer", "shorter", "much longer", "dtype"])
def test_message_of_another_size_or_dtype(worlds: WorldPool, kind: str) -> None:
    _, receiver = worlds(2).run(message_mismatch, kind, timeout=20)
    assert receiver != "no error"
    if kind == "dtype":
        assert re.search(_type_pattern(torch.int32), receiver) and re.search(
            _type_pattern(torch.float32), receiver
        )
    else:
        assert "10" in receiver
    worlds(2).run(still_works)


def still_works() -> None:
    with Checks() as checks:
        good = prepare("all_reduce", torch.float32, (5,))
        good.start(False)
        good.verify(checks, "all_reduce")


# Peers that never call


# Operations that wait for rank 1: a pattern for the operation's name in the message, and the call.
_WAITING: list[tuple[str, Callable[[int, dist.ProcessGroup], dist.Work]]] = [
    ("all_?reduce", lambda n, g: dist.all_reduce(_zeros(10), group=g, async_op=True)),
    ("all_?reduce", lambda n, g: dist.all_reduce(_zeros(200_000), group=g, async_op=True)),
    ("broadcast", lambda n, g: dist.broadcast(_zeros(10), group=g, group_src=1, async_op=True)),
    (
        "all_?gather",
        lambda n, g: dist.all_gather([_zeros(3) for _ in range(n)], _zeros(3), group=g, async_op=True),
    ),
    ("all_?to_?all", lambda n, g: dist.all_to_all_single(_zeros(n), _zeros(n), group=g, async_op=True)),
    (
        "reduce_?scatter",
        lambda n, g: dist.reduce_scatter_tensor(_zeros(2), _zeros(2 * n), group=g, async_op=True),
    ),
    ("barrier", lambda n, g: dist.barrier(g, async_op=True)),
    ("recv", lambda n, g: dist.irecv(_zeros(4), group_src=1, group=g)),
]


def wait_for_absent_peer() -> list[str]:
    """Starts all operations, each in its own group, and then waits, so all of them take only one timeout."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(timeout=timedelta(seconds=SHORT_TIMEOUT)) for _ in _WAITING]
    for group in groups:  # so the failing operations are not the first in their groups
        dist.barrier(group)
    problems = []
    if rank != 1:
        begin = time.monotonic()
        started = [(name, call(size, group)) for (name, call), group in zip(_WAITING, groups, strict=True)]
        for name, work in started:
            try:
                work.wait()
                problems.append(f"{name}: no error")
            except dist.DistBackendError as error:
                for pattern in (name, r"rank\W*1\b", r"seq\w*\W*\d|#\d"):
                    if not re.search(pattern, str(error), re.IGNORECASE):
                        problems.append(f"{name}: {pattern!r} is not in {error}")
                if exception_of(work) is None:
                    problems.append(f"{name}: exception() is None")
            except BaseException as error:
                problems.append(f"{name}: {error!r} instead of a DistBackendError")
        seconds = time.monotonic() - begin
        if not SHORT_TIMEOUT - 0.5 < seconds < SHORT_TIMEOUT + SOON:
            problems.append(f"the errors came after {seconds:.1f} s, the timeout is {SHORT_TIMEOUT} s")
    # The groups that timed out do not affect the others.
    dist.barrier()
    still_works()
    return problems


def test_peer_that_never_calls(worlds: WorldPool) -> None:
    assert worlds(3).run(wait_for_absent_peer) == [[], [], []]


def wait_with_own_timeout() -> None:
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        time.sleep(1.5)
        return
    work = dist.irecv(_zeros(4), 1)
    begin = time.monotonic()
    with pytest.raises(dist.DistBackendError):
        work.wait(timedelta(seconds=0.3))
    assert time.monotonic() - begin < 1.2


def test_timeout_of_one_wait(new_world: Callable[..., World]) -> None:
    new_world(2, timeout=LONG_TIMEOUT).run(wait_with_own_timeout)


def world_with_short_timeout() -> str:
    if dist.get_rank() == 1:
        return "absent"
    try:
        dist.all_reduce(_zeros(10))
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_timeout_of_the_world(new_world: Callable[..., World]) -> None:
    outcomes = new_world(3, timeout=SHORT_TIMEOUT).run_raw(world_with_short_timeout)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.state == "returned" and re.search(r"(?i)rank\W*1\b", outcome.value), outcome
        assert SHORT_TIMEOUT - 0.5 < outcome.seconds < SHORT_TIMEOUT + SOON, outcome


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
        dist.all_reduce(_zeros(numel))
    # The other rank comes late, so a deadline that wrongly expires at once would show.
    if rank == 1:
        time.sleep(0.1)
    work = dist.barrier(async_op=True)
    assert work is not None and work.wait(timeout)
    dist.monitored_barrier(timeout=timeout)
    backend.allreduce_named(_zeros(3), dist.ReduceOp.SUM, timeout=timeout).wait()
    window = fogdist.Window(_zeros(4), timeout=timeout)
    other = 1 - rank
    window.put(torch.ones(4), timeout=timeout)
    with window.lock(timeout=timeout):
        window.get(timeout=timeout)
    window.update(timeout=timeout)
    dist.barrier()
    if rank == 1:
        time.sleep(0.1)
    window.free(timeout=timeout)
    raw = backend.create_window(_zeros(4), "raw", [other], [other], timeout=timeout)
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
