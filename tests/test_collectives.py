"""Compares every c10d operation with a single-process reference, over dtypes, sizes, layouts and numbers of ranks."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import WorldPool, exception_of, sizes
from operations import (
    COLLECTIVES,
    CUT_ALONG_ROWS,
    MOVING,
    REDUCING,
    ROOTED,
    WITHOUT_WORK,
    prepare,
    reduce_op,
    reductions,
    supported_dtypes,
    verify_reduction,
)
from reference import Checks, make_input, reduce, sum_in_rank_order
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

ranks = pytest.mark.parametrize("size", RANKS)
several_ranks = pytest.mark.parametrize("size", SEVERAL_RANKS)


# Reductions and data movement over types and sizes


def sweep_types(operation: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    seed = 0
    with Checks() as checks:
        for dtype in supported_dtypes(operation):
            for reduction in reductions(dtype) if operation in REDUCING else ["SUM"]:
                for numel in SMALL:
                    seed += 1
                    root = seed % size
                    ready = prepare(operation, dtype, (numel,), seed=seed, root=root, reduction=reduction)
                    ready.start(False)
                    name = f"{operation} {reduction}" if operation in REDUCING else operation
                    ready.verify(checks, f"{name} {dtype} of {numel} root {root} on rank {rank}")


def sweep(function: Callable[[str], None], operations: Sequence[str]) -> None:
    for operation in operations:
        function(operation)


@pytest.mark.parametrize("size", sizes([1, 4], [2, 3, 5]))
def test_types(worlds: WorldPool, size: int) -> None:
    worlds(size).run(sweep, sweep_types, COLLECTIVES, timeout=SWEEP_TIMEOUT)


def sweep_sizes(operation: str) -> None:
    size = dist.get_world_size()
    with Checks() as checks:
        for numel in LARGE:
            for seed, dtype in enumerate(d for d in LARGE_DTYPES if d in supported_dtypes(operation)):
                ready = prepare(operation, dtype, (numel,), seed=seed, root=seed % size)
                ready.start(False)
                ready.verify(checks, f"{operation} {dtype} of {numel}")
        for threshold in THRESHOLDS:
            for numel in (threshold - 1, threshold, threshold + 1, threshold // size, threshold // size + 1):
                ready = prepare(operation, torch.uint8, (numel,), seed=numel, root=numel % size)
                ready.start(False)
                ready.verify(checks, f"{operation} of {numel} bytes")


@pytest.mark.parametrize("size", sizes([1, 3], [2, 4, 5]))
def test_sizes(worlds: WorldPool, size: int) -> None:
    worlds(size).run(sweep, sweep_sizes, COLLECTIVES, timeout=SWEEP_TIMEOUT)


def sweep_roots(operation: str) -> None:
    with Checks() as checks:
        for root in range(dist.get_world_size()):
            for numel in MIXED_SIZES:
                ready = prepare(operation, torch.float32, (numel,), seed=root, root=root)
                ready.start(False)
                ready.verify(checks, f"{operation} of {numel} root {root}")


@several_ranks
def test_roots(worlds: WorldPool, size: int) -> None:
    worlds(size).run(sweep, sweep_roots, ROOTED, timeout=SWEEP_TIMEOUT)


def digests() -> list[str]:
    """Returns digests of rounding reductions. They must be equal on all ranks, or the ranks would drift apart."""
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for reduction in reductions(dtype):
            for numel in (7, 5_003, 70_001):
                ready = prepare("all_reduce", dtype, (numel,), seed=5, reduction=reduction)
                ready.start(False)
                digest = hashlib.sha256(ready.outputs[0].view(torch.uint8).numpy().tobytes()).hexdigest()
                found.append(f"{reduction} {dtype} of {numel}: {digest}")
    return found


@several_ranks
def test_all_ranks_get_the_same_bits(worlds: WorldPool, size: int) -> None:
    results = worlds(size).run(digests)
    for result in results[1:]:
        assert result == results[0]


def order_sensitive(rank: int, dtype: torch.dtype, numel: int) -> Tensor:
    """Returns values of such different magnitudes that another order of addition gives other bits almost everywhere."""
    generator = torch.Generator().manual_seed(rank)
    exponent = torch.randint(-6, 7, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 2.0**exponent).to(dtype)


def sums_in_rank_order() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for numel in (1, 2_500, 30_000, 120_000):
                inputs = [order_sensitive(r, dtype, numel * size) for r in range(size)]
                expected = sum_in_rank_order(inputs)
                mine = expected[rank * numel : (rank + 1) * numel]
                label = f"{dtype} of {numel}"

                tensor = inputs[rank].clone()
                dist.all_reduce(tensor)
                checks.equal(f"all_reduce {label}", tensor, expected)

                tensor = inputs[rank].clone()
                dist.reduce(tensor, size - 1)
                if rank == size - 1:
                    checks.equal(f"reduce {label}", tensor, expected)

                output = torch.zeros(numel, dtype=dtype)
                dist.reduce_scatter_tensor(output, inputs[rank])
                checks.equal(f"reduce_scatter_tensor {label}", output, mine)

                output = torch.zeros(numel, dtype=dtype)
                dist.reduce_scatter(output, list(inputs[rank].split(numel)))
                checks.equal(f"reduce_scatter {label}", output, mine)

                tensors = list(inputs[rank].clone().split(numel))
                dist.all_reduce_coalesced(tensors)
                checks.equal(f"all_reduce_coalesced {label}", torch.cat(tensors), expected)


@pytest.mark.parametrize("size", sizes([3, 4], [5]))
def test_sums_are_added_in_rank_order(worlds: WorldPool, size: int) -> None:
    worlds(size).run(sums_in_rank_order)


def half_sums() -> list[float]:
    """Sums 2048 + 1 + 1 + ...: float16 loses each 1, float32 loses none."""
    start = 2048.0 if dist.get_rank() == 0 else 1.0
    tensor = torch.full((3,), start, dtype=torch.float16)
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_half_precision_sums_round_once(worlds: WorldPool) -> None:
    assert worlds(5).run(half_sums) == [[2052.0] * 3] * 5


def premultiplied_by_a_tensor() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    op = dist._make_nccl_premul_sum(torch.tensor([0.25]))
    with Checks() as checks:
        inputs = [make_input(r, torch.float32, size * 10) for r in range(size)]
        expected = reduce(inputs, "PREMUL_SUM", 0.25)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, op)
        checks.close("all_reduce", tensor, expected)
        output = torch.zeros(10)
        dist.reduce_scatter_tensor(output, inputs[rank], op)
        checks.close("reduce_scatter_tensor", output, expected[rank * 10 : (rank + 1) * 10])


def test_premul_sum_with_a_tensor_factor(worlds: WorldPool) -> None:
    worlds(3).run(premultiplied_by_a_tensor)


# Shapes and layouts


def sweep_shapes(operation: str) -> None:
    shapes = [(0, 3), (2, 0), (3, 2, 2)] + ([] if operation in CUT_ALONG_ROWS else [()])
    with Checks() as checks:
        for dtype in (torch.float32, torch.complex64, torch.bool):
            for shape in shapes:
                if dtype in supported_dtypes(operation):
                    ready = prepare(operation, dtype, shape, seed=3)
                    ready.start(False)
                    ready.verify(checks, f"{operation} {dtype} of {shape}")


@several_ranks
def test_empty_and_zero_dimensional_tensors(worlds: WorldPool, size: int) -> None:
    worlds(size).run(sweep, sweep_shapes, COLLECTIVES, timeout=SWEEP_TIMEOUT)


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


# For these, c10d has always required contiguous tensors.
_MAY_REFUSE = ["all_to_all_single"]


def sweep_layouts(operation: str) -> None:
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "contiguous": torch.clone,
        "transposed": _transposed,
        "with gaps": _with_gaps,
        "with offset": _with_offset,
    }
    with Checks() as checks:
        for dtype in (torch.float32, torch.bool):
            for first, source in layouts.items():
                for second, destination in layouts.items():
                    label = f"{operation} {dtype} from {first} to {second}"
                    ready = prepare(operation, dtype, (4, 6), seed=2, source=source, destination=destination)
                    strides = [t.stride() for t in ready.outputs]
                    try:
                        ready.start(False)
                    except ValueError as error:
                        checks.true(f"{label}: {error}", operation in _MAY_REFUSE)
                        continue
                    ready.verify(checks, label)
                    checks.equal(f"{label}: strides", [t.stride() for t in ready.outputs], strides)
                    for tensor in ready.outputs:
                        if tensor.stride(-1) == 2:
                            checks.true(f"{label}: between the elements", _gaps_kept(tensor))


def test_layouts(worlds: WorldPool) -> None:
    worlds(3).run(sweep, sweep_layouts, COLLECTIVES, timeout=SWEEP_TIMEOUT)


def overlapping_outputs() -> list[str]:
    """Returns the operations that wrote several elements to one place instead of raising an error."""
    size = dist.get_world_size()
    ones, whole = torch.ones(2, 3), torch.ones(2 * size, 3)

    def expanded(rows: int = 2) -> Tensor:
        return torch.zeros(1, 3).expand(rows, 3)

    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather([expanded() for _ in range(size)], ones),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(expanded(2 * size), ones),
        "reduce_scatter": lambda: dist.reduce_scatter(expanded(), [ones] * size),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(expanded(), whole),
        "all_to_all": lambda: dist.all_to_all([expanded() for _ in range(size)], [ones] * size),
    }
    calls |= {
        "all_reduce": lambda: dist.all_reduce(expanded()),
        "broadcast": lambda: dist.broadcast(expanded(), 0),
        "reduce": lambda: dist.reduce(expanded(), 0),
        "scatter": lambda: dist.scatter(expanded(), [ones] * size if dist.get_rank() == 0 else None, 0),
        "all_to_all_single": lambda: dist.all_to_all_single(expanded(2 * size), whole),
    }
    accepted = []
    for name, call in calls.items():
        try:
            call()
            accepted.append(name)
        except ValueError:
            pass
    return accepted


def test_outputs_that_overlap_themselves_are_refused(worlds: WorldPool) -> None:
    assert worlds(2).run(overlapping_outputs) == [[], []]


def in_place_forms() -> None:
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


@several_ranks
def test_output_that_is_a_part_of_the_input_or_holds_it(worlds: WorldPool, size: int) -> None:
    worlds(size).run(in_place_forms)


def stacked_forms() -> None:
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


@several_ranks
def test_into_tensor_forms_that_stack(worlds: WorldPool, size: int) -> None:
    worlds(size).run(stacked_forms)


# Unequal parts


def uneven_parts() -> None:
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


@ranks
def test_uneven_parts(worlds: WorldPool, size: int) -> None:
    worlds(size).run(uneven_parts)


# Coalesced and functional forms


def coalesced(async_ops: bool) -> None:
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


@several_ranks
@pytest.mark.parametrize("async_ops", [False, True])
def test_coalescing_manager(worlds: WorldPool, size: int, async_ops: bool) -> None:
    worlds(size).run(coalesced, async_ops)


def functional_forms() -> None:
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


@several_ranks
def test_functional_collectives(worlds: WorldPool, size: int) -> None:
    worlds(size).run(functional_forms)


# Work and Future


def _wait_by_polling(work: dist.Work) -> None:
    deadline = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline, "is_completed() stays False"
        time.sleep(0.001)
    work.wait()


def _wait_for_future(work: dist.Work) -> None:
    # Without a call of work.wait(), the backend has to complete the operation by itself.
    work.get_future().wait()


_WAYS_TO_WAIT: dict[str, Callable[[dist.Work], object]] = {
    "wait": lambda work: work.wait(),
    "poll": _wait_by_polling,
    "future": _wait_for_future,
}


def asynchronous(operation: str) -> None:
    with Checks() as checks:
        for seed, (way, finish) in enumerate(_WAYS_TO_WAIT.items()):
            for numel in MIXED_SIZES:
                label = f"{operation} of {numel} by {way}"
                ready = prepare(operation, torch.float32, (numel,), seed=seed)
                work = ready.start(True)
                if operation in WITHOUT_WORK:
                    work.wait()
                    ready.verify(checks, label)
                    continue
                finish(work)
                ready.verify(checks, label)
                checks.true(f"{label}: a second wait", work.wait())
                checks.true(f"{label}: is_completed", work.is_completed())
                checks.true(f"{label}: is_success", work.is_success())
                checks.equal(f"{label}: exception", exception_of(work), None)
                future = work.get_future()
                checks.true(f"{label}: future.done", future.done())
                if ready.outputs:
                    result = torch.cat([t.reshape(-1) for t in work.result()])
                    outputs = torch.cat([t.reshape(-1) for t in ready.outputs])
                    checks.equal(f"{label}: result", result, outputs)
                    value = torch.cat([t.reshape(-1) for t in future.value()])
                    checks.equal(f"{label}: value of the future", value, outputs)


@pytest.mark.parametrize("size", [1, 3])
def test_work_and_future(worlds: WorldPool, size: int) -> None:
    worlds(size).run(sweep, asynchronous, COLLECTIVES, timeout=SWEEP_TIMEOUT)


def late_peer() -> None:
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


@several_ranks
def test_future_of_an_operation_that_waits_for_a_peer(worlds: WorldPool, size: int) -> None:
    worlds(size).run(late_peer)


def in_flight(order: str) -> None:
    chooser = random.Random(7 + dist.get_rank())
    with Checks() as checks:
        started = []
        for seed in range(3):
            for operation in COLLECTIVES:
                numel = MIXED_SIZES[(seed + len(started)) % 3]
                root = seed % dist.get_world_size()
                ready = prepare(operation, torch.float32, (numel,), seed=seed, root=root)
                started.append((f"{operation} of {numel}, {seed}", ready, ready.start(True)))
        if order == "reverse":
            started.reverse()
        elif order == "shuffled":  # in a different order on each rank
            chooser.shuffle(started)
        for label, ready, work in started:
            work.wait()
            ready.verify(checks, label)


@several_ranks
@pytest.mark.parametrize("order", ["program", "reverse", "shuffled"])
def test_many_operations_in_flight(worlds: WorldPool, size: int, order: str) -> None:
    worlds(size).run(in_flight, order)


def forgotten_tensors() -> None:
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


@several_ranks
def test_tensors_dropped_while_in_flight(worlds: WorldPool, size: int) -> None:
    worlds(size).run(forgotten_tensors)


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
    worlds(size).run(exchange_with_next, supported_dtypes("send"), SMALL)
    worlds(size).run(exchange_with_next, [torch.float32, torch.uint8], LARGE)
    worlds(size).run(exchange_with_next, [torch.uint8], [t + d for t in THRESHOLDS for d in (-1, 0, 1)])


def blocking_pairs() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        for shape in [(), (0,), (2, 3), (1000,), (100_000,)]:
            for giver in range(size):
                getter = (giver + 1) % size
                if rank == giver:
                    dist.send(make_input(giver, torch.float64, shape), getter)
                elif rank == getter:
                    output = torch.zeros(shape, dtype=torch.float64)
                    checks.equal("source", dist.recv(output, giver), giver)
                    checks.equal(f"{shape} from {giver}", output, make_input(giver, torch.float64, shape))


@several_ranks
def test_blocking_send_recv(worlds: WorldPool, size: int) -> None:
    worlds(size).run(blocking_pairs)


def tags_out_of_order() -> None:
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


@pytest.mark.parametrize("size", [2, 3])
def test_tags_out_of_order(worlds: WorldPool, size: int) -> None:
    worlds(size).run(tags_out_of_order)


def from_any_source() -> None:
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


@several_ranks
def test_recv_from_any_source(worlds: WorldPool, size: int) -> None:
    worlds(size).run(from_any_source)


def batch_with_everybody() -> None:
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


@several_ranks
def test_batch_isend_irecv(worlds: WorldPool, size: int) -> None:
    worlds(size).run(batch_with_everybody)


def strided_messages() -> str:
    rank = dist.get_rank()
    tensor = _with_gaps(make_input(0, torch.float32, (4, 6)))
    output = _with_gaps(torch.zeros(4, 6))
    try:
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(output, 0)
    except ValueError:
        return "refused"
    if rank:
        assert output.equal(tensor) and _gaps_kept(output)
    return "right"


def test_strided_messages_are_right_or_refused(worlds: WorldPool) -> None:
    results = worlds(2).run(strided_messages)
    assert results in (["right", "right"], ["refused", "refused"])


def messages_among_collectives() -> None:
    """Messages and collectives of one group do not receive each other's data, in any order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    with Checks() as checks:
        for step in range(5):
            output = torch.zeros(500)
            receive = dist.irecv(output, left)
            reduced = prepare("all_reduce", torch.float32, (500,), seed=step)
            work = reduced.start(True)
            send = dist.isend(make_input(rank, torch.float32, 500, 50 + step), right)
            moved = prepare("broadcast", torch.float32, (500,), seed=step, root=step % size)
            moved.start(False)
            for pending in (receive, work, send):
                pending.wait()
            checks.equal(f"message {step}", output, make_input(left, torch.float32, 500, 50 + step))
            reduced.verify(checks, f"all_reduce {step}")
            moved.verify(checks, f"broadcast {step}")


@several_ranks
def test_messages_among_collectives(worlds: WorldPool, size: int) -> None:
    worlds(size).run(messages_among_collectives)


# Barrier, objects, sequence numbers


def timed_barrier(late: int, async_op: bool) -> tuple[float, float]:
    rank = dist.get_rank()
    dist.barrier()
    if rank == late:
        time.sleep(0.1)
    before = time.monotonic()
    work = dist.barrier(async_op=async_op)
    if async_op:
        work.wait()
    return before, time.monotonic()


@ranks
def test_barrier(worlds: WorldPool, size: int) -> None:
    for late in {0, size - 1}:
        for async_op in (False, True):
            times = worlds(size).run(timed_barrier, late, async_op)
            assert max(before for before, _ in times) <= min(after for _, after in times)


def objects() -> None:
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


@ranks
def test_object_collectives(worlds: WorldPool, size: int) -> None:
    worlds(size).run(objects)


def sequence_numbers() -> list[int]:
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))  # the group itself asks only torch's own backends
    numbers = [backend._get_sequence_number_for_group()]
    for seed, operation in enumerate(COLLECTIVES):
        ready = prepare(operation, torch.float32, (3,), seed=seed, group=group)
        ready.start(False)
        numbers.append(backend._get_sequence_number_for_group())
    dist.barrier(group)
    numbers.append(backend._get_sequence_number_for_group())
    return numbers


@several_ranks
def test_sequence_number_counts_collectives(worlds: WorldPool, size: int) -> None:
    results = worlds(size).run(sequence_numbers)
    assert results == [results[0]] * size
    assert results[0] == sorted(set(results[0]))
    names = [*COLLECTIVES, "barrier"]
    counted = dict(zip(names, (after - before for before, after in zip(results[0], results[0][1:]))))
    assert {name for name, count in counted.items() if count != 1} <= {n for n in names if "coalesced" in n}


# Subgroups


def subgroups() -> None:
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


@pytest.mark.parametrize("size", sizes([4], [2, 5]))
def test_subgroups(worlds: WorldPool, size: int) -> None:
    worlds(size).run(subgroups)


def threads() -> None:
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


@several_ranks
def test_threads_with_a_group_each(worlds: WorldPool, size: int) -> None:
    worlds(size).run(threads)


def mixed_rounds() -> None:
    """In a long run of different operations, nothing drifts, leaks or gets stuck."""
    chooser = random.Random(3)
    with Checks() as checks:
        for step in range(150):
            operation = chooser.choice(REDUCING + MOVING)
            numel = chooser.choice([0, 1, 33, 1025, 9_000])
            root = chooser.randrange(dist.get_world_size())
            ready = prepare(operation, torch.float64, (numel,), seed=step % 5, root=root)
            work = ready.start(chooser.random() < 0.5)
            if work is not None:
                work.wait()
            ready.verify(checks, f"step {step}: {operation} of {numel} root {root}")


@ranks
def test_long_mixed_run(worlds: WorldPool, size: int) -> None:
    worlds(size).run(mixed_rounds)
