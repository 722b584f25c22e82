"""Tests fog's own operations on a device: streams, memory, messages and failures, on the fake device.

The fake device does its work only when a test lets it, so a missing wait gives a wrong number every time.
test_device_operations.py compares random exchanges with their sums.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import device_double
import fogdist
import fogdist.bluefog.torch as bf
import pytest
import torch
import torch.distributed as dist
from device_double import DEVICE, current_stream, held
from fogdist import topology as topologies
from harness import error_of, on_ranks
from operations import reduce_op, reductions
from reference import COMPLEX, DTYPES, FLOATS, Checks, make_input
from torch import Tensor

from fog_pg._C import NeighborPlan

pytestmark = pytest.mark.usefixtures("compiled_double")

KNOWS_OF_CAPTURES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def new_backend(made: list[Any] | None = None) -> Any:
    """Returns fog's object of a new group of all ranks."""
    device_double.load()
    device_double.serve_groups(made)
    group = dist.new_group()
    return group._get_backend(torch.device("cpu"))


def result(work: Any) -> list[Tensor]:
    assert work.wait()
    tensors: list[Tensor] = work.result()
    return tensors


def plan_of(sources: Any, destinations: Any, own: float = 1.0) -> NeighborPlan:
    """Returns a plan of this rank; destinations without weights have 1."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if not isinstance(destinations, dict):
        destinations = {peer: 1.0 for peer in destinations if peer != rank}
    return NeighborPlan(rank, size, own, [*sources], [*destinations.items()])


def ring_plan() -> NeighborPlan:
    rank, size = dist.get_rank(), dist.get_world_size()
    return plan_of([((rank - 1) % size, 0.25)], [(rank + 1) % size], 0.5)


@on_ranks(3)
def test_in_place() -> None:
    fog, rank, size = new_backend(), dist.get_rank(), dist.get_world_size()
    plan = plan_of([(r, 1 + r / 8) for r in range(size) if r != rank], range(size))
    everyone = [list(range(size))]
    with Checks() as checks:
        for layout in ("adjacent", "apart", "transposed"):
            mine = [make_input(rank, torch.float32, (5, 4), k) for k in range(3)]
            expected = result(fog.neighbor_allreduce(mine, plan))
            there = [t.to(DEVICE) for t in mine]
            if layout == "adjacent":
                flat = torch.cat([t.flatten() for t in there])
                there = [part.view(5, 4) for part in flat.chunk(3)]
            elif layout == "transposed":
                there = [t.t().contiguous().t() for t in there]
            addresses = [t.data_ptr() for t in there]
            outputs = result(fog.neighbor_allreduce(there, plan, output=there))
            # sums have other bits than on the CPU: they are added in float32, and in another order
            checks.close(layout, outputs, expected)
            checks.equal(f"{layout} place", [t.data_ptr() for t in outputs], addresses)
        for dtype, name in [(each, name) for each in DTYPES for name in reductions(each)]:
            mine = make_input(rank, dtype, (4, 5))
            there = mine.to(DEVICE)
            for given in (mine, there):
                result(fog.local_allreduce(given, everyone, reduce_op(name)))
            checks.equal(f"{dtype} {name}", there.cpu(), mine)
        there = make_input(rank, torch.float32, (4, 3)).to(DEVICE).t()
        result(fog.broadcast_named(there, 0, name="root"))
        checks.equal("broadcast", there.cpu(), make_input(0, torch.float32, (4, 3)).t())


@on_ranks(3)
def test_what_has_weight_0_is_left_out() -> None:
    """Even if it is NaN: the tensor of a neighbor, with 0 on either side, and the own one."""
    fog, rank, size = new_backend(), dist.get_rank(), dist.get_world_size()
    others = [other for other in range(size) if other != rank]
    silent = 0  # the rank whose tensor is NaN
    with Checks() as checks:
        for dtype, numel in itertools.product([*FLOATS, *COMPLEX], (1, 1003)):
            mine = torch.full((numel,), float("nan") if rank == silent else 1.0, dtype=dtype, device=DEVICE)
            own = 0.0 if rank == silent else 0.25
            heard = 0.5 * len([other for other in others if other != silent])
            for where, sent, received in (("received", 1.0, 0.0), ("sent", 0.0, 0.5)):
                plan = plan_of(
                    [(other, received if other == silent else 0.5) for other in others],
                    {other: sent if rank == silent else 1.0 for other in others},
                    own,
                )
                place = mine.clone()
                for output in (torch.full_like(mine, float("nan")), place):
                    given = place if output is place else mine
                    result(fog.neighbor_allreduce(given, plan, output=output))
                    checks.equal(f"{dtype} {numel} {where}", output, torch.full_like(mine, own + heard))
            alone = torch.ones(numel, dtype=dtype, device=DEVICE)
            (output,) = result(fog.neighbor_allreduce(alone, plan_of([], [], 0.5)))
            checks.equal(f"{dtype} {numel} without neighbors", output, alone / 2)


@on_ranks([2, 3])
def test_one_group_of_messages_an_exchange() -> None:
    """An exchange is one group of the delegate's messages, with one for each peer; of a long vector, one for each 32 MiB."""
    made: list[Any] = []
    fog, rank, size = new_backend(made=made), dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    ring, alone = ring_plan(), plan_of([], [], 0.5)

    def seen() -> list[Any]:
        (delegate,) = made
        groups = [
            [(part["name"], part["peer"], part["tensors"][0][0]) for part in call["calls"]]
            for call in delegate.calls
            if call["name"] == "coalesced"
        ]
        assert len(groups) == len(delegate.calls), delegate.calls
        delegate.clear()
        return groups

    with Checks() as checks:
        x = torch.ones(3, device=DEVICE)
        # In the first exchange, ranks without a peer take part in connecting, by a message to themselves.
        first = plan_of([(0, 1.0)] if rank == 1 else [], [1] if rank == 0 else [])
        result(fog.neighbor_allreduce(x, first, confirm=False))
        itself = [("send", rank, (1,)), ("recv", rank, (1,))]
        expected = {0: [("send", 1, (12,))], 1: [("recv", 0, (12,))]}.get(rank, itself)
        checks.equal("first", seen(), [expected])
        checks.equal("connected", made[0].connected, [""])
        result(fog.neighbor_allreduce(x, alone))
        checks.equal("nobody", seen(), [])
        result(fog.neighbor_allreduce(x, ring))
        checks.equal("ring", seen(), [[("send", after, (12,)), ("recv", before, (12,))]])
        several = [x, torch.ones(5, dtype=torch.bfloat16, device=DEVICE), x.clone(), x.double()]
        result(fog.neighbor_allreduce(several, ring))
        sizes = [(24,), (10,), (24,)]
        checks.equal(
            "list", seen(), [[("send", after, s) for s in sizes] + [("recv", before, s) for s in sizes]]
        )
        outputs = result(fog.neighbor_allreduce([torch.ones(2**23 + 1, device=DEVICE), x, several[1]], ring))
        rounds = [[2**25, 10], [16]]
        expected = [
            [(way, peer, (n,)) for way, peer in (("send", after), ("recv", before)) for n in sizes]
            for sizes in rounds
        ]
        checks.equal("rounds", seen(), expected)
        checks.equal("sums of rounds", [set(each.tolist()) for each in outputs], [{0.75}] * 3)
        result(fog.allgather_concat(x))
        others = [r for r in range(size) if r != rank]
        checks.equal(
            "gather", seen(), [[("send", r, (12,)) for r in others] + [("recv", r, (12,)) for r in others]]
        )
        everyone = [list(range(size))]
        one_machine = NeighborPlan(0, 1, 1.0, [], [])
        result(fog.hierarchical_neighbor_allreduce(torch.ones(64, device=DEVICE), everyone, one_machine))
        checks.equal("hierarchical", [len(group) for group in seen()], [2 * (size - 1)] * 2)


def event_now() -> torch.Event:
    event = torch.Event(device=DEVICE)
    event.record(current_stream())
    return event


@on_ranks(3)
def test_nobody_reads_early() -> None:
    made: list[Any] = []
    fog, rank, size = new_backend(made=made), dist.get_rank(), dist.get_world_size()
    plan, before = ring_plan(), (rank - 1) % size
    result(fog.neighbor_allreduce(torch.ones(2, device=DEVICE), plan))  # connects the delegate
    double = device_double.load()
    x, out = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    torch.accelerator.synchronize()
    with Checks() as checks:
        # At the time of the call, the program has not written x yet.
        with held(current_stream()):
            event_now()  # the stream is busy
            work = fog.neighbor_allreduce(x, plan, output=out, confirm=False)
            second = fog.neighbor_allreduce(
                out, plan, output=out, confirm=False
            )  # of the results that the first exchange will write
            checks.true("not complete", not work.is_completed() and not second.is_completed())
            work.wait()  # the host does not wait
            second.wait()
            double.host_view(x).fill_(rank + 1)  # as a kernel of the program would when it runs
        once = [0.5 * (r + 1) + 0.25 * ((r - 1) % size + 1) for r in range(size)]
        checks.equal("sums", out.cpu(), torch.full((1000,), 0.5 * once[rank] + 0.25 * once[before]))
        checks.true("complete", work.is_completed() and second.is_success())
        # Now the messages are delayed.
        x.fill_(rank + 1)
        dist.barrier()
        with held(made[0].stream):
            work = fog.neighbor_allreduce(x, plan, output=out, confirm=False)
            checks.true("the program's stream goes on", _happens(event_now()))
            future = work.get_future()
            checks.true("marked at once", future.done())
            checks.true("not complete", not work.is_completed())
            other = torch.Stream(device=DEVICE)
            with other:
                work.block_current_stream()  # orders streams as wait() does
                blocked = event_now()
            work.wait()
            after = event_now()
            checks.true("the program's streams wait", not after.query() and not blocked.query())
        after.synchronize()
        blocked.synchronize()
        checks.equal("sum", out.cpu(), torch.full((1000,), once[rank]))


def _happens(event: torch.Event) -> bool:
    event.synchronize()
    return event.query()


@on_ranks(2)
def test_the_allocator_hears_of_its_own_memory_only() -> None:
    """Torch's allocator is told which stream uses its memory; memory of another library is unknown to it."""
    device_double.load()
    device_double.serve_groups()
    fogdist.init(topologies.ring)
    fog: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    plan = ring_plan()
    own, foreign = torch.ones(100, device=DEVICE), device_double.load().foreign_memory(100)
    used = []
    for tensor in (own, foreign):
        device_double.load().clear_stream_log()
        work = fog.neighbor_allreduce(tensor, plan, output=tensor, confirm=False)
        torch.accelerator.synchronize()
        del work  # without a wait
        gc.collect()
        uses = {number for what, _, _, number in device_double.load().stream_log() if what == "use"}
        used.append(tensor.untyped_storage().data_ptr() in uses)
    assert used == [True, False]


@on_ranks(2)
def test_what_is_launched_is_in_the_operation_s_range() -> None:
    """In a trace, the work that an operation gives to the device is within the operation's range."""
    fog, plan = new_backend(), ring_plan()
    x = torch.ones(4, 3, device=DEVICE)
    result(fog.neighbor_allreduce(x, plan, confirm=False))
    with torch.profiler.profile(record_shapes=True) as profile:
        result(fog.neighbor_allreduce(x, plan, confirm=False))
    events = profile.events()
    (ours,) = [event for event in events if event.name == "fog:neighbor_allreduce"]
    begun = {event.name: event.time_range.start for event in events}
    begin, end = ours.time_range.start, ours.time_range.end
    inside = {name for name, time in begun.items() if begin <= time <= end}
    assert inside >= {"double", "aten::addmv"}, (begin, end, begun)
    assert ours.input_shapes == [[4, 3]]


@on_ranks(2, waits=["never", "here", "on another stream"])
def test_memory_is_not_used_again_early(waits: str) -> None:
    """The program drops its tensors and the handle of the operation at once."""
    made: list[Any] = []
    fog, rank, size = new_backend(made=made), dist.get_rank(), dist.get_world_size()
    plan, before = ring_plan(), (rank - 1) % size
    result(fog.neighbor_allreduce(torch.ones(2, device=DEVICE), plan))
    double = device_double.load()
    torch.accelerator.synchronize()
    written = double.written_after_free()
    with Checks() as checks:
        x = torch.full((1000,), float(rank + 1), device=DEVICE)
        out = torch.zeros(1000, device=DEVICE)
        torch.accelerator.synchronize()
        other = torch.Stream(device=DEVICE)
        with held(made[0].stream):
            work = fog.neighbor_allreduce(x, plan, output=out, confirm=False)
            if waits == "here":
                work.wait()
            elif waits == "on another stream":
                with other:
                    work.wait()
            del x, work
            gc.collect()
            # These take the freed memory, if there is any.
            for _ in range(20):
                torch.empty(1000, device=DEVICE)
        torch.accelerator.synchronize()
        other.synchronize()
        dist.barrier()
        deadline = time.monotonic() + 20  # without a wait, the side stream may still be at work
        while not (double.host_view(out) != 0).all() and time.monotonic() < deadline:
            time.sleep(0.01)
        checks.equal("sum", out.cpu(), torch.full((1000,), 0.5 * (rank + 1) + 0.25 * (before + 1)))
        # A returned tensor belongs to the program's stream: it can be freed while that stream reads it.
        (fresh,) = result(fog.neighbor_allreduce(out, plan))
        view = double.host_view(fresh)
        torch.accelerator.synchronize()
        kept = view.clone()
        with held(current_stream()):
            event_now()
            del fresh
            gc.collect()
            checks.equal("result", view, kept)
        torch.accelerator.synchronize()
        checks.equal("nothing is written to freed memory", double.written_after_free(), written)


@on_ranks(3)
def test_fogdist() -> None:
    device_double.load()
    device_double.serve_groups()
    fogdist.init(topologies.ring)
    rank, size = fogdist.rank(), fogdist.size()

    calls: dict[str, Callable[[Any], Any]] = {
        "allgather": lambda x: bf.allgather(x[rank:]),
        "allreduce": bf.allreduce,
        "allreduce strided": lambda x: bf.allreduce_(x.clone().t()),
        "local allreduce": lambda x: bf.allreduce(x, is_hierarchical_local=True),
        "broadcast": lambda x: bf.broadcast(x, size - 1),
        "strided": lambda x: fogdist.neighbor_allreduce(x.t()),
    }
    with Checks() as checks:
        for name, call in calls.items():
            mine = make_input(rank, torch.float32, (4, 6))
            expected = call(mine)
            output = call(mine.to(DEVICE))
            checks.equal(f"{name} device", output.device.type, DEVICE)
            checks.close(name, output.cpu(), expected)


@on_ranks(2)
def test_failures() -> None:
    made: list[Any] = []
    fog, plan = new_backend(made=made), ring_plan()
    x = torch.ones(4, device=DEVICE)
    result(fog.neighbor_allreduce(x, plan))
    with Checks() as checks:
        made[0].fail_next("the link is down", at_once=True)
        try:
            fog.neighbor_allreduce(x, plan, confirm=False)
            checks.true("raises at once", False)
        except dist.DistBackendError as error:
            checks.true(
                f"at once: {error}",
                "neighbor_allreduce #2 of group" in str(error) and "the link is down" in str(error),
            )
        made[0].fail_next("the link went down")
        with held(made[0].stream):
            work = fog.neighbor_allreduce(x, plan, confirm=False)
        torch.accelerator.synchronize()
        made[0].stream.synchronize()
        # wait() does not query the device, because the stream may be captured, so it does not know of the failure
        work.wait()
        checks.true("complete", work.is_completed())
        try:
            work.wait()
            checks.true("raises", False)
        except dist.DistBackendError as error:
            text = str(error)
            checks.true(
                text,
                "neighbor_allreduce #3 of group" in text and f"on {DEVICE}:0" in text and "went down" in text,
            )
        made[0].fail_next("the link went down again")
        work = fog.neighbor_allreduce(x, plan, confirm=False)
        torch.accelerator.synchronize()
        made[0].stream.synchronize()
        checks.true("no success", not work.is_success())
        # On a captured stream, only operations that were called before are allowed.
        stream = current_stream()
        double = device_double.load()
        double.set_capturing(stream.device_index, stream.stream_id, True)
        try:
            work = fog.neighbor_allreduce(x, plan, confirm=False)
            another = new_backend()
            try:
                another.neighbor_allreduce(x, plan, confirm=False)
                checks.true("capture raises", not KNOWS_OF_CAPTURES)
            except RuntimeError as error:
                checks.true(
                    f"capture: {error}", "cannot be captured into a graph: run it once before" in str(error)
                )
        finally:
            double.set_capturing(stream.device_index, stream.stream_id, False)
        # The operation raises an error in a coalesced group, whatever else is in the group.
        fog._start_coalescing()
        try:
            fog.neighbor_allreduce(x, plan)
            checks.true("coalesced raises", False)
        except ValueError as error:
            checks.true(f"coalesced: {error}", "cannot be coalesced" in str(error))
        fog._end_coalescing()


@on_ranks(2)
def test_wrong_arguments() -> None:
    """The errors come before anything is sent, so the other rank takes no part."""
    made: list[Any] = []
    fog, plan, x = new_backend(made), ring_plan(), torch.ones(3, device=DEVICE)
    whole, numbers = torch.ones(2, dtype=torch.int32, device=DEVICE), x.expand(2, 3)
    result(fog.neighbor_allreduce(x, plan))
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("got dtype int32", lambda: fog.neighbor_allreduce(whole, plan)),
        (r"tensor\[1\]: got a tensor on", lambda: fog.neighbor_allreduce([x, x.to("meta")], plan)),
        ("output: got shape", lambda: fog.neighbor_allreduce(x, plan, output=x[:2])),
        ("output: shares memory", lambda: fog.neighbor_allreduce(x[:2], plan, output=x[1:])),
        ("output: .*share", lambda: fog.neighbor_allreduce(numbers.clone(), plan, output=numbers)),
        ("without dimensions", lambda: fog.allgather_concat(x[0])),
        ("machines: rank 1 is missing", lambda: fog.local_allreduce(x, [[0]], dist.ReduceOp.SUM)),
        ("got AVG for dtype bool", lambda: fog.allreduce_named(x.bool(), dist.ReduceOp.AVG)),
        ("root: got rank 2", lambda: fog.broadcast_named(x, 2)),
    ]
    made[0].clear()
    for message, call in calls if dist.get_rank() == 0 else []:
        with pytest.raises(ValueError, match=message):
            call()
    assert made[0].calls == []
    result(fog.neighbor_allreduce(x, plan))  # the backend still works


def disagreement(kind: str) -> str:
    fog, rank, plan = new_backend(), dist.get_rank(), ring_plan()
    x = torch.ones(3 + rank) if kind == "shape" else torch.ones(3, dtype=[torch.float32, torch.float64][rank])
    if kind == "columns":
        return error_of(lambda: fog.neighbor_allgather(torch.ones(2, 2 + rank, device=DEVICE), plan))
    return error_of(lambda: fog.neighbor_allreduce(x.to(DEVICE), plan, confirm=True))


@pytest.mark.parametrize("kind", ["shape", "dtype", "columns"])
def test_ranks_that_disagree(new_world, kind):
    # The check is made before the delegate's messages, with `confirm`, or if ranks exchange numbers of rows.
    for text in new_world(2).run(disagreement, kind):
        assert "ranks disagree" in text


@on_ranks(2)
def test_the_operator_serves_every_device() -> None:
    """It has kernels for all devices, because torch.compile traces it for tensors of other devices."""
    for key in ("CPU", "CUDA", "PrivateUse1"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key("fog::neighbor_allreduce", key), key
