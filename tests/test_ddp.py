"""Compares DistributedDataParallel on the backend with one process that trains on the concatenated batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from harness import WorldPool, sizes
from reference import Checks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
ROWS = 6  # rows in the batch of one rank
FEATURES = 20
CLASSES = 5


class Network(nn.Module):
    """A multi-layer perceptron with an optional branch, so that some parameters have no gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, CLASSES)
        ).to(dtype)
        self.branch = nn.Linear(FEATURES, CLASSES).to(dtype)

    def forward(self, features: Tensor, use_branch: bool) -> Tensor:
        scores = self.layers(features)
        return scores + self.branch(features) if use_branch else scores


def network(dtype: torch.dtype, seed: int) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Network(dtype)


def batches(size: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the concatenated batch of all ranks for every step."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        features = torch.randn(size * ROWS, FEATURES, dtype=torch.float64, generator=generator).to(dtype)
        yield features, torch.randint(0, CLASSES, (size * ROWS,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_alone(size: int, dtype: torch.dtype, branch_steps: range) -> Network:
    model = network(dtype, 0)
    optimizer = sgd(model)
    for step, (features, labels) in enumerate(batches(size, dtype)):
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(features, step in branch_steps), labels).backward()
        optimizer.step()
    return model


def train(
    dtype: torch.dtype, options: dict[str, object], hook: str | None, pieces: int, branch_steps: range
) -> None:
    """Trains with DDP and compares with training alone.

    Args:
        dtype: Dtype of the parameters.
        options: Options of DistributedDataParallel.
        hook: Name of a communication hook of ``default_hooks``.
        pieces: Number of parts of a rank's batch whose gradients are accumulated; all but the last under ``no_sync``.
        branch_steps: Steps that use the optional branch.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # Ranks start with different values: DDP broadcasts the parameters of rank 0.
    model = DistributedDataParallel(network(dtype, rank), **options)
    if hook is not None:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    optimizer = sgd(model)
    for step, (features, labels) in enumerate(batches(size, dtype)):
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        optimizer.zero_grad(set_to_none=False)
        parts = list(zip(features[mine].chunk(pieces), labels[mine].chunk(pieces), strict=True))
        for index, (x, y) in enumerate(parts):
            with model.no_sync() if index < pieces - 1 else nullcontext():
                (nn.functional.cross_entropy(model(x, step in branch_steps), y) / pieces).backward()
        optimizer.step()

    expected = train_alone(size, dtype, branch_steps)
    compressed = hook is not None and "compress" in hook
    tolerance = 1e-2 if compressed else {torch.float64: 1e-12, torch.float32: 2e-5}[dtype]
    with Checks() as checks:
        for name, parameter in model.module.named_parameters():
            wanted = expected.get_parameter(name)
            difference = (parameter - wanted).abs().max().item()
            checks.true(f"{name} differs by {difference}", difference <= tolerance)
            # All ranks must have the same bits, or the replicas would drift apart.
            copies = [torch.zeros_like(parameter.data) for _ in range(size)]
            dist.all_gather(copies, parameter.data)
            checks.equal(f"{name} on all ranks", copies, [parameter.data] * size)
        if options.get("gradient_as_bucket_view"):
            storages = {p.grad.untyped_storage().data_ptr() for p in model.module.layers.parameters()}
            parameters = len(list(model.module.layers.parameters()))
            checks.true("gradients are views of buckets", len(storages) < parameters)


ALWAYS = range(STEPS)
ONE_BUCKET = {"bucket_cap_mb": 25}
MANY_BUCKETS = {"bucket_cap_mb": 0.004}


@pytest.mark.parametrize("size", sizes([1, 3], [2, 4]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("view", [False, True])
def test_training_equals_one_process(worlds: WorldPool, size: int, dtype: torch.dtype, view: bool) -> None:
    for buckets in (ONE_BUCKET, MANY_BUCKETS):
        worlds(size).run(train, dtype, {**buckets, "gradient_as_bucket_view": view}, None, 1, ALWAYS)


@pytest.mark.parametrize("size", sizes([3], [2]))
def test_no_sync_accumulates(worlds: WorldPool, size: int) -> None:
    worlds(size).run(train, torch.float64, MANY_BUCKETS, None, 3, ALWAYS)


@pytest.mark.parametrize("size", sizes([3], [2]))
@pytest.mark.parametrize("hook", ["allreduce_hook", "fp16_compress_hook"])
def test_communication_hooks(worlds: WorldPool, size: int, hook: str) -> None:
    worlds(size).run(train, torch.float32, MANY_BUCKETS, hook, 1, ALWAYS)


@pytest.mark.parametrize("size", sizes([3], [2]))
def test_unused_parameters(worlds: WorldPool, size: int) -> None:
    options = {**MANY_BUCKETS, "find_unused_parameters": True}
    worlds(size).run(train, torch.float64, options, None, 1, range(0, STEPS, 2))


def static_graph() -> None:
    train(torch.float64, {**MANY_BUCKETS, "static_graph": True}, None, 1, ALWAYS)


def many_models() -> None:
    """Models are made and dropped, and nothing stays in flight."""
    for _ in range(5):
        train(torch.float32, ONE_BUCKET, None, 1, ALWAYS)


@pytest.mark.parametrize("function", [static_graph, many_models])
def test_other_ways_to_use_it(worlds: WorldPool, function: Callable[[], None]) -> None:
    worlds(2).run(function)
