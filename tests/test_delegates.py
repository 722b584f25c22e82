"""Every collective of device tensors reaches the group's delegate once, with the caller's arguments."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import device_double
import pytest
import torch
import torch.distributed as dist
from device_double import DEVICE, held
from harness import World, on_ranks
from operations import prepare
from reference import Checks

pytestmark = pytest.mark.usefixtures("compiled_double")

RANKS = 3
BACKENDS = f"cpu:fog,{DEVICE}:fog"
Made = list[Any]
Operation = Callable[[Any, str], list[torch.Tensor]]


def start(**options: Any) -> tuple[Any, Made]:
    """Returns a new group of all ranks, and the list of the delegates that it will make."""
    made: Made = []
    device_double.load()
    device_double.serve_groups(made)
    return dist.new_group(backend=BACKENDS, **options), made


def backend_of(group: Any) -> Any:
    return group._get_backend(torch.device(DEVICE))


def own(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns numbers that differ between ranks and elements."""
    numel = int(torch.Size(shape).numel())
    return (torch.arange(numel, dtype=dtype) + 10 * (dist.get_rank() + 1)).view(shape).to(device)


def zeros(device: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=device)


# --- every operation ---


def collective(name: str, group: Any, device: str, **options: Any) -> list[torch.Tensor]:
    """Runs a collective on a type of device, and compares its results with their reference."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    options = {"dtype": torch.float32, **options}
    ready = prepare(name, shape=(4,), group=group, source=moved, destination=moved, **options)
    ready.start(False)
    with Checks() as checks:
        ready.verify(checks, name)
    return ready.outputs


def all_gather_into_tensor_coalesced(group: Any, device: str) -> list[torch.Tensor]:
    outputs = [zeros(device, RANKS * 2), zeros(device, RANKS)]
    group.allgather_into_tensor_coalesced(outputs, [own(device, 2), own(device, 1)]).wait()
    return outputs


def reduce_scatter_tensor_coalesced(group: Any, device: str) -> list[torch.Tensor]:
    outputs = [zeros(device, 2), zeros(device, 1)]
    inputs = [own(device, RANKS * 2), own(device, RANKS)]
    group.reduce_scatter_tensor_coalesced(outputs, inputs, dist.ReduceScatterOptions()).wait()
    return outputs


def all_to_all_of_other_sizes(group: Any, device: str) -> list[torch.Tensor]:
    rank = dist.get_rank()
    output = zeros(device, RANKS * (rank + 1))
    sizes = [peer + 1 for peer in range(RANKS)]
    dist.all_to_all_single(output, own(device, sum(sizes)), [rank + 1] * RANKS, sizes, group=group)
    return [output]


def exchange_messages(group: Any, device: str) -> list[torch.Tensor]:
    rank, received = dist.get_rank(), zeros(device, 4)
    messages = [
        dist.P2POp(dist.isend, own(device, 4), (rank + 1) % RANKS, group=group),
        dist.P2POp(dist.irecv, received, (rank - 1) % RANKS, group=group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [received]


def of(name: str, **options: Any) -> Operation:
    return functools.partial(collective, name, **options)


# Of each operation: how the program calls it, the delegate's operation, and some of the options there.
EVERY: list[tuple[Operation, str, dict[str, Any]]] = [
    (of("all_reduce", reduction="MAX"), "allreduce", {"async": False, "op": "MAX"}),
    (of("all_reduce", reduction="AVG"), "allreduce", {"op": "AVG"}),
    (of("all_reduce", dtype=torch.int64, reduction="PRODUCT"), "allreduce", {"op": "PRODUCT"}),
    (of("all_reduce_coalesced"), "allreduce_coalesced", {"op": "SUM"}),
    (of("broadcast", root=2), "broadcast", {"async": False, "root": 2}),
    (of("reduce", root=1), "reduce", {"async": False, "op": "SUM", "root": 1}),
    (of("all_gather"), "allgather", {"async": False}),
    (of("all_gather_into_tensor"), "_allgather_base", {"async": False}),
    (all_gather_into_tensor_coalesced, "allgather_into_tensor_coalesced", {"async": True}),
    (of("gather", root=1), "gather", {"async": False, "root": 1}),
    (of("scatter", root=1), "scatter", {"async": False, "root": 1}),
    (of("reduce_scatter"), "reduce_scatter", {"async": False, "op": "SUM"}),
    (of("reduce_scatter_tensor", reduction="MIN"), "_reduce_scatter_base", {"async": False, "op": "MIN"}),
    (reduce_scatter_tensor_coalesced, "reduce_scatter_tensor_coalesced", {"async": True, "op": "SUM"}),
    (all_to_all_of_other_sizes, "alltoall_base", {"async": False, "input_splits": [1, 2, 3]}),
    (of("all_to_all"), "alltoall", {"async": False}),
    (exchange_messages, "coalesced", {}),
]


@on_ranks(RANKS)
def test_every_operation_reaches_the_delegate_once_and_unchanged() -> None:
    group, made = start()
    with Checks() as checks:
        for operation, name, given in EVERY:
            label, options = f"{name} {given}", given if name == "coalesced" else {**given, "timeout": -1}
            expected = operation(group, "cpu")  # which the delegate does not see
            found = operation(group, DEVICE)
            (delegate,) = made
            checks.equal(f"{label}: calls", [call["name"] for call in delegate.calls], [name])
            call = delegate.calls[0]
            checks.equal(f"{label}: options", {key: call[key] for key in options}, options)
            checks.equal(f"{label}: device", {str(each.device) for each in found} - {f"{DEVICE}:0"}, set())
            checks.close(label, [each.cpu() for each in found], expected)
            delegate.clear()
    dist.destroy_process_group(group)


@on_ranks(RANKS)
def test_two_ranks_exchange_messages_without_the_third() -> None:
    group, made = start()
    rank = dist.get_rank()
    if rank == 0:
        dist.send(own(DEVICE, 3), 2, group=group, tag=7)
        dist.recv(received := zeros(DEVICE, 3), 2, group=group)
        assert received.tolist() == [30.0, 31.0, 32.0]
    elif rank == 2:
        dist.recv(received := zeros(DEVICE, 3), 0, group=group, tag=7)
        assert received.tolist() == [10.0, 11.0, 12.0]
        dist.send(own(DEVICE, 3), 0, group=group)
    if rank != 1:
        (delegate,) = made
        shape = ((3,), torch.float32, f"{DEVICE}:0")
        there, back = delegate.calls
        assert there == {"name": "recv" if rank else "send", "peer": 2 - rank, "tag": 7, "tensors": [shape]}
        assert back == {"name": "send" if rank else "recv", "peer": 2 - rank, "tag": 0, "tensors": [shape]}
        assert delegate.connected == ["0:2"]  # no rank waited for rank 1, which does not take part
    else:
        assert made == []
    dist.barrier(group)
    dist.destroy_process_group(group)


@on_ranks(RANKS)
def test_what_the_delegate_does_not_support_is_its_error() -> None:
    """Calls operations of the backend that torch.distributed never calls for a device."""
    group, made = start()
    backend, tensor = backend_of(group), own(DEVICE, 2)
    with pytest.raises(RuntimeError, match="does not support recvAnysource"):
        backend.recv_anysource([tensor], 3)
    with pytest.raises(RuntimeError, match="does not support allgather_coalesced"):
        backend.allgather_coalesced([[zeros(DEVICE, 2)] for _ in range(RANKS)], [tensor])
    assert [call["name"] for call in made[0].calls] == ["recvAnysource", "allgather_coalesced"]
    # The backend still works, because nothing was sent.
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [60.0, 63.0]
    dist.destroy_process_group(group)


@on_ranks(RANKS)
def test_named_operations_reach_the_delegate() -> None:
    group, made = start()
    backend = backend_of(group)
    tensor, half_second = own(DEVICE, 2), timedelta(milliseconds=500)
    backend.allreduce_named(tensor, dist.ReduceOp(dist.ReduceOp.MAX), name="loss", timeout=half_second).wait()
    assert tensor.tolist() == [30.0, 31.0]
    backend.broadcast_named(tensor := own(DEVICE, 2), 1, name="weights").wait()
    assert tensor.tolist() == [20.0, 21.0]
    first, second = made[0].calls
    assert (first["name"], first["op"], first["timeout"], first["async"]) == ("allreduce", "MAX", 500, True)
    assert (second["name"], second["root"], second["timeout"]) == ("broadcast", 1, -1)
    dist.destroy_process_group(group)


# --- Works ---


@on_ranks(RANKS)
def test_wait_orders_the_stream_and_does_not_block_the_host() -> None:
    group, made = start()
    tensor = own(DEVICE, 2)
    dist.all_reduce(tensor, group=group)
    (delegate,) = made
    tensor = own(DEVICE, 2)
    with held(delegate.stream):
        work = dist.all_reduce(tensor, group=group, async_op=True)
        future = work.get_future()
        assert future.done()  # its value is for streams that wait for the device's work
        assert not work.is_completed()
        work.wait()  # the host does not wait
        assert not work.is_completed()
    assert tensor.tolist() == [60.0, 63.0]
    assert work.is_completed() and work.is_success()
    assert future.then(lambda done: done.value()[0] * 2).wait().tolist() == [120.0, 126.0]
    dist.destroy_process_group(group)


@on_ranks(RANKS)
def test_an_error_of_the_delegate_reaches_the_caller() -> None:
    group, made = start()
    dist.all_reduce(own(DEVICE, 2), group=group)
    (delegate,) = made
    delegate.fail_next("the cable is out", at_once=True)
    with pytest.raises(dist.DistBackendError, match="the cable is out"):
        dist.all_reduce(own(DEVICE, 2), group=group)
    delegate.fail_next("the link went down")
    tensor = own(DEVICE, 2)
    with held(delegate.stream):
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert not work.is_completed()
    delegate.stream.synchronize()
    assert work.is_completed() and not work.is_success()
    with pytest.raises(dist.DistBackendError, match="the link went down"):
        work.wait()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)  # the failure does not affect operations of the host
    assert tensor.tolist() == [3.0, 3.0]
    dist.destroy_process_group(group)


@on_ranks(RANKS)
def test_time_outs_are_the_delegate_s() -> None:
    group, made = start(timeout=timedelta(seconds=17))
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=3)
    group.allreduce([own(DEVICE, 2)], options).wait()
    (delegate,) = made
    assert delegate.calls[0]["timeout"] == 3000
    assert delegate.options._timeout == timedelta(seconds=17)
    backend_of(group).set_timeout(timedelta(seconds=5))
    assert delegate.calls[1] == {"name": "set_timeout", "timeout": 5000, "tensors": []}
    tensor = own(DEVICE, 2)
    with held(delegate.stream):
        work = dist.all_reduce(tensor, group=group, async_op=True)
        with pytest.raises(dist.DistBackendError, match="timed out after 50 ms"):
            work.wait(timedelta(milliseconds=50))
    work.wait(timedelta(seconds=10))
    dist.destroy_process_group(group)

    group, made = start(timeout=timedelta(seconds=17))
    backend_of(group).set_timeout(timedelta(seconds=6))
    dist.all_reduce(own(DEVICE, 2), group=group)
    # a delegate that is made later gets the new timeout
    assert made[0].options._timeout == timedelta(seconds=6)
    dist.destroy_process_group(group)


# --- when a delegate is made ---


@on_ranks(RANKS)
def test_a_delegate_is_made_when_a_first_tensor_of_its_device_comes() -> None:
    group, made = start()
    dist.barrier(group)
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, dist.get_rank(), group=group)
    assert gathered == [0, 1, 2]
    dist.all_reduce(torch.ones(1), group=group)
    backend_of(group).set_timeout(timedelta(seconds=9))
    assert made == [] and backend_of(group).delegate(DEVICE) is None
    dist.all_reduce(own(DEVICE, 1), group=group)
    (delegate,) = made
    assert backend_of(group).delegate(DEVICE) is delegate
    assert delegate.connected == [""]
    assert delegate.bound_device is None
    assert (delegate.group_uid, delegate.group_desc) == (group.group_name, group.group_desc)
    dist.destroy_process_group(group)


@on_ranks(RANKS)
def test_a_barrier_of_devices_is_the_delegate_s() -> None:
    group, made = start()
    dist.barrier(group, device_ids=[1])
    (delegate,) = made
    (call,) = delegate.calls
    assert (call["name"], call["device"], call["device_ids"]) == ("barrier", f"{DEVICE}:1", [1])
    dist.destroy_process_group(group)


@on_ranks(RANKS)
def test_threads_that_come_first_together_share_one_delegate() -> None:
    group, made = start()
    # without the GIL, so other threads arrive
    device_double.serve_groups(made, making=lambda: time.sleep(0.3))
    backend, together = backend_of(group), threading.Barrier(4)
    found: list[Any] = []

    def ask(question: Callable[[], Any]) -> None:
        together.wait()
        question()
        found.append(backend.delegate(DEVICE))

    tensor = own(DEVICE, 1)
    questions: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(tensor, group=group),
        lambda: backend.supports_tensor_alloc(torch.device(DEVICE, 0)),
        lambda: backend.mem_allocator,  # holds the GIL
        lambda: backend.allocate_tensor(4, dtype=torch.float32, device=torch.device(DEVICE, 0)),
    ]
    threads = [threading.Thread(target=ask, args=(question,)) for question in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == made * 4
    assert tensor.item() == 60.0
    dist.destroy_process_group(group)


def call_while_a_group_is_open() -> None:
    """An operation of another thread does not become part of an exchange's group of messages, as it would in NCCL."""
    from fog_pg import _C

    group, made = start()
    connecting, pool, rank = threading.Event(), ThreadPoolExecutor(), dist.get_rank()
    # called while the group of messages is open
    device_double.serve_groups(made, connecting=connecting.set)
    backend = backend_of(group)
    plan = _C.NeighborPlan(rank, 2, 0.5, [(1 - rank, 0.5)], [(1 - rank, 1.0)])
    mixed, summed = own(DEVICE, 2), own(DEVICE, 1)

    def exchange() -> None:
        backend.neighbor_allreduce(mixed, plan, output=mixed, confirm=False).wait()

    if rank == 0:
        calls = [pool.submit(exchange)]
        connecting.wait()  # waits for the exchange of rank 1 below
        backend.set_timeout(timedelta(milliseconds=100))
        with pytest.raises(dist.DistBackendError, match="^allreduce: waited 100 ms for another thread's"):
            backend.allreduce([own(DEVICE, 1)])
        backend.set_timeout(timedelta(seconds=30))
        calls.append(pool.submit(dist.all_reduce, summed, group=group))
        dist.barrier()
        for call in calls:
            call.result()
    else:
        dist.barrier()
        exchange()
        dist.all_reduce(summed, group=group)
    names = [[part["name"] for part in seen.get("calls", [])] or seen["name"] for seen in made[0].calls]
    assert [name for name in names if name != "set_timeout"] == [["send", "recv"], "allreduce"]
    assert (mixed.tolist(), summed.tolist()) == ([15.0, 16.0], [30.0])
    # While a program's own group is open, exchanges wait and its own calls proceed, whichever thread ends it.
    backend._start_coalescing()
    backend.allreduce([summed])
    backend.allreduce([mixed])
    pool.submit(backend._end_coalescing).result().wait()
    exchange()
    assert (mixed.tolist(), summed.tolist()) == ([30.0, 32.0], [60.0])
    dist.destroy_process_group(group)


def test_operations_of_other_threads_stay_out_of_a_group_of_messages(new_world: Callable[..., World]) -> None:
    new_world(2).run(call_while_a_group_is_open)


# --- bad arguments ---


@on_ranks(RANKS)
def test_devices_of_two_types_in_an_operation_are_an_error_before_anything_is_sent() -> None:
    group, made = start()
    dist.all_reduce(own(DEVICE, 1), group=group)
    (delegate,) = made
    delegate.clear()
    backend, here, there = backend_of(group), own("cpu", 2), own(DEVICE, 2)
    several, list_of = [zeros(DEVICE, 2) for _ in range(RANKS)], [own("cpu", 2) for _ in range(RANKS)]
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: backend.allreduce([there, here]),
        "allreduce_coalesced": lambda: backend.allreduce_coalesced([there, here]),
        "broadcast": lambda: backend.broadcast([there, here]),
        "reduce": lambda: backend.reduce([there, here]),
        "allgather": lambda: backend.allgather([several], [here]),
        "allgather_into_tensor": lambda: backend._allgather_base(zeros(DEVICE, 6), here),
        "gather": lambda: backend.gather([several], [here]),
        "scatter": lambda: backend.scatter([there], [list_of]),
        "reduce_scatter": lambda: backend.reduce_scatter([there], [list_of]),
        "reduce_scatter_tensor": lambda: backend._reduce_scatter_base(there, own("cpu", 6)),
        "alltoall_base": lambda: backend.alltoall_base(there, here, [], []),
        "alltoall": lambda: backend.alltoall(several, list_of),
        "send": lambda: backend.send([there, here], 0, 0),
        "recv": lambda: backend.recv([there, here], 0, 0),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name}: tensors: got some on ({DEVICE}:0|cpu) and some on"):
            call()
    with pytest.raises(ValueError, match=f"allowed are tensors on cpu, cuda, {DEVICE}"):
        backend.allreduce([torch.zeros(2, device="meta")])
    assert delegate.calls == []
    backend._start_coalescing()
    backend.allreduce([there])
    with pytest.raises(ValueError, match="got some on cpu among coalesced operations on gpudouble"):
        backend.allreduce([here])
    backend._end_coalescing().wait()
    assert [[part["name"] for part in call["calls"]] for call in delegate.calls] == [["allreduce"]]
    assert there.tolist() == [60.0, 63.0]
    dist.destroy_process_group(group)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
@on_ranks(RANKS)
def test_a_device_that_nobody_serves_is_an_error() -> None:
    from fog_pg import _nccl
    from fog_pg._extension import load

    group, made = start()
    load().set_delegate_factory(DEVICE, None)
    with pytest.raises(ValueError, match=f"got one on {DEVICE}:0; allowed are tensors on cpu, cuda$"):
        dist.all_reduce(own(DEVICE, 1), group=group)
    load().set_delegate_factory(DEVICE, _nccl.create)
    with pytest.raises(RuntimeError, match="CUDA tensors need a torch with NCCL"):
        dist.all_reduce(own(DEVICE, 1), group=group)
    device_double.serve_groups(made)
    dist.all_reduce(own(DEVICE, 1), group=group)  # a factory that failed is called again
    assert len(made) == 1
    dist.destroy_process_group(group)


# --- the rest of a backend ---


@on_ranks(RANKS)
def test_allocator_timing_and_shutdown_are_the_delegate_s() -> None:
    group, made = start()
    backend = backend_of(group)
    group._enable_collectives_timing()
    dist.all_reduce(own(DEVICE, 1), group=group)
    (delegate,) = made
    assert [call["name"] for call in delegate.calls] == ["enable_timing", "allreduce"]
    delegate.clear()
    group._enable_collectives_timing()
    assert backend.supports_tensor_alloc(torch.device(DEVICE, 0))
    tensor = backend.allocate_tensor(6, dtype=torch.float64, device=torch.device(DEVICE, 1))
    assert (tensor.shape, tensor.dtype, str(tensor.device)) == ((6,), torch.float64, f"{DEVICE}:1")
    assert backend.mem_allocator is not None
    with pytest.raises(ValueError, match="allocate_tensor: device: got cpu"):
        backend.allocate_tensor(6, dtype=torch.float64, device=torch.device("cpu"))
    *timing, allocation, allocator = delegate.calls
    assert {call["name"] for call in timing} == {"enable_timing"}
    assert (allocation["name"], allocation["size"]) == ("allocate_tensor", 6)
    assert allocator["name"] == "mem_allocator"
    dist.destroy_process_group(group)
    assert delegate.calls[-1]["name"] == "shutdown"
    assert [call["name"] for call in delegate.calls].count("shutdown") == 1


def end_groups() -> None:
    for end in ("abort", "shutdown"):
        group, made = start()
        backend = backend_of(group)
        dist.all_reduce(own(DEVICE, 1), group=group)
        torch.accelerator.synchronize()
        dist.barrier()
        getattr(backend, end)()
        assert made[0].calls[-1]["name"] == end
        with pytest.raises(dist.DistBackendError):
            backend.allreduce([own(DEVICE, 1)])
        group, made = start()
        backend = backend_of(group)
        dist.barrier()
        getattr(backend, end)()
        with pytest.raises(dist.DistBackendError, match="allreduce: the group was shut down or aborted"):
            backend.allreduce([own(DEVICE, 1)])
        assert [call["name"] for call in (made[0].calls if made else [])] in ([], ["shutdown"])
        assert backend.delegate(DEVICE) is None


def test_a_group_that_ended_makes_no_delegate(new_world: Callable[..., World]) -> None:
    new_world(RANKS, finalizing=None).run(end_groups)


def lose_a_rank() -> None:
    group, made = start()
    dist.all_reduce(own(DEVICE, 1), group=group)
    torch.accelerator.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while made[0].calls[-1]["name"] != "abort":  # without an operation of this rank
        time.sleep(0.01)
    with pytest.raises(dist.DistBackendError, match=r"allreduce: rank 1 \(pid \d+.*\) was lost"):
        dist.all_reduce(own(DEVICE, 1), group=group)


def test_a_lost_rank_ends_the_delegates_work(new_world: Callable[..., World]) -> None:
    outcomes = new_world(RANKS).run_raw(lose_a_rank)
    assert [each.state for each in outcomes] == ["returned", "died", "returned"], [*map(str, outcomes)]


# --- bound devices, and groups that torch splits off ----------------


def start_bound() -> tuple[Any, Made]:
    made: Made = []
    device_double.load()
    device_double.serve_groups(made)
    dist.init_process_group(BACKENDS, device_id=torch.device(DEVICE, 0), timeout=timedelta(seconds=30))
    return dist.group.WORLD, made


def bind_a_device() -> None:
    _, made = start_bound()
    (delegate,) = made
    assert [call["name"] for call in delegate.calls] == ["eager_connect"]
    assert delegate.calls[0]["device"] == f"{DEVICE}:0"
    assert str(delegate.bound_device) == f"{DEVICE}:0"
    assert delegate.connected == [""]
    delegate.clear()
    dist.barrier()  # on the device to which the group is bound
    assert [(call["name"], call["device"]) for call in delegate.calls] == [("barrier", f"{DEVICE}:0")]
    collective("all_reduce", None, DEVICE)
    assert len(made) == 1

    rank = dist.get_rank()
    # The split_group of torch 2.11 uses a backend for CUDA, independent of the bound device of the group.
    if 'torch.device("cuda")' not in inspect.getsource(dist.split_group):
        # torch names a split by the number of groups that a rank is in, so the split that leaves out a rank comes last.
        for ranks in ([[0, 1], [2]], [[0, 2]]):
            delegate.clear()
            mine = next((members for members in ranks if rank in members), None)
            split = dist.split_group(split_ranks=ranks)
            assert delegate.calls == []  # the new group makes its own
            if mine is None:
                assert split in (
                    None,
                    dist.GroupMember.NON_GROUP_MEMBER,
                )  # before torch 2.14, and since then
                continue
            child = split._get_backend(torch.device(DEVICE))
            assert split._get_backend(torch.device("cpu")) is child
            assert child.delegate(DEVICE) is not delegate
            for device in (DEVICE, "cpu"):
                dist.all_reduce(tensor := own(device, 1), group=split)
                assert tensor.item() == sum(10 * (member + 1) for member in mine)
            # The flight recorder and the communicators use these names.
            assert child.delegate(DEVICE).group_uid == split.group_name
            assert child.delegate(DEVICE).group_desc == split.group_desc

    delegate.clear()
    before = len(made)
    pair = dist.new_group([0, 2])  # a new group that connects at once
    assert delegate.calls == []
    if rank != 1:
        assert [call["name"] for call in made[-1].calls] == ["eager_connect"]
        dist.all_reduce(tensor := own(DEVICE, 1), group=pair)
        assert tensor.item() == 40.0
    assert len(made) == before + (rank != 1)
    dist.barrier()
    dist.destroy_process_group()


def test_groups_with_a_bound_device_connect_it(new_world: Callable[..., World]) -> None:
    new_world(RANKS, initialize=False).run(bind_a_device)


# --- programs ---


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch itself loads CUDA")
@on_ranks(2)
def test_a_run_without_a_device_loads_no_library_of_cuda() -> None:
    import fog_pg._extension

    fog_pg._extension.load()
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    dist.all_gather_object([None] * dist.get_world_size(), "x")
    maps = Path("/proc/self/maps").read_text()
    assert [name for name in ("libcuda", "libnccl", "libnvrtc", "libcudart") if name in maps] == []
