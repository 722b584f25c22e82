"""Operations on tensors of a device, which ranks run with the type of the device: `cuda`, or the fake device.

tests/test_random_exchanges.py runs exchanges with neighbors on a device too.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import fogdist
import operations
import torch
import torch.distributed as dist
from codec_lists import CODECS, IN_EXCHANGES
from codec_lists import DTYPES as DTYPES_OF_CODECS
from device_training import no_waits, place
from fogdist import topology as topologies
from fogdist.compression import Codec, Int4, Int8, Moniqua, RandomK, Sign, TopK
from reference import Checks, make_input
from test_compressed_exchanges import expected_at
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fog_pg._C import NeighborPlan

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
# The delegate of CUDA tensors, ProcessGroupNCCL, has no all_gather_coalesced.
COLLECTIVES = [name for name in operations.COLLECTIVES if name != "all_gather_coalesced"]


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


# --- collectives of c10d ------------------------------------------------------------------------------------


def collectives(name: str, device: str) -> None:
    """Compares one collective of c10d, for every dtype of NCCL, on a device with its reference."""
    there, group = place(device), _group(device)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(there)

    with Checks() as checks:
        for dtype, numel in itertools.product(DTYPES, (8, 1000, 70_000)):
            ready = operations.prepare(name, dtype, (numel,), group=group, source=moved, destination=moved)
            ready.start(False)
            checks.equal("device", {output.device for output in ready.outputs} - {there}, set())
            ready.verify(checks, f"{name} {dtype} of {numel}")


def messages(device: str) -> None:
    """Sends a message around the ring, in one group of sends and receives."""
    there, rank, size = place(device), dist.get_rank(), dist.get_world_size()
    received = torch.empty(1000, device=there)
    sent = make_input(rank, torch.float32, 1000).to(there)
    pair = [(dist.isend, sent, (rank + 1) % size), (dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv([dist.P2POp(*each, group=_group(device)) for each in pair]):
        work.wait()
    assert torch.equal(received.cpu(), make_input((rank - 1) % size, torch.float32, 1000))


def _group(device: str) -> dist.ProcessGroup | None:
    """Returns the default group, or a group of the same ranks in which fog is registered for the device."""
    if device in ("cpu", "cuda"):
        return None
    if device not in _groups:
        _groups[device] = dist.new_group(backend=f"cpu:fog,{device}:fog")
    return _groups[device]


_groups: dict[str, dist.ProcessGroup] = {}


# --- the order of work on a device ---------------------------------------------------------------------------


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


# --- codecs -------------------------------------------------------------------------------------------------


class _HostMemory(TorchDispatchMode):
    """Collects the names of operations that have a tensor of the CPU among their arguments or results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.is_cpu for x in pytree.tree_leaves((args, kwargs, result))):
            self.names.append(str(func))
        return result


def _with_dtypes(codecs: Sequence[Codec]) -> list[tuple[Codec, torch.dtype]]:
    """Returns a dtype for each codec, in turn, because tests on the CPU cover all pairs."""
    return list(zip(codecs, itertools.cycle(DTYPES_OF_CODECS), strict=False))


def codecs(device: str) -> None:
    """Compares messages and decoded values on a device with those of the CPU; encoding uses the device alone."""
    there = place(device)
    with Checks() as checks:
        for (codec, dtype), numel in itertools.product(_with_dtypes(CODECS), (0, 1, 1000, 70_001)):
            label = f"{codec} {dtype} {numel}"
            x, near = (make_input(0, dtype, numel, seed) for seed in (1, 2))
            if numel == 1000:
                x[::100] = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0] * 2, dtype=dtype)
            expected = codec.encode(x, counter=5, rank=3)
            given = x.to(there)
            with _HostMemory() as used, no_waits(there):
                message = codec.encode(given, counter=5, rank=3)
            checks.equal(f"{label}: host", used.names, [])
            checks.equal(f"{label}: device", message.device, there)
            checks.equal(label, message.cpu(), expected)
            beside = near if isinstance(codec, Moniqua) else None
            values = codec.decode(expected, x.shape, dtype, near=beside)
            found = codec.decode(message, x.shape, dtype, near=None if beside is None else near.to(there))
            checks.equal(f"{label}: decoded", found.cpu().nan_to_num(nan=77.0), values.nan_to_num(nan=77.0))


def compressed_exchanges(device: str) -> None:
    """Compares compressed exchanges on a device with the sums of the decoded tensors."""
    there = place(device)
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fog: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    hops = sorted({hop % size for hop in (1, 2)} - {0})
    weight_of = [0.5 + each / 8 for each in range(size)]  # that a rank gives all its destinations
    sources = [((rank - hop) % size, weight) for hop, weight in zip(hops, (0.3, -0.25), strict=False)]
    destinations = [((rank + hop) % size, weight_of[rank]) for hop in hops]
    plan = NeighborPlan(rank, size, 0.45, sources, destinations)
    applied = NeighborPlan(rank, size, 0.45, [(s, w * weight_of[s]) for s, w in sources], [])
    ones = [(s, 1.0) for s, _ in sources], [(d, 1.0) for d, _ in destinations]
    mean = NeighborPlan(rank, size, 1.0, *ones, mean=True)
    share = 1 / (len(sources) + 1)
    of_mean = NeighborPlan(rank, size, share, [(s, share) for s, _ in sources], [])
    with Checks() as checks:
        forms = (
            ("exact", plan, applied),
            ("exact", mean, of_mean),
            ("decoded", plan, applied),
            ("conserve", plan, applied),
            ("conserve", mean, of_mean),
        )
        for number, (codec, dtype) in enumerate(_with_dtypes([*IN_EXCHANGES, Int4()])):
            numel = 0 if codec == Int4() else 3000
            x = [make_input(r, dtype, numel) for r in range(size)]
            for how, used, expected_plan in forms:
                label = f"{codec} {dtype} {numel} {how} {'mean' if used is mean else ''}"
                expected, mine = expected_at(codec, expected_plan, x, number, how)
                given = x[rank].to(there)
                own = torch.full_like(given, math.nan)
                work = fog.neighbor_allreduce(
                    given,
                    used,
                    output=given if how == "conserve" else None,
                    compression=codec.backend,
                    counter=number,
                    decoded=own if how == "decoded" else None,
                    conserve=how == "conserve",
                )
                work.wait()
                (found,) = work.result()
                checks.equal(f"{label}: device", found.device, there)
                checks.close(label, found.cpu(), expected)
                if how == "decoded":
                    checks.equal(f"{label}: decoded", own.cpu(), mine)
                if how != "conserve":
                    checks.equal(f"{label}: input", given.cpu(), x[rank])


def compressed_lists(device: str) -> None:
    """A list is one message for each dtype, each with its own random numbers; tensors may have strides."""
    there = place(device)
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.set_topology(topologies.RingGraph(size))
    codec, kinds = RandomK(0.3, seed=4), ((torch.float32, 70), (torch.float16, 31), (torch.float32, 9))
    fog: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    other = (rank + 1) % size
    plan = NeighborPlan(
        rank, size, 0.5, [((rank - 1) % size, 0.5)] if size > 1 else [], [(other, 1.0)] if size > 1 else []
    )
    with Checks() as checks:
        for how in ("conserve", "decoded"):
            x = [[make_input(r, dtype, n) for dtype, n in kinds] for r in range(size)]
            given = [torch.stack([each, each], 1).to(there)[:, 0] for each in x[rank]]
            own = [torch.empty_like(each) for each in given]
            work = fog.neighbor_allreduce(
                given,
                plan,
                compression=codec.backend,
                counter=6,
                decoded=own if how == "decoded" else None,
                conserve=how == "conserve",
            )
            work.wait()
            found = [each.cpu() for each in work.result()]
            joined = [torch.cat([each[0], each[2]]) for each in x]
            expected, mine = expected_at(codec, plan, joined, 6, how)
            checks.close(f"{how} float32", torch.cat([found[0], found[2]]), expected)
            if how == "decoded":
                checks.equal(how, torch.cat([own[0].cpu(), own[2].cpu()]), mine)
            expected, mine = expected_at(codec, plan, [each[1] for each in x], 6 | 1 << 32, how)
            checks.close(f"{how} float16", found[1], expected)
        # fogdist's functions, which count the exchanges.
        x = [[make_input(r, torch.float32, 1000)] for r in range(size)]
        there_x = x[rank][0].to(there)
        for name, call in {
            "new": fogdist.neighbor_allreduce,
            "in place": lambda t, **more: fogdist.neighbor_allreduce_(t.clone(), **more),
            "handle": lambda t, **more: fogdist.wait(fogdist.neighbor_allreduce_nonblocking(t, **more)),
        }.items():
            for check in (False, True):
                found_one = call(there_x, compression=Int8(), enable_topo_check=check)
                expected_one = fogdist.neighbor_allreduce(x[rank][0], compression=Int8())
                checks.close(f"{name} {check}", found_one.cpu(), expected_one)


def compressed_machines(device: str) -> None:
    """Between machines, the slices of their means are encoded; and what one machine gains another one loses."""
    there = place(device)
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fog: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    half = size // 2
    machines = [list(range(half)), list(range(half, size))]
    machine, place_in = divmod(rank, half)
    plan = NeighborPlan(machine, 2, 0.5, [(1 - machine, 0.5)], [(1 - machine, 1.0)])
    with Checks() as checks:
        for codec, conserve in itertools.product(
            (Int8(), Sign(block=64), TopK(0.1), Moniqua(10.0, 8)), (False, True)
        ):
            numel = 64 * half
            x = [make_input(r, torch.float64, numel) for r in range(size)]
            work = fog.hierarchical_neighbor_allreduce(
                x[rank].to(there), machines, plan, compression=codec.backend, counter=3, conserve=conserve
            )
            work.wait()
            (found,) = work.result()
            means = [torch.stack([x[r] for r in members]).mean(0) for members in machines]
            for number in range(half):
                part = slice(64 * number, 64 * (number + 1))
                expected, _ = expected_at(
                    codec, plan, [mean[part] for mean in means], 3, "conserve" if conserve else "exact"
                )
                checks.close(f"{codec} {conserve} {number} at {place_in}", found.cpu()[part], expected)
