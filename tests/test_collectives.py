"""Compares every c10d operation with a single-process reference, over dtypes, sizes, layouts and numbers of ranks."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import WorldPool, exception_of, on_ranks, sizes
from operations import (
    COLLECTIVES,
    CUT_ALONG_ROWS,
    REDUCING,
    ROOTED,
    WITHOUT_WORK,
    Prepared,
    prepare,
    reduce_op,
    reductions,
    verify_reduction,
)
from reference import DTYPES, Checks, make_input, reduce
from torch import Tensor

# One rank, an odd number and a power of two; `make test-all` adds 2 and 5.
RANKS = sizes([1, 3, 4], [2, 5])
SEVERAL_RANKS = sizes([2, 3], [5])
# The timeout, in seconds, of a call that runs many operations.
SWEEP_TIMEOUT = 300.0
SMALL = [0, 1, 7, 1000]
LARGE = [5_003, 300_007]
LARGE_DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex128]
# Sizes in bytes around which transports change their protocol.
THRESHOLDS = [8 << 10, 64 << 10]
MIXED_SIZES = [1, 1000, 70_001]


# The table: every collective with dtypes, reductions, shapes, roots and layouts, blocking and not


def _transposed(tensor: Tensor) -> Tensor:
    """Returns a dense copy in column order."""
    return tensor.t().contiguous().t()


def _with_gaps(tensor: Tensor) -> Tensor:
    """Returns a view of every second element; the elements between are -7, or True for bool."""
    memory = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), -7).to(tensor.dtype)
    view = memory[..., ::2]
    view.copy_(tensor)
    return view


def _with_offset(tensor: Tensor) -> Tensor:
    """Returns a contiguous view that does not begin at the start of its memory."""
    memory = torch.full((tensor.numel() + 3,), -7).to(tensor.dtype)
    view = memory[3:].view(tensor.shape)
    view.copy_(tensor)
    return view


def _gaps_kept(tensor: Tensor) -> bool:
    """Checks that nothing was written between the elements of a view made by ``_with_gaps``."""
    width = tensor.shape[-1]
    memory = tensor.as_strided((*tensor.shape[:-1], width), tensor.stride(), tensor.storage_offset() + 1)
    return bool((memory == torch.full((), -7).to(tensor.dtype)).all())


LAYOUTS = [torch.clone, _transposed, _with_gaps, _with_offset]


def rows(operation: str) -> Iterator[dict[str, Any]]:
    """Yields arguments of ``prepare``; a row that names no root has any."""
    size = dist.get_world_size()
    for dtype in DTYPES:
        for reduction in reductions(dtype) if operation in REDUCING else ["SUM"]:
            for numel in SMALL:
                yield {"dtype": dtype, "shape": (numel,), "reduction": reduction}
    for numel, dtype in itertools.product(LARGE, LARGE_DTYPES):
        yield {"dtype": dtype, "shape": (numel,)}
    for edge in THRESHOLDS:
        for numel in (edge - 1, edge, edge + 1, edge // size, edge // size + 1):
            yield {"dtype": torch.uint8, "shape": (numel,)}
    for root, numel in itertools.product(range(size) if operation in ROOTED else [0], MIXED_SIZES):
        yield {"dtype": torch.float32, "shape": (numel,), "root": root}
    shapes = [(0, 3), (2, 0), (3, 2, 2)] + ([] if operation in CUT_ALONG_ROWS else [()])
    for dtype, shape in itertools.product((torch.float32, torch.complex64, torch.bool), shapes):
        yield {"dtype": dtype, "shape": shape}
    for dtype in (torch.float32, torch.bool):
        for source, destination in itertools.product(LAYOUTS, repeat=2):
            yield {"dtype": dtype, "shape": (4, 6), "source": source, "destination": destination}


def _wait_by_polling(work: dist.Work) -> None:
    deadline = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline, "is_completed() stays False"
        time.sleep(0.001)
    work.wait()


# By the last one, without a call of work.wait(), the backend has to complete the operation by itself.
_WAYS_TO_WAIT: list[Callable[[dist.Work], object]] = [
    lambda work: work.wait(),
    _wait_by_polling,
    lambda work: work.get_future().wait(),
]


def check_work(checks: Checks, label: str, work: dist.Work, outputs: list[Tensor]) -> None:
    """Checks a Work that is complete, and its Future."""
    checks.true(f"{label}: a second wait", work.wait())
    checks.true(f"{label}: is_completed", work.is_completed())
    checks.true(f"{label}: is_success", work.is_success())
    milliseconds = work._get_duration()  # type: ignore[attr-defined]
    checks.true(f"{label}: duration {milliseconds}", 0 < milliseconds < 60_000)
    checks.equal(f"{label}: exception", exception_of(work), None)
    future = work.get_future()
    checks.true(f"{label}: future.done", future.done())
    if outputs and not outputs[0].is_complex():  # complex numbers are real ones for the backend
        flat = torch.cat([t.reshape(-1) for t in outputs])
        for what, tensors in (("result", work.result()), ("value of the future", future.value())):
            checks.equal(f"{label}: {what}", torch.cat([t.reshape(-1) for t in tensors]), flat)


def run_row(checks: Checks, label: str, ready: Prepared, seed: int) -> None:
    """Runs and checks one operation: blocking, or in one of the ways to wait."""
    strides = [t.stride() for t in ready.outputs]
    # Another way for each row of a size or layout.
    way = (seed + seed // len(SMALL)) % (len(_WAYS_TO_WAIT) + 1)
    work = ready.start(way > 0)
    if isinstance(work, torch._C.Future):  # of a coalesced form
        work.wait()
    elif work is not None:
        _WAYS_TO_WAIT[way - 1](work)
        check_work(checks, label, work, ready.outputs)
    ready.verify(checks, label)
    checks.equal(f"{label}: strides", [t.stride() for t in ready.outputs], strides)
    for tensor in ready.outputs:
        if tensor.dim() and tensor.stride(-1) == 2:
            checks.true(f"{label}: between the elements", _gaps_kept(tensor))


def sweep(operations: Sequence[str]) -> None:
    """Runs all rows of some operations."""
    for operation in operations:
        with Checks() as checks:
            for seed, row in enumerate(rows(operation)):
                arguments = {"root": seed % dist.get_world_size()} | row
                shown = {name: getattr(value, "__name__", value) for name, value in arguments.items()}
                label = f"{operation} {shown} on rank {dist.get_rank()}"
                try:
                    run_row(checks, label, prepare(operation, seed=seed, **arguments), seed)
                except ValueError as error:
                    # For this one, c10d has always required contiguous tensors.
                    checks.true(f"{label}: {error}", operation == "all_to_all_single" and "source" in row)


@pytest.mark.parametrize("size", RANKS)
def test_every_collective(worlds: WorldPool, size: int) -> None:
    worlds(size).run(sweep, COLLECTIVES, timeout=SWEEP_TIMEOUT)


@on_ranks(3)
def test_premul_sum_with_a_tensor_factor() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [make_input(r, torch.float32, 10) for r in range(size)]
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(torch.tensor([0.25])))
    with Checks() as checks:
        checks.close("all_reduce", tensor, reduce(inputs, "PREMUL_SUM", 0.25))


# Outputs that share memory


@on_ranks(2)
def test_outputs_that_overlap_themselves_are_refused() -> None:
    size = dist.get_world_size()
    ones, whole = torch.ones(2, 3), torch.ones(2 * size, 3)

    def expanded(rows: int = 2) -> Tensor:
        return torch.zeros(1, 3).expand(rows, 3)

    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather([expanded() for _ in range(size)], ones),
        lambda: dist.all_gather_into_tensor(expanded(2 * size), ones),
        lambda: dist.reduce_scatter(expanded(), [ones] * size),
        lambda: dist.reduce_scatter_tensor(expanded(), whole),
        lambda: dist.all_to_all([expanded() for _ in range(size)], [ones] * size),
        lambda: dist.all_reduce(expanded()),
        lambda: dist.broadcast(expanded(), 0),
        lambda: dist.reduce(expanded(), 0),
        lambda: dist.scatter(expanded(), [ones] * size if dist.get_rank() == 0 else None, 0),
        lambda: dist.all_to_all_single(expanded(2 * size), whole),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()


@on_ranks(SEVERAL_RANKS)
def test_output_that_is_a_part_of_the_input_or_holds_it() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        for numel in MIXED_SIZES:
            inputs = [make_input(r, torch.float32, size * numel) for r in range(size)]
            whole = torch.zeros(size * numel)
            mine = whole[rank * numel : (rank + 1) * numel]
            mine.copy_(inputs[rank][:numel])
            dist.all_gather_into_tensor(whole, mine)
            checks.equal(f"all_gather_into_tensor {numel}", whole, torch.cat([x[:numel] for x in inputs]))

            whole = inputs[rank].clone()
            mine = whole[rank * numel : (rank + 1) * numel]
            dist.reduce_scatter_tensor(mine, whole)
            given = [x[rank * numel : (rank + 1) * numel] for x in inputs]
            verify_reduction(checks, f"reduce_scatter_tensor {numel}", mine, given, "SUM")

            # The output is the rank's own place in a list, either of rows or of columns, which interleave.
            for lay in ("rows", "columns"):
                parts = [x.view(size, numel) for x in inputs]

                def laid(values: Tensor, lay: str = lay) -> list[Tensor]:
                    return list((values if lay == "rows" else _transposed(values)).clone().unbind())

                label = f"{lay} of {numel}"
                result = laid(torch.stack([p[rank] if r == rank else p[r] * 0 for r, p in enumerate(parts)]))
                dist.all_gather(result, result[rank])
                expected = [p[r] for r, p in enumerate(parts)]
                checks.equal(f"all_gather {label}", result, expected)
                result = laid(parts[rank])
                dist.reduce_scatter(result[rank], result)
                verify_reduction(checks, f"reduce_scatter {label}", result[rank], given, "SUM")
                result = laid(torch.zeros(size, numel))
                dist.all_to_all(result, laid(parts[rank]))
                checks.equal(f"all_to_all {label}", result, [p[rank] for p in parts])
                result = laid(parts[rank])
                dist.gather(result[rank], result if rank == 1 else None, group_dst=1)
                checks.equal(f"gather {label}", result, expected if rank == 1 else list(parts[rank]))
                result = laid(parts[rank])
                dist.scatter(result[rank], result if rank == 1 else None, group_src=1)
                checks.equal(f"scatter {label}", result[rank], parts[1][rank])
            halves = torch.zeros(size * numel, 2)
            halves[:, 0] = inputs[rank]
            dist.all_to_all_single(halves[:, 1], halves[:, 0])
            checks.equal("all_to_all_single of halves", halves[:, 1], torch.cat(given))
            checks.equal("all_to_all_single of halves, input", halves[:, 0], inputs[rank])


@on_ranks(SEVERAL_RANKS)
def test_into_tensor_forms_that_stack() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        inputs = [make_input(r, torch.float32, (size, 2, 3)) for r in range(size)]
        stack = torch.zeros(size, 2, 3)
        dist.all_gather_into_tensor(stack, inputs[rank][0])
        checks.equal("all_gather_into_tensor stacks", stack, torch.stack([x[0] for x in inputs]))

        output = torch.zeros(2, 3)
        dist.reduce_scatter_tensor(output, inputs[rank])
        verify_reduction(checks, "reduce_scatter_tensor unstacks", output, [x[rank] for x in inputs], "SUM")

        numbers = torch.zeros(size)
        dist.all_gather_into_tensor(numbers, torch.tensor(float(rank)))
        checks.equal("numbers", numbers, torch.arange(float(size)))


# Unequal parts


@on_ranks(RANKS)
def test_uneven_parts() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        for base in (0, 1, 3000):

            def part(giver: int, getter: int, base: int = base) -> Tensor:
                return make_input(giver, torch.float32, (base + getter, 2), getter)

            output = torch.zeros(base + rank, 2)
            dist.reduce_scatter(output, [part(rank, k) for k in range(size)])
            verify_reduction(
                checks, f"reduce_scatter {base}", output, [part(r, rank) for r in range(size)], "SUM"
            )

            outputs = [torch.zeros(base + rank, 2) for _ in range(size)]
            dist.all_to_all(outputs, [part(rank, k) for k in range(size)])
            checks.equal(f"all_to_all {base}", outputs, [part(r, rank) for r in range(size)])

            output = torch.zeros(size * (base + rank), 2)
            splits = [base + k for k in range(size)]
            tensor = torch.cat([part(rank, k) for k in range(size)])
            dist.all_to_all_single(output, tensor, [base + rank] * size, splits)
            checks.equal(f"all_to_all_single {base}", output, torch.cat([part(r, rank) for r in range(size)]))

        # Rank r sends r rows to rank 0, and none to the others.
        tensor = make_input(rank, torch.int64, (rank, 3))
        splits = [rank] + [0] * (size - 1)
        wanted = list(range(size)) if rank == 0 else [0] * size
        output = torch.zeros(sum(wanted), 3, dtype=torch.int64)
        dist.all_to_all_single(output, tensor, wanted, splits)
        expected = torch.cat([make_input(r, torch.int64, (r, 3)) for r in range(size)])
        checks.equal("all_to_all_single to rank 0", output, expected if rank == 0 else expected[:0])


# Coalesced and functional forms


@on_ranks(SEVERAL_RANKS, async_ops=[False, True])
def test_coalescing_manager(async_ops: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    numels = [3, 0, 1, 20_000]
    with Checks() as checks:
        for dtype in (torch.float32, torch.bfloat16):
            for reduction in ("SUM", "MAX"):
                inputs = [[make_input(r, dtype, size * m, m) for m in numels] for r in range(size)]
                tensors = [t.clone() for t in inputs[rank]]
                with dist._coalescing_manager(async_ops=async_ops) as manager:
                    for tensor in tensors:
                        dist.all_reduce(tensor, reduce_op(reduction))
                if async_ops:
                    manager.wait()
                for index, tensor in enumerate(tensors):
                    given = [x[index] for x in inputs]
                    verify_reduction(checks, f"all_reduce {reduction} {index}", tensor, given, reduction)

                outputs = [torch.zeros(m, dtype=dtype) for m in numels]
                with dist._coalescing_manager(async_ops=async_ops) as manager:
                    for output, tensor in zip(outputs, inputs[rank], strict=True):
                        dist.reduce_scatter_tensor(output, tensor, reduce_op(reduction))
                if async_ops:
                    manager.wait()
                for index, output in enumerate(outputs):
                    given = [x[index].chunk(size)[rank] if numels[index] else x[index] for x in inputs]
                    verify_reduction(checks, f"reduce_scatter {reduction} {index}", output, given, reduction)

            outputs = [torch.zeros(size * m, dtype=dtype) for m in numels]
            with dist._coalescing_manager(async_ops=async_ops) as manager:
                for output, tensor, numel in zip(outputs, inputs[rank], numels, strict=True):
                    dist.all_gather_into_tensor(output, tensor[:numel])
            if async_ops:
                manager.wait()
            expected = [torch.cat([x[i][:m] for x in inputs]) for i, m in enumerate(numels)]
            checks.equal("all_gather", outputs, expected)


@on_ranks(SEVERAL_RANKS)
def test_functional_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    inputs = [make_input(r, torch.float32, (2 * size, 3)) for r in range(size)]
    mine = inputs[rank]
    rows = slice(2 * rank, 2 * rank + 2)
    with Checks() as checks:
        verify_reduction(checks, "all_reduce", functional.all_reduce(mine, "sum", world), inputs, "SUM")
        verify_reduction(checks, "avg", functional.all_reduce(mine, "avg", world), inputs, "AVG")
        checks.equal("all_gather_tensor", functional.all_gather_tensor(mine, 0, world), torch.cat(inputs))
        checks.equal("gather dim 1", functional.all_gather_tensor(mine, 1, world), torch.cat(inputs, 1))
        scattered = functional.reduce_scatter_tensor(mine, "sum", 0, world)
        verify_reduction(checks, "reduce_scatter_tensor", scattered, [x[rows] for x in inputs], "SUM")
        checks.equal("broadcast", functional.broadcast(mine, 0, world), inputs[0])
        exchanged = functional.all_to_all_single(mine, None, None, world)
        checks.equal("all_to_all_single", exchanged, torch.cat([x[rows] for x in inputs]))
        next_rank = [(r + 1) % size for r in range(size)]
        permuted = functional.permute_tensor(mine.flatten(), next_rank, world)
        checks.equal("permute", permuted, inputs[(rank - 1) % size].flatten())

        pair = [mine, mine[:size].clone()]
        for index, tensor in enumerate(functional.all_reduce_coalesced(pair, "sum", world)):
            given = [[x, x[:size]][index] for x in inputs]
            verify_reduction(checks, f"all_reduce_coalesced {index}", tensor, given, "SUM")
        gathered = functional.all_gather_into_tensor_coalesced(pair, world)
        checks.equal(
            "all_gather_coalesced", gathered, [torch.cat(inputs), torch.cat([x[:size] for x in inputs])]
        )
        scattered_pair = functional.reduce_scatter_tensor_coalesced(pair, "sum", [0, 0], world)
        verify_reduction(checks, "coalesced 0", scattered_pair[0], [x[rows] for x in inputs], "SUM")
        verify_reduction(
            checks, "coalesced 1", scattered_pair[1], [x[rank : rank + 1] for x in inputs], "SUM"
        )
        checks.equal("input", mine, inputs[rank])


# Work and Future


@on_ranks(SEVERAL_RANKS)
def test_future_of_an_operation_that_waits_for_a_peer() -> None:
    """Checks a Work and its future before and after the last rank joins."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    if rank == size - 1:
        time.sleep(0.3)
    tensor = torch.full((1000,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    called: list[float] = []
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    work.get_future().add_done_callback(lambda _: called.append(time.monotonic()))
    if rank != size - 1:
        assert not work.is_completed()
        assert not called
    total = float(sum(range(size)))
    assert doubled.wait().eq(2 * total).all()
    work.wait()
    assert work.is_completed()
    assert tensor.eq(total).all()
    deadline = time.monotonic() + 5
    while not called and time.monotonic() < deadline:
        time.sleep(0.001)
    assert called, "the callback of the future was not called"


@on_ranks(SEVERAL_RANKS)
def test_many_operations_in_flight() -> None:
    """They are waited for in another order on each rank."""
    with Checks() as checks:
        started = []
        for seed in range(3):
            for operation in COLLECTIVES:
                numel = MIXED_SIZES[(seed + len(started)) % 3]
                root = seed % dist.get_world_size()
                ready = prepare(operation, torch.float32, (numel,), seed=seed, root=root)
                started.append((f"{operation} of {numel}, {seed}", ready, ready.start(True)))
        random.Random(7 + dist.get_rank()).shuffle(started)
        for label, ready, work in started:
            work.wait()
            ready.verify(checks, label)


@on_ranks(SEVERAL_RANKS)
def test_tensors_dropped_while_in_flight() -> None:
    """The backend keeps the tensors of an operation alive, and completes operations without a caller that waits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(20):
        dist.all_reduce(torch.full((20_000,), float(step)), async_op=True)
    outputs = [torch.zeros(20_000) for _ in range(size)]
    work = dist.all_gather(outputs, torch.full((20_000,), float(rank)), async_op=True)
    garbage = [torch.full((20_000,), -1.0) for _ in range(20)]  # these would reuse freed memory
    work.wait()
    assert [t.unique().tolist() for t in outputs] == [[float(r)] for r in range(size)]
    del garbage


# Point to point


def exchange_with_next(dtypes: Sequence[torch.dtype], numels: Sequence[int]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    with Checks() as checks:
        for dtype in dtypes:
            for numel in numels:
                tensor, output = make_input(rank, dtype, numel), torch.zeros(numel, dtype=dtype)
                works = [dist.isend(tensor, right), dist.irecv(output, left)]
                for work in works:
                    work.wait()
                checks.equal(f"{dtype} of {numel}", output, make_input(left, dtype, numel))
                checks.equal(f"{dtype} of {numel}: input", tensor, make_input(rank, dtype, numel))
                checks.true("completed", all(w.is_completed() for w in works))


@pytest.mark.parametrize("size", sizes([2, 4], [3, 5]))
def test_isend_irecv(worlds: WorldPool, size: int) -> None:
    worlds(size).run(exchange_with_next, DTYPES, SMALL)
    worlds(size).run(exchange_with_next, [torch.float32, torch.uint8], LARGE)
    worlds(size).run(exchange_with_next, [torch.uint8], [t + d for t in THRESHOLDS for d in (-1, 0, 1)])


@on_ranks([2, 3])
def test_tags_out_of_order() -> None:
    rank = dist.get_rank()
    tags = [0, 5, 3, 2**31 - 1, 5, 5, 0]
    numels = [10, 70_000, 0, 1000, 11, 70_001, 12]
    if rank == 0:
        works = [
            dist.isend(make_input(0, torch.float32, n, seed), 1, tag=tag)
            for seed, (tag, n) in enumerate(zip(tags, numels, strict=True))
        ]
        for work in works:
            work.wait()
    elif rank == 1:
        with Checks() as checks:
            # Messages of different tags are received out of order, messages of one tag in the order in which they were
            # sent.
            for index in [3, 2, 1, 0, 4, 6, 5]:
                output = torch.zeros(numels[index])
                dist.recv(output, 0, tag=tags[index])
                expected = make_input(0, torch.float32, numels[index], index)
                checks.equal(f"message {index} with tag {tags[index]}", output, expected)


@on_ranks(SEVERAL_RANKS)
def test_recv_from_any_source() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    numels = [1, 1000, 70_001, 0]
    with Checks() as checks:
        for round_, numel in enumerate(numels):
            if rank:
                time.sleep(0.01 * (size - rank))
                dist.send(make_input(rank, torch.float32, numel, round_), 0, tag=round_)
                continue
            sources = []
            for _ in range(size - 1):
                output = torch.zeros(numel)
                sources.append(dist.recv(output, tag=round_))
                expected = make_input(sources[-1], torch.float32, numel, round_)
                checks.equal(f"{numel} elements from {sources[-1]}", output, expected)
            checks.equal(f"sources of {numel}", sorted(sources), list(range(1, size)))
        # One receive from any source is in flight together with receives from given sources.
        if rank:
            dist.send(torch.full((4,), float(rank)), 0, tag=100 + rank)
        else:
            any_output, outputs = torch.zeros(4), [torch.zeros(4) for _ in range(size)]
            any_work = dist.irecv(any_output, tag=101)
            works = [dist.irecv(outputs[r], r, tag=100 + r) for r in range(2, size)]
            for work in [*works, any_work]:
                work.wait()
            checks.equal("any", any_output, torch.full((4,), 1.0))
            checks.equal("source of any", any_work._source_rank(), 1)
            checks.equal("named", outputs[2:], [torch.full((4,), float(r)) for r in range(2, size)])


@on_ranks(SEVERAL_RANKS)
def test_batch_isend_irecv() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        for numel in MIXED_SIZES:
            operations, outputs = [], {}
            for peer in range(size):
                for tag in (4, 9):
                    if peer == rank:
                        continue
                    outputs[peer, tag] = torch.zeros(numel)
                    tensor = make_input(rank, torch.float32, numel, 10 * peer + tag)
                    receive = dist.P2POp(dist.irecv, outputs[peer, tag], peer, tag=tag)
                    send = dist.P2POp(dist.isend, tensor, peer, tag=tag)
                    # Some ranks begin with the send, others with the receive.
                    operations += [send, receive] if rank % 2 else [receive, send]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for (peer, tag), output in outputs.items():
                expected = make_input(peer, torch.float32, numel, 10 * rank + tag)
                checks.equal(f"{numel} from {peer} tag {tag}", output, expected)


@on_ranks(2)
def test_strided_messages() -> None:
    rank = dist.get_rank()
    tensor = _with_gaps(make_input(0, torch.float32, (4, 6)))
    output = _with_gaps(torch.zeros(4, 6))
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(output, 0)
        assert output.equal(tensor) and _gaps_kept(output)


# Barrier, objects, sequence numbers


@on_ranks(RANKS)
def test_barrier() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for late, async_op in itertools.product({0, size - 1}, (False, True)):
        dist.barrier()
        if rank == late:
            time.sleep(0.1)
        before = time.monotonic()
        work = dist.barrier(async_op=async_op)
        if async_op:
            work.wait()
        times: list[Any] = [None] * size
        dist.all_gather_object(times, (before, time.monotonic()))
        assert max(before for before, _ in times) <= min(after for _, after in times)


@on_ranks(RANKS)
def test_object_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "data": list(range(rank * 1000))}
    everybody = [{"rank": r, "data": list(range(r * 1000))} for r in range(size)]
    with Checks() as checks:
        gathered = [None] * size
        dist.all_gather_object(gathered, mine)
        checks.equal("all_gather_object", gathered, everybody)
        root = size - 1
        gathered = [None] * size if rank == root else None
        dist.gather_object(mine, gathered, dst=root)
        checks.equal("gather_object", gathered, everybody if rank == root else None)
        sent = [mine, "text"]
        dist.broadcast_object_list(sent, src=root)
        checks.equal("broadcast_object_list", sent, [everybody[root], "text"])
        got = [None]
        dist.scatter_object_list(got, everybody if rank == root else None, src=root)
        checks.equal("scatter_object_list", got, [everybody[rank]])
        if size > 1 and rank == 0:
            dist.send_object_list([mine, 3], 1)
        elif rank == 1:
            got = [None, None]
            checks.equal("source of objects", dist.recv_object_list(got, 0), 0)
            checks.equal("recv_object_list", got, [everybody[0], 3])


@on_ranks(SEVERAL_RANKS)
def test_sequence_number_counts_collectives() -> None:
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))  # the group itself asks only torch's own backends
    numbers = [backend._get_sequence_number_for_group()]
    for seed, operation in enumerate(COLLECTIVES):
        prepare(operation, torch.float32, (3,), seed=seed, group=group).start(False)
        numbers.append(backend._get_sequence_number_for_group())
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, numbers)
    assert of_all == [numbers] * dist.get_world_size()
    counts = {name: after - before for name, before, after in zip(COLLECTIVES, numbers, numbers[1:])}
    assert min(counts.values()) > 0
    assert {name for name, count in counts.items() if count != 1} <= {*WITHOUT_WORK}


# Subgroups


@on_ranks(sizes([4], [2, 5]))
def test_subgroups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        # Overlapping groups: the even ranks, the odd ranks, all but the first, pairs of neighbors, and each rank alone.
        lists = [list(range(0, size, 2)), list(range(1, size, 2)), list(range(1, size))]
        lists += [[r, r + 1] for r in range(size - 1)] + [[r] for r in range(size)]
        groups = [(members, dist.new_group(members)) for members in lists]
        mine = [(members, group) for members, group in groups if rank in members]
        for operation in COLLECTIVES:
            for members, group in mine:
                root = sum(members) % len(members)
                ready = prepare(operation, torch.float32, (500,), seed=sum(members), root=root, group=group)
                ready.start(False)
                ready.verify(checks, f"{operation} in {members}")

        # One operation in each group is in flight together with one of the world; they are waited for in reverse order.
        whole = prepare("all_reduce", torch.float32, (5000,), seed=9)
        started = [(whole, whole.start(True))]
        for members, group in mine:
            ready = prepare("all_reduce", torch.float32, (5000,), seed=sum(members), group=group)
            started.append((ready, ready.start(True)))
        for ready, work in reversed(started):
            work.wait()
            ready.verify(checks, "operations of several groups in flight")

        # Messages name ranks of the world, also inside a group.
        members, group = mine[0]
        if len(members) > 1:
            place = members.index(rank)
            right, left = members[(place + 1) % len(members)], members[place - 1]
            output = torch.zeros(3)
            works = [
                dist.isend(torch.full((3,), float(rank)), right, group=group),
                dist.irecv(output, left, group=group),
            ]
            for work in works:
                work.wait()
            checks.equal("message in a group", output, torch.full((3,), float(left)))

        for _, group in mine:
            dist.destroy_process_group(group)
        ready = prepare("all_reduce", torch.float32, (10,))
        ready.start(False)
        ready.verify(checks, "the world after its subgroups are gone")


@on_ranks(SEVERAL_RANKS)
def test_threads_with_a_group_each() -> None:
    """Two threads of a process use one group each."""
    groups = [dist.new_group(), dist.new_group()]
    failures: list[BaseException] = []

    def work(group: dist.ProcessGroup, seed: int) -> None:
        try:
            with Checks() as checks:
                for step in range(30):
                    for operation in ("all_reduce", "all_gather", "broadcast"):
                        ready = prepare(operation, torch.float32, (3000,), seed=seed + step, group=group)
                        ready.start(False)
                        ready.verify(checks, f"{operation} {step}")
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(g, 100 * i)) for i, g in enumerate(groups)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]
