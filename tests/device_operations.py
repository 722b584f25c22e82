"""Compares operations on tensors of a device with the same operations on tensors of the CPU, in one group.

Ranks call these functions with the type of device. `through` lets functions of the CPU tests use a device: their
arguments to fogdist are moved there, and the results are moved back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import fogdist
import torch
import torch.distributed as dist
from device_training import place
from fogdist import topology as topologies
from reference import Checks, make_input
from torch import Tensor

# Operations of fogdist that return their results, and operations that write them into their arguments.
_OUT_OF_PLACE = (
    "allreduce",
    "broadcast",
    "allgather",
    "neighbor_allreduce",
    "neighbor_allgather",
    "hierarchical_neighbor_allreduce",
)
_IN_PLACE = ("allreduce_", "broadcast_", "neighbor_allreduce_", "hierarchical_neighbor_allreduce_")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def devices() -> ModuleType:
    """Imports examples/devices.py under another name, because tests of the examples import and remove that module."""
    path = Path(__file__).resolve().parents[1] / "examples" / "devices.py"
    spec = importlib.util.spec_from_file_location("devices_of_examples", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nccl_version() -> tuple[int, int, int] | None:
    """Returns the version of NCCL that this process has loaded."""
    version: tuple[int, int, int] | None = devices().nccl_version()
    return version


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(each, function) for each in value)
    return value


@contextlib.contextmanager
def through(device: str) -> Iterator[torch.device]:
    """In this block, fogdist's blocking operations move CPU tensors to a device, and move the results back."""
    there = place(device)
    replaced: dict[str, Any] = {}
    for name in _OUT_OF_PLACE:
        original = getattr(fogdist, name)

        def move(tensor: Any, *args: Any, original: Any = original, **options: Any) -> Any:
            return _map(original(_map(tensor, lambda t: t.to(there)), *args, **options), Tensor.cpu)

        replaced[name] = functools.wraps(original)(move)
    for name in _IN_PLACE:
        original = getattr(fogdist, name)

        def write(tensor: Any, *args: Any, original: Any = original, **options: Any) -> Any:
            moved = _map(tensor, lambda t: t.to(there))
            original(moved, *args, **options)
            for target, result in zip(_as_list(tensor), _as_list(moved), strict=True):
                target.detach().copy_(result)
            return tensor

        replaced[name] = functools.wraps(original)(write)
    with mock.patch.multiple(fogdist, **replaced):
        yield there


def _as_list(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def run_through(device: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of the CPU tests on a device."""
    with through(device):
        return function(*arguments)


# --- collectives of c10d ------------------------------------------------------------------------------------


def _all_reduce(x: Tensor, **group: Any) -> list[Tensor]:
    dist.all_reduce(x, **group)
    return [x]


def _broadcast(x: Tensor, **group: Any) -> list[Tensor]:
    dist.broadcast(x, dist.get_world_size() - 1, **group)
    return [x]


def _reduce(x: Tensor, **group: Any) -> list[Tensor]:
    dist.reduce(x, 0, **group)
    return [x] if dist.get_rank() == 0 else []


def _all_gather(x: Tensor, **group: Any) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x, **group)
    return parts


def _all_gather_into_tensor(x: Tensor, **group: Any) -> list[Tensor]:
    whole = x.new_empty(dist.get_world_size() * x.numel())
    dist.all_gather_into_tensor(whole, x, **group)
    return [whole]


def _reduce_scatter_tensor(x: Tensor, **group: Any) -> list[Tensor]:
    part = x.new_empty(x.numel() // dist.get_world_size())
    dist.reduce_scatter_tensor(part, x[: part.numel() * dist.get_world_size()], **group)
    return [part]


def _reduce_scatter(x: Tensor, **group: Any) -> list[Tensor]:
    result = torch.empty_like(x)
    dist.reduce_scatter(result, [x + i for i in range(dist.get_world_size())], **group)
    return [result]


def _gather(x: Tensor, **group: Any) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(x, parts, 0, **group)
    return parts or []


def _scatter(x: Tensor, **group: Any) -> list[Tensor]:
    result = torch.empty_like(x)
    parts = [x + i for i in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.scatter(result, parts, 0, **group)
    return [result]


def _all_to_all(x: Tensor, **group: Any) -> list[Tensor]:
    size = dist.get_world_size()
    results = [torch.empty_like(x) for _ in range(size)]
    dist.all_to_all(results, [x + i for i in range(size)], **group)
    return results


def _all_to_all_single(x: Tensor, **group: Any) -> list[Tensor]:
    count = x.numel() // dist.get_world_size() * dist.get_world_size()
    result = x.new_empty(count)
    dist.all_to_all_single(result, x[:count].clone(), **group)
    return [result]


def _send_and_receive(x: Tensor, **group: Any) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, (rank + 1) % size, **group),
        dist.P2POp(dist.irecv, received, (rank - 1) % size, **group),
    ]
    for work in dist.batch_isend_irecv(operations) if size > 1 else []:
        work.wait()
    return [received] if size > 1 else []


COLLECTIVES: dict[str, Callable[..., list[Tensor]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "batch_isend_irecv": _send_and_receive,
}


def collectives(name: str, device: str) -> None:
    """Compares one collective of c10d, for every dtype of NCCL, on a device and on the CPU."""
    there = place(device)
    group = _group(device)
    rank = dist.get_rank()
    with Checks() as checks:
        for dtype in DTYPES:
            for numel in (8, 1000, 70_000):
                x = make_input(rank, dtype, numel)
                expected = COLLECTIVES[name](x.clone(), group=group)
                found = COLLECTIVES[name](x.to(there), group=group)
                checks.equal("number", len(found), len(expected))
                for got, wanted in zip(found, expected, strict=True):
                    checks.equal("device", got.device, there)
                    checks.close(f"{name} {dtype} of {numel}", got.cpu(), wanted)


def _group(device: str) -> dist.ProcessGroup | None:
    """Returns the default group, or a group of the same ranks in which fog is registered for the device."""
    if device in ("cpu", "cuda"):
        return None
    if device not in _groups:
        _groups[device] = dist.new_group(backend=f"cpu:fog,{device}:fog")
    return _groups[device]


_groups: dict[str, dist.ProcessGroup] = {}


# --- exchanges with neighbors -------------------------------------------------------------------------------


def neighbor_exchanges(device: str) -> None:
    """Compares exchanges by graphs and by given weights, of one tensor and of lists, on a device and on the CPU."""
    there = place(device)
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    with Checks() as checks:
        for name in ("exp2", "ring", "star"):
            fogdist.set_topology(topologies.by_name(name, size), is_weighted=True)
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
                for shape in ((), (3, 5), (100_003,)):
                    x = make_input(rank, dtype, shape)
                    label = f"{name} {dtype} {shape}"
                    found = fogdist.neighbor_allreduce(x.to(there))
                    checks.equal(f"{label}: device", found.device, there)
                    checks.close(label, found.cpu(), fogdist.neighbor_allreduce(x))
            x, y = make_input(rank, torch.float32, (7, 3)), make_input(rank, torch.float64, 11)
            expected = fogdist.neighbor_allreduce([x, y, x + 1])
            found = fogdist.neighbor_allreduce([x.to(there), y.to(there), x.to(there) + 1])
            for got, wanted in zip(found, expected, strict=True):
                checks.close(f"{name} list", got.cpu(), wanted)
            checks.close(
                f"{name} gather", fogdist.neighbor_allgather(x.to(there)).cpu(), fogdist.neighbor_allgather(x)
            )
            target = x.to(there)
            fogdist.neighbor_allreduce_(target)
            checks.close(f"{name} in place", target.cpu(), fogdist.neighbor_allreduce(x))
        sequence = topologies.one_peer_exponential(size)
        for t in range(4):
            peers: Any = sequence.peers(rank, t)
            x = make_input(rank, torch.float32, 1001, seed=t)
            found = fogdist.neighbor_allreduce(x.to(there), **peers)
            checks.close(f"one peer {t}", found.cpu(), fogdist.neighbor_allreduce(x, **peers))


def many_in_flight(device: str) -> None:
    """Exchanges are in flight whose tensors are dropped at once; their memory must not be used again too early."""
    there = place(device)
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.set_topology(topologies.RingGraph(size))
    with Checks() as checks:
        for turn in range(20):
            inputs = [make_input(rank, torch.float32, 50_000, seed=8 * turn + i) for i in range(8)]
            handles = [fogdist.neighbor_allreduce_nonblocking(x.to(there) * 1.0) for x in inputs]
            waste = [torch.full((50_000,), float("nan"), device=there) for _ in range(8)]
            results = [fogdist.wait(handle) for handle in handles]
            del waste
            for i, (x, result) in enumerate(zip(inputs, results, strict=True)):
                checks.close(f"turn {turn}, {i}", result.cpu(), fogdist.neighbor_allreduce(x))


def on_other_streams(device: str) -> None:
    """An operation waits for the earlier work of its stream, and later work of the stream waits for the operation."""
    there = place(device)
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    side = torch.Stream(device=there)
    main = torch.accelerator.current_stream(there)
    with Checks() as checks:
        for turn in range(10):
            x = torch.zeros(1_000_000, device=there)
            side.wait_stream(main)
            with side:
                for _ in range(20):  # takes some time
                    x.add_(0.05 * (rank + 1))
                handle = fogdist.allreduce_nonblocking_(x, average=False)
                fogdist.wait(handle)
                x.mul_(2)
            main.wait_stream(side)
            expected = 2 * sum(range(1, size + 1))
            checks.true(f"turn {turn}", bool((x - expected).abs().max() < 1e-3 * expected))


# --- autograd, torch.compile --------------------------------------------------------------------------------


def gradients(device: str) -> None:
    """Compares the derivative of an exchange on a device and on the CPU."""
    there = place(device)
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.set_topology(topologies.StarGraph(size), is_weighted=True)
    found = []
    for where in (there, torch.device("cpu")):
        x = make_input(rank, torch.float64, 50).to(where).requires_grad_()
        y = torch.ops.fog.neighbor_allreduce_along_topology(x)
        (y**3).sum().backward()
        assert x.grad is not None and x.grad.device == x.device
        found.append(x.grad.cpu())
    torch.testing.assert_close(*found)


def compiled(device: str) -> None:
    """Compiles a function that contains an exchange."""
    there = place(device)
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.set_topology(topologies.RingGraph(size))

    def function(x: Tensor) -> Tensor:
        return torch.ops.fog.neighbor_allreduce_along_topology(x * 2) + 1

    x = make_input(rank, torch.float32, 1000).to(there)
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(x), function(x))
