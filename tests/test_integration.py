"""Tests torch's distributed libraries on the backend.

Meshes, DTensor, FSDP, pipelines, checkpoints, DDP's options, ZeRO, compile, profiler, debug mode and restarts. Training
is compared with one process that computes on the concatenated batch.
"""

from __future__ import annotations

import copy
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import World, WorldPool, init_process_group, on_ranks
from reference import Checks
from scripts import Job, launcher_command, started
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
ROWS = 4  # rows in the batch of one rank
FEATURES = 12


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)
        ).double()


def batches(size: int) -> Iterator[Tensor]:
    """Yields the concatenated batch of all ranks for every step."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        yield torch.randn(size * ROWS, FEATURES, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum(1).mean()


def mine(batch: Tensor) -> Tensor:
    rank = dist.get_rank()
    return batch[rank * ROWS : (rank + 1) * ROWS]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    take: Callable[[Tensor], Tensor],
    size: int,
    pieces: int = 1,
) -> None:
    """Trains; the gradients of several pieces of a batch accumulate, all but the last under ``no_sync``."""
    for batch in batches(size):
        optimizer.zero_grad()
        parts = take(batch).chunk(pieces)
        for number, part in enumerate(parts):
            with model.no_sync() if number < len(parts) - 1 else nullcontext():
                (loss_of(model, part) / pieces).backward()
        optimizer.step()


def trained_alone(size: int) -> nn.Module:
    model = network()
    train(model, adam(model.parameters()), lambda batch: batch, size)
    return model


def check_parameters(
    checks: Checks, label: str, parameters: dict[str, Tensor], size: int, tolerance: float = 1e-10
) -> None:
    for name, wanted in trained_alone(size).named_parameters():
        difference = (parameters[name] - wanted).abs().max().item()
        checks.true(f"{label}: {name} differs by {difference}", difference <= tolerance)


# Meshes and functional collectives


@on_ranks(4)
def test_device_mesh_and_functional_collectives() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    with Checks() as checks:
        for name, members in (
            ("replicas", [rank % 2, rank % 2 + 2]),
            ("shards", [rank // 2 * 2, rank // 2 * 2 + 1]),
        ):
            group = mesh.get_group(name)
            checks.true(f"{name}: backend", dist.get_backend(group) == "fog")
            checks.true(f"{name}: ranks", dist.get_process_group_ranks(group) == members)
            value = functional.all_reduce(torch.tensor([float(rank)]), "sum", group)
            checks.true(f"{name}: sum {value}", value.item() == sum(members))
            gathered = functional.all_gather_tensor(
                torch.tensor([rank]), 0, (mesh, mesh.mesh_dim_names.index(name))
            )
            checks.true(f"{name}: gather {gathered}", gathered.tolist() == members)
        flat = mesh._flatten("all")
        scattered = functional.reduce_scatter_tensor(torch.arange(8.0), "sum", 0, flat.get_group())
        checks.true(f"reduce_scatter {scattered}", scattered.tolist() == [8.0 * rank, 8.0 * rank + 4])
        parts = functional.all_to_all_single(torch.full((4,), float(rank)), None, None, flat.get_group())
        checks.true(f"all_to_all {parts}", parts.tolist() == [0.0, 1.0, 2.0, 3.0])
        coalesced = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", flat.get_group())
        checks.true("all_reduce_coalesced", all((tensor == 4).all() for tensor in coalesced))


# DTensor


@on_ranks(3)
def test_dtensor() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(7.0 * 5, dtype=torch.float64).view(7, 5)  # not divisible by the number of ranks
    with Checks() as checks:
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        for label, tensor in (
            ("gather", sharded),
            ("other dimension", sharded.redistribute(mesh, [Shard(1)])),
            ("replicate", sharded.redistribute(mesh, [Replicate()])),
        ):
            checks.equal(label, [tensor.full_tensor()], [whole])
        product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(
            whole.t().contiguous(), mesh, [Shard(0)]
        )
        checks.true("partial sums", product.placements == (Partial(),))
        checks.equal("matmul", [product.full_tensor()], [whole @ whole.t()])

        with torch.random.fork_rng():
            torch.manual_seed(0)
            wanted = nn.Sequential(nn.Linear(FEATURES, 4 * size), nn.Tanh(), nn.Linear(4 * size, 5)).double()
        model = copy.deepcopy(wanted)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        batch = next(batches(size))
        loss_of(model, batch).backward()
        loss_of(wanted, batch).backward()
        for (name, parameter), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
            gradient = (
                parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            )
            checks.true(f"tensor parallel: {name}", torch.allclose(gradient, other.grad, rtol=0, atol=1e-12))


# FSDP2


def fully_sharded(reshard: bool, hybrid: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (2, size // 2) if hybrid else (size,), mesh_dim_names=("r", "s")[2 - 1 - hybrid :]
    )
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    train(model, adam(model.parameters()), mine, size)
    with Checks() as checks:
        full = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        check_parameters(checks, "FSDP2", full, size)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        checks.true("gradient norm", bool(norm > 0))


@pytest.mark.parametrize(("size", "hybrid"), [(2, False), (3, False), (4, True)])
@pytest.mark.parametrize("reshard", [True, False])
def test_fully_shard(worlds: WorldPool, size: int, hybrid: bool, reshard: bool) -> None:
    worlds(size).run(fully_sharded, reshard, hybrid)


# FSDP1


@pytest.mark.filterwarnings("ignore")
@on_ranks(4, strategy=["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_fsdp1(strategy: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2)) if "HYBRID" in strategy else None
    model = FullyShardedDataParallel(
        network(),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    train(model, adam(model.parameters()), mine, size)
    with Checks() as checks, FullyShardedDataParallel.summon_full_params(model):
        check_parameters(checks, strategy, dict(model.named_parameters()), size)


# Context parallel


@on_ranks(2, is_causal=[False, True])
def test_ring_attention(is_causal: bool) -> None:
    """Runs the ring of torch's context_parallel with the CPU kernel, which context_parallel itself does not accept."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

    def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **_: Any) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, is_causal)

    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 6 * size, 4, generator=generator) for _ in range(3)]
    parts = [each.chunk(size, 2)[rank].contiguous() for each in whole]
    wanted = nn.functional.scaled_dot_product_attention(*whole, is_causal=is_causal).chunk(size, 2)[rank]
    options = copy.copy(context_parallel._cp_options)
    context_parallel._cp_options.enable_load_balance = False
    with Checks() as checks:
        try:
            for method in ("allgather", "alltoall"):
                context_parallel.set_rotate_method(method)
                ring = context_parallel._templated_ring_attention
                found = ring(dist.group.WORLD, 2, attention, *parts, is_causal=is_causal)[0]
                checks.true(method, torch.allclose(found, wanted, rtol=0, atol=1e-5))
        finally:
            vars(context_parallel._cp_options).update(vars(options))


# Checkpoints


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, is_async=[False, True])
def test_distributed_checkpoint(tmp_path: Path, is_async: bool) -> None:
    """Ranks save their shards; they are loaded into shards along another mesh, and into whole models."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()

    def made(seed: int, shape: tuple[int, ...] | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network(seed)
        if shape is not None:
            fully_shard(
                model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[2 - len(shape) :])
            )
        return model, adam(model.parameters())

    model, optimizer = made(0, (size,))
    train(model, optimizer, mine, size)
    wanted = [parameter.full_tensor() for parameter in model.parameters()]
    names = "model", "optimizer"
    state = dict(zip(names, get_state_dict(model, optimizer)))
    if is_async:
        dcp.async_save(state, checkpoint_id=str(tmp_path)).result()
    else:
        dcp.save(state, checkpoint_id=str(tmp_path))
    dist.barrier()
    moments = [optimizer.state[parameter]["exp_avg"].full_tensor() for parameter in model.parameters()]
    with Checks() as checks:
        for shape in ((size, 1), None):
            other, its = made(1, shape)
            state = dict(zip(names, get_state_dict(other, its)))
            dcp.load(state, checkpoint_id=str(tmp_path))
            set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            for label, found, expected in (
                ("parameters", list(other.parameters()), wanted),
                ("moments", [its.state[parameter]["exp_avg"] for parameter in other.parameters()], moments),
            ):
                whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
                checks.equal(f"{label} on {shape}", [each.detach() for each in whole], expected)


# Pipelines


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, schedule=["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_pipeline(schedule: str) -> None:
    """Each stage holds some layers, and the gradients equal those of the whole network."""
    import torch.distributed.pipelining as pipelining

    rank, size, parts = dist.get_rank(), dist.get_world_size(), 4
    kind = getattr(pipelining, schedule)
    each = 1 if issubclass(kind, pipelining.schedules.PipelineScheduleSingle) else 2
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(each * size))).double()
    own = copy.deepcopy(whole)
    numbers = range(rank, each * size, size)
    stages = [
        pipelining.PipelineStage(own[number], number, each * size, torch.device("cpu")) for number in numbers
    ]
    inputs, targets = torch.randn(2, 2 * parts, 6, dtype=torch.float64).unbind()
    runner = kind(stages[0] if each == 1 else stages, parts, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    for _ in range(2):
        own.zero_grad()
        losses.clear()
        last = rank == size - 1
        runner.step(
            *([inputs] if rank == 0 else []), **({"target": targets, "losses": losses} if last else {})
        )
    loss = nn.functional.mse_loss(whole(inputs), targets)
    loss.backward()
    with Checks() as checks:
        if last:
            torch.testing.assert_close(torch.stack(losses).mean(), loss)
        for number in numbers:
            for (name, parameter), other in zip(own[number].named_parameters(), whole[number].parameters()):
                close = torch.allclose(parameter.grad, other.grad, rtol=0, atol=1e-12)
                checks.true(f"{schedule}: stage {number}, {name}", close)


# DDP


def ddp(options: dict[str, Any], pieces: int = 1, compiler: str = "") -> None:
    """Ranks start with different values: DDP broadcasts the parameters of rank 0."""
    size = dist.get_world_size()
    model = DistributedDataParallel(network(dist.get_rank()), **options)
    called = torch.compile(model, backend=compiler) if compiler else model
    train(called, adam(model.parameters()), mine, size, pieces)
    with Checks() as checks:
        check_parameters(checks, str(options), dict(model.module.named_parameters()), size)
        for name, parameter in model.module.named_parameters():
            # All ranks must have the same bits, or the replicas would drift apart.
            copies = [torch.zeros_like(parameter.data) for _ in range(size)]
            dist.all_gather(copies, parameter.data)
            checks.equal(f"{name} on all ranks", copies, [parameter.data] * size)
        if options.get("gradient_as_bucket_view"):
            storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
            checks.true("gradients are views of buckets", len(storages) < len(list(model.parameters())))


DDP_OPTIONS = [
    {},
    {"static_graph": True, "bucket_cap_mb": 0.001},
    {"find_unused_parameters": True, "bucket_cap_mb": 0.001},
    {"gradient_as_bucket_view": True, "static_graph": True},
    {"broadcast_buffers": False, "skip_all_reduce_unused_params": True},
    {"bucket_cap_mb_list": [0.0005, 0.001]},
]


@pytest.mark.parametrize("options", DDP_OPTIONS, ids=lambda options: "-".join(options))
def test_ddp_trains_as_one_process(worlds: WorldPool, options: dict[str, Any]) -> None:
    worlds(3).run(ddp, options)


def test_ddp_accumulates(worlds: WorldPool) -> None:
    worlds(3).run(ddp, {"bucket_cap_mb": 0.001}, 2)
    worlds(1).run(ddp, {})


@on_ranks(3)
def test_unused_parameters() -> None:
    """Rank 1 does not use one layer: its gradient is the average of the ranks, to which rank 1 contributes zero."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.rare = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) if dist.get_rank() == 1 else self.used(x) + self.rare(x)

    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([[1.0, 2.0]])).sum().backward()
    third = torch.tensor([[1.0, 2.0]])
    torch.testing.assert_close(model.module.used.weight.grad, third)
    torch.testing.assert_close(model.module.rare.weight.grad, third * 2 / 3)


@on_ranks(2, name=["allreduce_hook", "fp16_compress_hook", "wrapped", "post_localSGD"])
def test_comm_hooks(name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network().float())
    reference = network().float()
    state: Any = None
    if name == "post_localSGD":
        state = local_sgd.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=10)
        hook = local_sgd.post_localSGD_hook
    elif name == "wrapped":
        hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    else:
        hook = getattr(default_hooks, name)
    # Gradients are sent in float16 where they are compressed.
    tolerance = 1e-3 if name in ("wrapped", "fp16_compress_hook") else 1e-6
    model.register_comm_hook(state, hook)
    batch = next(batches(size)).float()
    loss_of(model, mine(batch)).backward()
    loss_of(reference, batch).backward()
    for parameter, wanted in zip(model.module.parameters(), reference.parameters(), strict=True):
        scale = wanted.grad.abs().max().item()
        difference = (parameter.grad - wanted.grad).abs().max().item()
        assert difference <= tolerance * max(scale, 1.0), (rank, name, difference, scale)


def uneven_inputs(static: bool) -> list[float]:
    """Rank r has r + 1 batches; ranks without more batches shadow the collectives of the others."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), bucket_cap_mb=0.001)
    nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join(divide_by_initial_world_size=static):
        for step in range(rank + 1):
            optimizer.zero_grad()
            model(torch.full((1, 1), float(step + 1))).sum().backward()
            optimizer.step()
    return [model.module.weight.item()]


@pytest.mark.parametrize("static", [True, False])
def test_join_with_uneven_inputs(worlds: WorldPool, static: bool) -> None:
    # In step s, 3 - s ranks are left, each with gradient s + 1. The sum is divided by 3, or by the number of ranks
    # left.
    expected = -sum((s + 1) * (3 - s) / 3 if static else s + 1 for s in range(3))
    for (weight,) in worlds(3).run(uneven_inputs, static):
        assert weight == pytest.approx(expected, abs=1e-6)


@on_ranks(2, overlap=[False, True])
def test_zero_redundancy_optimizer(overlap: bool) -> None:
    size = dist.get_world_size()
    model = DistributedDataParallel(network(dist.get_rank()))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.05, parameters_as_bucket_view=overlap
    )
    train(model, optimizer, mine, size)
    with Checks() as checks:
        check_parameters(checks, "ZeRO", dict(model.module.named_parameters()), size)
        sharded = sum(len(group["params"]) for group in optimizer.optim.param_groups)
        checks.true(f"{sharded} of 6 parameters' states are here", sharded < 6)
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            checks.true("whole state on rank 0", len(optimizer.state_dict()["state"]) == 6)


def zero_joins() -> list[float]:
    rank = dist.get_rank()
    model = DistributedDataParallel(network().float())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for _ in range(rank + 1):
            optimizer.zero_grad()
            loss_of(model, torch.ones(2, FEATURES)).backward()
            optimizer.step()
    return [parameter.sum().item() for parameter in model.parameters()]


def test_zero_joins_with_uneven_inputs(worlds: WorldPool) -> None:
    first, second = worlds(2).run(zero_joins)
    assert first == second


# torch.compile


def compiled_step(compiler: str) -> None:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # starts no pool of processes
    torch._inductor.config.cpp_cache_precompile_headers = (
        False  # precompiling takes longer than these few kernels
    )
    size = dist.get_world_size()
    group = dist.group.WORLD

    def step(weight: Tensor, batch: Tensor) -> Tensor:
        gradient = batch.t() @ (batch @ weight)
        total = functional.all_reduce(gradient, "sum", group)
        parts = functional.reduce_scatter_tensor(total, "sum", 0, group)
        return weight - 0.01 * functional.all_gather_tensor(parts, 0, group) / size

    weight = torch.arange(4.0 * size).view(2 * size, 2)
    batch = torch.arange(3.0 * 2 * size).view(3, 2 * size).remainder(5) + dist.get_rank()
    compiled = torch.compile(step, backend=compiler, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(weight, batch), step(weight, batch))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_functional_collectives(worlds: WorldPool, compiler: str) -> None:
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++ to compile for CPU")
    worlds(2).run(compiled_step, compiler, timeout=180)


def test_compiled_ddp(worlds: WorldPool) -> None:
    worlds(2).run(ddp, {}, 1, "aot_eager", timeout=180)


# The profiler


@on_ranks(2)
def test_profiler_ranges() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, parts = torch.ones(size, 3), [torch.zeros(3) for _ in range(size)]
    peer = rank ^ 1
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.all_gather(parts, torch.ones(3))
        dist.all_gather_into_tensor(torch.zeros(size * 3), torch.ones(3))
        dist.gather(torch.ones(3), parts if rank == 0 else None)
        dist.scatter(torch.zeros(3), parts if rank == 0 else None)
        dist.reduce_scatter(torch.zeros(3), parts)
        dist.reduce_scatter_tensor(torch.zeros(3), tensor.flatten())
        dist.all_to_all_single(torch.zeros(size), torch.ones(size))
        sends = [dist.isend(torch.ones(5), peer), dist.irecv(torch.ones(5), peer)]
        for work in sends:
            work.wait()
        dist.barrier()
    names = (
        "all_reduce broadcast reduce all_gather gather scatter reduce_scatter all_to_all send recv barrier"
    )
    with Checks() as checks:
        for name in names.split():
            events = [event for event in profile.events() if event.name == f"fog:{name}"]
            checks.true(f"{name}: {len(events)} ranges", len(events) == 1 and events[0].is_async)
            if name == "all_reduce":
                checks.true(f"shapes {events[0].input_shapes}", events[0].input_shapes == [[size, 3]])


@on_ranks(2)
def test_profiler_phases() -> None:
    tensor = torch.ones(1 << 18)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(tensor)
        # The caller waits, so that its thread copies and computes: the profiler follows this thread only.
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        dist.reduce(tensor, 0)
    phases = [e.time_range for e in profile.events() if e.name == "fog:combined allreduce"]
    wholes = [e.time_range for e in profile.events() if e.name == "fog:all_reduce"]
    assert phases
    for phase in phases:
        assert any(each.start <= phase.start <= phase.end <= each.end for each in wholes), phase
    # PyTorch's own suite looks for the events of an operation by the beginning of their names.
    assert [e.name for e in profile.events() if e.name.startswith("fog:reduce")] == ["fog:reduce"]


# TORCH_DISTRIBUTED_DEBUG=DETAIL


def debugged() -> None:
    dist.set_debug_level_from_env()
    init_process_group(30)
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    with Checks() as checks:
        checks.true("wrapped", type(backend).__name__ == "_ProcessGroupWrapper")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        checks.true("sum", tensor.tolist() == [size] * 3)
        gathered = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(gathered, torch.tensor([float(rank)]))
        checks.true("gather", [value.item() for value in gathered] == list(range(size)))
        dist.monitored_barrier()
        dist.barrier()
        model = DistributedDataParallel(network(rank))
        train(model, adam(model.parameters()), mine, size)
        check_parameters(checks, "DDP", dict(model.module.named_parameters()), size)
        group = dist.new_group([0, 1])
        if rank < 2:
            with pytest.raises(RuntimeError, match="mismatch between collectives"):
                dist.all_reduce(torch.ones(2 + rank), group=group)


def test_debug_detail(new_world: Callable[..., World]) -> None:
    world = new_world(3, initialize=False, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    world.run(debugged)


# Groups


@on_ranks(4)
def test_overlapping_groups() -> None:
    """The groups share ranks, and each rank uses them in another order."""
    rank = dist.get_rank()
    members = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    works = []
    order = [index for index in range(len(groups)) if rank in members[index]]
    for index in order[rank:] + order[:rank]:
        tensor = torch.full((1000,), float(rank + 1))
        works.append((index, tensor, dist.all_reduce(tensor, group=groups[index], async_op=True)))
    with Checks() as checks:
        for index, tensor, work in works:
            work.wait()
            total = float(sum(r + 1 for r in members[index]))
            checks.equal(f"{members[index]}", tensor, torch.full((1000,), total))


# Restarts

ELASTIC = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    import torch, torch.distributed as dist

    dist.init_process_group(sys.argv[1])
    rank, size = dist.get_rank(), dist.get_world_size()
    saved = Path(f"saved-{rank}")
    step, value = torch.load(saved) if saved.exists() else (0, torch.tensor([float(rank)]))
    # A rank that was killed may have saved a step that others have not.
    first = torch.tensor([step])
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    step, value = torch.load(f"saved-{rank}-{first.item()}") if first.item() else (0, torch.tensor([float(rank)]))
    begun = step
    while step < 6:
        dist.all_reduce(value)
        value = value / size + rank
        step += 1
        for name in (f"saved-{rank}-{step}", "new-" + saved.name):
            torch.save((step, value), name)
        os.replace("new-" + saved.name, saved)
        if step == 3 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(3)
    sys.stdout.write(f"rank {rank} from step {begun}: {value.item()}\\n")
    """
)


@pytest.mark.long
def test_elastic_restart(tmp_path: Path) -> None:
    """torchrun restarts all ranks after one has failed; they continue from their saved state."""
    script = tmp_path / "elastic.py"
    script.write_text(ELASTIC)
    launcher = [*launcher_command("torchrun", 2), "--max-restarts=1"]
    with started([Job([script, "fog"], 2, tmp_path / "log.txt", launcher)]) as (job,):
        assert job.wait(120) == 0, job.output
    values = [0.0, 1.0]
    for _ in range(6):
        values = [sum(values) / 2 + rank for rank in range(2)]
    for rank, value in enumerate(values):
        found = re.findall(rf"rank {rank} from step (\d): (\S+)", job.output)
        assert found and found[-1][0] in "23" and float(found[-1][1]) == value, job.output
