"""Compares models that are sharded over some dimensions of a mesh, and gossip over another one, with whole models.

FSDP2 and HSDP, tensor parallelism, and both; even, uneven and empty shards; checkpoints; and what is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import fogdist
import fogdist.bluefog.torch as bf
import pytest
import torch
import torch.distributed as dist
from fogdist import algorithms
from fogdist.compression import BFloat16, Codec, Int8, TopK
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Optimizer

KINDS: dict[str, Any] = {
    "awc": bf.DistributedAdaptWithCombineOptimizer,
    "atc": bf.DistributedAdaptThenCombineOptimizer,
    "gradient tracking": algorithms.GradientTracking,
}


def averages_moments(optimizer: Optimizer, model: nn.Module, **options: Any) -> Optimizer:
    return fogdist.DecentralizedOptimizer(AdamW(model.parameters(), lr=0.05), model, **options)


def sends_bfloat16(optimizer: Optimizer, model: nn.Module, **options: Any) -> Optimizer:
    return fogdist.DecentralizedOptimizer(
        optimizer, model, topology="ring", compression=BFloat16(), **options
    )


def diloco(optimizer: Optimizer, model: nn.Module, **options: Any) -> Optimizer:
    options = {"local_steps": 2, **options}
    return algorithms.DiLoCo(optimizer, model, fragments=2, delay=1, **options)


def by_samples(optimizer: Optimizer, model: nn.Module, **options: Any) -> Optimizer:
    made: Any = fogdist.DecentralizedOptimizer(optimizer, model, topology="ring", by_samples=True, **options)
    made.samples = 1 + dist.get_rank(options["group"])
    return made


MORE_KINDS: dict[str, Any] = {
    "AdamW": averages_moments,
    "BFloat16": sends_bfloat16,
    "DiLoCo": diloco,
    "by samples": by_samples,
}


class Layout(NamedTuple):
    """How the ranks of a replica share its model.

    Attributes:
        dimensions: The mesh's dimensions after the first one, over which ranks gossip.
        sizes: Of all dimensions.
        readers: How many parts of a replica have data of their own.
        hidden: A width of the model: 7 rows are shared unevenly, which tensor parallelism does not take.
    """

    dimensions: tuple[str, ...]
    sizes: tuple[int, ...]
    readers: int
    hidden: int = 7


LAYOUTS = {
    "2 x 2": Layout(("shard",), (2, 2), readers=2),
    "2 x 4": Layout(("shard",), (2, 4), readers=4),
    "4 x 2": Layout(("shard",), (4, 2), readers=2),
    "HSDP": Layout(("copy", "shard"), (2, 2, 2), readers=4),
    "tensor": Layout(("tensor",), (2, 2), readers=1, hidden=8),
    "FSDP and tensor": Layout(("shard", "tensor"), (2, 2, 2), readers=2, hidden=8),
}


def mesh_of(layout: str, device: str = "cpu") -> DeviceMesh:
    dimensions, sizes, *_ = LAYOUTS[layout]
    return init_device_mesh(device, sizes, mesh_dim_names=("gossip", *dimensions))


def make_net(replica: int, hidden: int = 7) -> nn.Sequential:
    torch.manual_seed(replica)
    return nn.Sequential(
        nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def share(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Shares a model among the ranks of a mesh."""
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        last = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": last})
    if "shard" in names:
        for part in (model[0], model[2], model[4], model):
            fully_shard(part, mesh=mesh["copy", "shard"] if "copy" in names else mesh["shard"])


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    device = next(model.parameters()).device
    return (model(x.to(device)) - y.to(device)).square().mean()


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.8)


def vector_of(model: nn.Module) -> Tensor:
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([part.detach().reshape(-1) for part in parts]).cpu()


STEPS, PASSES = 5, 2


def train(kind: str, layout: str, is_sharded: bool, device: str = "cpu") -> list[Tensor]:
    """Trains a model that the ranks of a replica share, or the whole model on one rank with the data of all of them."""
    fogdist.init()
    rank, (dimensions, sizes, readers, hidden) = dist.get_rank(), LAYOUTS[layout]
    ranks = dist.get_world_size() // sizes[0]  # of a replica
    replica, group = rank // ranks, None
    readers_here = [rank % ranks * readers // ranks] if is_sharded else range(readers)
    model = make_net(replica, hidden).to(device)
    if is_sharded:
        mesh = mesh_of(layout, device)
        group = mesh["gossip"].get_group()
        share(model, mesh)
    optimizer = {**KINDS, **MORE_KINDS}[kind](sgd(model), model, group=group)
    assert [p.shape for p in optimizer.buckets.tensors] == [p.shape for p in model.parameters()]
    trajectory = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in range(PASSES):  # a batch that is accumulated
            is_last = each == PASSES - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last else optimizer.no_sync():
                losses = [
                    loss_of(model, readers * replica + reader, PASSES * step + each)
                    for reader in readers_here
                ]
                (sum(losses) / len(losses)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        trajectory.append(vector_of(model))
    if sizes[0] == 2 and kind in KINDS:
        assert (fogdist.consensus_distance(model, group=group) > 0) == (kind == "awc")
    if dimensions == ("shard",):
        square = torch.tensor(fogdist.consensus_distance(model, group=group) ** 2, dtype=torch.float64)
        if is_sharded:
            dist.all_reduce(square, group=mesh["shard"].get_group())
        trajectory.append(square)
    optimizer.average()
    assert fogdist.consensus_distance(model, group=group) < 1e-12
    trajectory.append(vector_of(model))
    for make_equal in (
        fogdist.allreduce_parameters,
        functools.partial(fogdist.broadcast_parameters, root_rank=0),
    ):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(replica + 1)
        make_equal(model.named_parameters(), group=group)
        trajectory.append(vector_of(model))
    # Functions of torch that take the model and the optimizer return the same as before.
    state = get_model_state_dict(model)
    assert set(state) == set(make_net(0).state_dict())
    assert get_optimizer_state_dict(model, optimizer)["state"].keys() == state.keys()
    return trajectory


CASES = [(kind, "2 x 2") for kind in (*KINDS, "by samples")] + [("awc", "2 x 4"), ("BFloat16", "2 x 4")]
CASES += [
    ("BFloat16", "FSDP and tensor"),
    *((kind, layout) for kind in ("AdamW", "DiLoCo") for layout in LAYOUTS),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_recursions_are_those_of_whole_models(worlds, kind, layout):
    _, sizes, *_ = LAYOUTS[layout]
    ranks = math.prod(sizes[1:])
    whole = worlds(sizes[0]).run(train, kind, layout, False)
    for rank, trajectory in enumerate(worlds(math.prod(sizes)).run(train, kind, layout, True)):
        for got, expected in zip(trajectory, whole[rank // ranks], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


# Codecs


def average_by_int8(columns: int) -> tuple[Tensor, Tensor]:
    """Returns the average of a matrix of 8 rows, whole and in shards, each encoded in blocks of 8 elements."""
    fogdist.init()
    mesh, averages = mesh_of("2 x 2"), []
    for is_sharded in (False, True):
        torch.manual_seed(dist.get_rank() // 2)
        model = nn.Linear(columns, 8, bias=False).double()
        if is_sharded:
            fully_shard(model, mesh=mesh["shard"])
        options = {"order": "atc", "compression": Int8(block=8), "group": mesh["gossip"].get_group()}
        with fogdist.DecentralizedOptimizer(sgd(model), model, broadcast=False, **options) as optimizer:
            optimizer.step()
        averages.append(vector_of(model))
    return averages[0], averages[1]


@pytest.mark.parametrize(("columns", "is_equal"), [(4, True), (3, False)])
def test_int8_of_shards_is_that_of_whole_tensors_if_shards_are_whole_blocks(worlds, columns, is_equal):
    found = worlds(4).run(average_by_int8, columns)
    for whole, shards in found:
        assert torch.equal(whole, shards) == is_equal
        torch.testing.assert_close(shards, whole, rtol=0, atol=0.02)
    # The mean of the replicas is conserved in both.
    for first, second in zip(*(found[rank] for rank in (0, 2)), strict=True):
        torch.manual_seed(0)
        one = nn.Linear(columns, 8, bias=False).double().weight
        torch.manual_seed(1)
        other = nn.Linear(columns, 8, bias=False).double().weight
        torch.testing.assert_close(first + second, (one + other).detach().reshape(-1), rtol=0, atol=1e-7)


def train_copies(layout: str, codec: Codec, order: str) -> list[Tensor]:
    """Trains with tensor parallelism; returns this rank's parameters of which other ranks have copies."""
    fogdist.init()
    mesh, rank = mesh_of(layout), dist.get_rank()
    model = make_net(0, 8)
    if layout == "tensor":  # the last layer's parameters are ordinary tensors
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        share(model, mesh)
    group = mesh["gossip"].get_group()
    optimizer = fogdist.DecentralizedOptimizer(sgd(model), model, order=order, compression=codec, group=group)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank // 2, step).backward()
        optimizer.step()
    optimizer.settle()
    assert fogdist.consensus_distance(model, group=group) > 0
    copied = []
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            copied.append(parameter.detach())
        elif any(each.is_replicate() for each in parameter.placements):
            copied.append(parameter.to_local().detach())
    assert len(copied) == (3 if layout == "tensor" else 1)
    return copied


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize("codec", [Int8(), TopK(0.5)])
@pytest.mark.parametrize("layout", ["tensor", "FSDP and tensor"])
def test_copies_of_a_parameter_stay_equal(worlds, layout, codec, order):
    found = worlds(math.prod(LAYOUTS[layout].sizes)).run(train_copies, layout, codec, order)
    for even, odd in zip(found[::2], found[1::2], strict=True):
        assert all(map(torch.equal, even, odd))


# What is refused


def refuse() -> None:
    """Rank 0 alone makes each mistake, so that nothing is sent before it is noticed."""
    fogdist.init()
    mesh, models = mesh_of("2 x 2"), {}
    for name, of_model in {"gossip": mesh["gossip"], "shard": mesh["shard"], "HSDP": mesh}.items():
        models[name] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
        fully_shard(models[name], mesh=of_model)
    tensor, partly = make_net(0, 8), make_net(0, 8)
    share(tensor, mesh_of("tensor"))
    parallelize_module(partly, mesh["shard"], {"0": ColwiseParallel()})
    if dist.get_rank() > 0:
        return
    group = mesh["gossip"].get_group()

    def make(model: nn.Module, **options: Any) -> Any:
        return fogdist.DecentralizedOptimizer(sgd(model), model, **options)

    def of_kind(kind: Any, model: nn.Module, **options: Any) -> Any:
        return kind(sgd(model), model, group=group, **options)

    sharded = models["shard"]
    spread = (
        r"Shard\(dim=0\) over mesh dimension '{}' of ranks \[0, {}\]; give the group of another dimension"
    )
    mistakes: list[tuple[str, Callable[[], Any]]] = [
        ("'0.weight' must not be .*" + spread.format("shard", 1), lambda: make(sharded)),
        (
            "'0.weight' must not be .*" + spread.format("gossip", 2),
            lambda: make(models["gossip"], group=group),
        ),
        (
            r"'0.weight' must not be .* Replicate\(\) over mesh dimension 'gossip'",
            lambda: make(models["HSDP"], group=group),
        ),
        (
            "'1.weight' must not .*" + spread.format("shard", 1),
            lambda: fogdist.broadcast_parameters({"1.weight": sharded[1].weight}, 0),
        ),
        ("'0' must not .* 'shard'", lambda: fogdist.allreduce_parameters([*sharded.parameters()])),
        ("parameter 0 must not .* 'shard'", lambda: fogdist.consensus_distance(sharded)),
        ("tune must be False for DTensors", lambda: make(sharded, group=group, tune=True)),
        (
            r"DiLoCo with compression=Int8\(block=256\), got '2.bias', of which other ranks",
            lambda: of_kind(algorithms.DiLoCo, tensor, topology="ring", compression=Int8()),
        ),
        ("DecentralizedSGD with these .*'2.bias'", lambda: make(tensor, group=group, patience=1.0)),
        ("AsynchronousGossip with these .*'2.bias'", lambda: of_kind(algorithms.AsynchronousGossip, tensor)),
        ("WinPut .*'4.bias'", lambda: of_kind(algorithms.WinPut, partly)),
        ("SparseLoCo .*'2.bias'", lambda: of_kind(algorithms.SparseLoCo, tensor)),
    ]
    for message, mistake in mistakes:
        with pytest.raises(ValueError, match=message):
            mistake()


@pytest.mark.filterwarnings("ignore")
def test_mistakes_are_noticed_before_anything_is_sent(worlds):
    worlds(4).run(refuse)


def add_a_mistake() -> None:
    fogdist.init()
    mesh = mesh_of("2 x 2")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model[1], mesh=mesh["gossip"])
    model[1].requires_grad_(False)
    optimizer = fogdist.DecentralizedOptimizer(
        sgd(model), model, group=mesh["gossip"].get_group(), broadcast=False
    )
    model[1].requires_grad_(True)
    with pytest.raises(ValueError, match="'1.weight' must not be spread .* 'gossip'"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_are_trained_later_are_looked_at_too(worlds):
    worlds(4).run(add_a_mistake)


# Checkpoints and gradient scalers


def make_trainer(kind: str, mesh: DeviceMesh, replica: int) -> tuple[nn.Sequential, Any]:
    model = make_net(replica)
    share(model, mesh)
    # After an odd number of steps the replicas differ.
    options = {"group": mesh["gossip"].get_group(), "broadcast": False, "local_steps": 2}
    return model, {**KINDS, **MORE_KINDS}[kind](sgd(model), model, **options)


def resume(kind: str, path: Path) -> None:
    """Saves all replicas as one checkpoint, goes on, and does both again from it; then shards them in another way."""
    fogdist.init()
    rank, mesh = dist.get_rank(), mesh_of("2 x 4")
    replica = rank // 4

    def run(model: nn.Module, optimizer: Any, steps: range) -> Tensor:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        optimizer.settle()
        return vector_of(model)

    def state_of(model: nn.Module, optimizer: Any, replica: int) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {f"replica{replica}": {"model": of_model, "optimizer": of_optimizer}}

    def load(model: nn.Module, optimizer: Any, replica: int) -> None:
        state = state_of(model, optimizer, replica)
        checkpoint.load(state, checkpoint_id=path)
        loaded = state[f"replica{replica}"]
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )

    model, optimizer = make_trainer(kind, mesh, replica)
    saved = run(model, optimizer, range(3))
    checkpoint.save(state_of(model, optimizer, replica), checkpoint_id=path)
    expected = run(model, optimizer, range(3, 6))
    model, optimizer = make_trainer(kind, mesh, 7)
    load(model, optimizer, replica)
    assert torch.equal(vector_of(model), saved)
    assert torch.equal(run(model, optimizer, range(3, 6)), expected)
    both: list[Any] = [None] * 8
    dist.all_gather_object(both, saved)
    model, optimizer = make_trainer(kind, mesh_of("4 x 2"), 7)
    load(model, optimizer, rank // 2 % 2)
    assert torch.equal(vector_of(model), both[rank // 2 % 2 * 4]) and not torch.equal(both[0], both[4])
    assert optimizer.steps == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gradient tracking", "AdamW", "DiLoCo"])
def test_training_goes_on_from_a_checkpoint(worlds, tmp_path, kind):
    worlds(8).run(resume, kind, tmp_path / "saved")


def overflow() -> bool:
    """One shard's gradient overflows; returns whether the model has moved, in steps without an exchange."""
    fogdist.init()
    mesh, rank = mesh_of("2 x 2"), dist.get_rank()
    model = make_net(0)
    share(model, mesh)
    group = mesh["gossip"].get_group()
    optimizer = fogdist.DecentralizedOptimizer(sgd(model), model, local_steps=2, group=group)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = vector_of(model)
    scaler.scale(loss_of(model, rank, 0)).backward()
    if rank == 0:
        model[0].weight.grad.to_local()[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0 if rank < 2 else 4.0)
    return not torch.equal(vector_of(model), before)


@pytest.mark.filterwarnings("ignore")
def test_all_shards_of_a_replica_leave_out_a_step_whose_gradients_overflow(worlds):
    assert worlds(4).run(overflow) == [False, False, True, True]
