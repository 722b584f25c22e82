"""Bad arguments and ranks that disagree raise an exception, and never hang; far deadlines do not expire.

test_faults has the tests with ranks that are killed, stopped or absent.
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
from harness import RUN_TIMEOUT, World, WorldPool, error_of, sizes
from operations import prepare
from reference import Checks
from torch import Tensor

from fog_pg import _C

# The harness ends its world before, so an error that arrives only at the timeout fails the test.
LONG_TIMEOUT = 4 * RUN_TIMEOUT


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
        "scatter without list": (lambda: dist.scatter(ones(2), None, src=0), []),
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
    # Of lists of tensors, one for each of the 3 ranks, and of the tensors that stand for such lists.
    lists: dict[str, Callable[[list[Tensor]], object]] = {
        "gather": lambda t: dist.gather(ones(2), t, dst=0),
        "scatter": lambda t: dist.scatter(ones(2), t, src=0),
        "all_gather": lambda t: dist.all_gather(t, ones(2)),
        "reduce_scatter": lambda t: dist.reduce_scatter(ones(2), t),
        "all_to_all outputs": lambda t: dist.all_to_all(t, [ones(2)] * 3),
        "all_to_all inputs": lambda t: dist.all_to_all([ones(2) for _ in range(3)], t),
        "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(torch.cat(t), ones(2)),
        "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(ones(2), torch.cat(t)),
    }
    int32 = ones(2, dtype=torch.int32)
    for name, call in lists.items():
        whole = name.endswith("_tensor")
        wrong = {
            "too long": ([ones(2) for _ in range(4)], ["8|4", "6|2|3"] if whole else ["4", "3"]),
            "too short": ([ones(2)], ["2|1", "6|2|3"]),
            "dtype": ([int32] * 3 if whole else [ones(2), int32, ones(2)], ["(?i)int"]),
        }
        if not name.startswith("all_to_all"):
            wrong["shape"] = ([ones(5), ones(2), ones(2)], ["9|5", "6|2"])
        for what, (tensors, shown) in wrong.items():
            calls[f"{name} {what}"] = (lambda c=call, t=tensors: c(t), shown)
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
                [f"(?i){op}", str(dtype).removeprefix("torch.")],
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


# --- ranks that disagree ------------------------------------------------------------------------------------

# Each case has its own group, so a failure does not disturb the next case.


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _exchange(numel: int, first: int, group: dist.ProcessGroup) -> None:
    """Exchanges data that waits, between hosts, for the other side's header; either rank begins."""
    rank = dist.get_rank(group)
    if rank != first:
        time.sleep(0.05)
    plan = _C.NeighborPlan(rank, 2, 0.5, [(1 - rank, 0.5)], [(1 - rank, 1.0)])
    group._get_backend(torch.device("cpu")).neighbor_allreduce(_zeros(numel), plan).wait()


def _message(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 0:
        dist.send(_zeros(numel, dtype=dtype), group_dst=1, group=group)
    else:
        dist.recv(_zeros(10), group_src=0, group=group)


_FLOAT_INT = [torch.float32, torch.int32]
_SUM_MAX = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
_TYPES = ["(?i)float", "(?i)int"]

# name -> (the call in this group, by a rank with the argument 0 or 1; the words in the message of every rank)
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
        lambda r, g: dist.all_reduce(_zeros(8, dtype=_FLOAT_INT[r]), group=g),
        _TYPES,
    ),
    "all_reduce op": (
        lambda r, g: dist.all_reduce(_zeros(8), _SUM_MAX[r], group=g),
        ["(?i)sum", "(?i)max"],
    ),
    "broadcast size": (lambda r, g: dist.broadcast(_zeros(10 + r), group=g, group_src=0), ["10", "11"]),
    "broadcast large size": (
        lambda r, g: dist.broadcast(_zeros(100_000 + r), group=g, group_src=0),
        ["100000", "100001"],
    ),
    "broadcast dtype": (
        lambda r, g: dist.broadcast(_zeros(8, dtype=_FLOAT_INT[r]), group=g, group_src=0),
        _TYPES,
    ),
    "broadcast root": (lambda r, g: dist.broadcast(_zeros(8), group=g, group_src=r), ["(?i)root"]),
    "reduce size": (lambda r, g: dist.reduce(_zeros(10 + r), group=g, group_dst=0), ["10", "11"]),
    "reduce op": (
        lambda r, g: dist.reduce(_zeros(8), op=_SUM_MAX[r], group=g, group_dst=0),
        ["(?i)sum", "(?i)max"],
    ),
    "reduce root": (lambda r, g: dist.reduce(_zeros(8), group=g, group_dst=r), ["(?i)root"]),
    "all_gather size": (
        lambda r, g: dist.all_gather([_zeros(10 + r) for _ in range(g.size())], _zeros(10 + r), group=g),
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
    "exchange, 0 first": (
        lambda r, g: _exchange(600_000 + r, 0, g),
        ["neighbor_allreduce", "ranks disagree"],
    ),
    "exchange, 1 first": (
        lambda r, g: _exchange(600_000 + r, 1, g),
        ["neighbor_allreduce", "ranks disagree"],
    ),
}
# Only the receiver of a message needs to know; the words in its message.
MESSAGES: dict[str, tuple[_Call, list[str]]] = {
    "longer message": (lambda r, g: _message(12, torch.float32, g), ["10"]),
    "shorter message": (lambda r, g: _message(8, torch.float32, g), ["10"]),
    "much longer message": (lambda r, g: _message(200_000, torch.float32, g), ["10"]),
    "message dtype": (lambda r, g: _message(10, torch.int32, g), _TYPES),
}
# All of more ranks depend on one that disagrees.
OF_ALL = ["all_reduce size", "all_reduce large size", "all_reduce op", "all_gather size"]


def disagree(names: list[str]) -> None:
    """The last rank passes other arguments than all others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        for name in names:
            call, shown = (DISAGREEMENTS | MESSAGES)[name]
            group = dist.new_group(timeout=timedelta(seconds=LONG_TIMEOUT))
            error = ""
            try:
                call(int(rank == size - 1), group)
            except dist.DistBackendError as raised:
                error = str(raised)
            except BaseException as raised:
                checks.true(f"{name}: {raised!r} instead of a DistBackendError on rank {rank}", False)
            named = [rf"(?i)rank\W*{size - 1}\b"] if size > 2 and rank < size - 1 else []
            if name in DISAGREEMENTS or rank == 1:
                for pattern in [*shown, *named]:
                    checks.true(f"{name}: {pattern!r} is not in {error!r}", bool(re.search(pattern, error)))
            good = prepare("all_reduce", torch.float32, (5,))
            good.start(False)
            good.verify(checks, f"all_reduce of the world after {name}")


WAYS = {
    "memory": {},
    "tcp": {"FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "tcp"},
    "messages": {"FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "messages"},
}


@pytest.mark.parametrize("way", ["memory", "tcp", pytest.param("messages", marks=pytest.mark.long)])
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
    world = new_world(2, timeout=LONG_TIMEOUT, environment={"FOG_CONFIRM": confirm})
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
