"""Tests of torch.ops.fog: the exchange as an operator that autograd differentiates and torch.compile traces."""

from __future__ import annotations

from typing import Any

import fogdist
import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, sizes
from reference import Checks, make_input, mix
from torch import Tensor
from torch._subclasses import FakeTensorMode

SIZES = sizes([1, 4], [2])
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def random_matrix(size: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.uniform(-1, 1, (size, size)) * (generator.random((size, size)) < 0.6)


def arguments_of(matrix: np.ndarray, rank: int) -> tuple[Any, ...]:
    """Returns the operator's arguments for a mixing matrix; each edge has a weight on both sides."""
    others = [r for r in range(len(matrix)) if r != rank]
    sources = [r for r in others if matrix[r, rank] != 0]
    destinations = [r for r in others if matrix[rank, r] != 0]
    return (
        float(matrix[rank, rank]),
        sources,
        [float(matrix[s, rank]) * (s + 2) for s in sources],
        destinations,
        [1 / (rank + 2) for _ in destinations],
    )


@on_ranks(SIZES)
def test_values() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    with Checks() as checks:
        for seed, dtype in enumerate(DTYPES):
            matrix = random_matrix(size, seed)
            inputs = [make_input(r, dtype, (4, 3), seed) for r in range(size)]
            mine = inputs[rank].clone()
            for view in (lambda t: t, lambda t: t.t()):
                output = torch.ops.fog.neighbor_allreduce(view(mine), *arguments_of(matrix, rank))
                checks.close(f"{dtype}", output, view(mix(inputs, matrix)[rank]))
                checks.true("contiguous", output.is_contiguous())
            checks.equal("input", mine, inputs[rank])


def gradients() -> None:
    """Compares the gradients with autograd through the mixing matrix, applied by one process."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()

    def check(label: str, matrix: np.ndarray, operation: Any) -> None:
        weights = torch.from_numpy(matrix.T.copy())  # row: receiver
        everything = torch.stack([make_input(r, torch.float64, 5, 1) for r in range(size)])
        targets = torch.stack([make_input(r, torch.float64, 5, 2) for r in range(size)])
        x_all = everything.clone().requires_grad_()
        loss_all = ((weights.to(torch.float64) @ x_all) ** 3 * targets).sum()
        (first,) = torch.autograd.grad(loss_all, x_all, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x_all)
        x = everything[rank].clone().requires_grad_()
        loss = (operation(x) ** 3 * targets[rank]).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        checks.close(f"{label} gradient", gradient.detach(), first[rank].detach())
        (curvature,) = torch.autograd.grad((gradient**2).sum(), x)
        checks.true(
            f"{label} second derivative", torch.allclose(curvature, second[rank], rtol=1e-12, atol=1e-12)
        )

    with Checks() as checks:
        for seed in range(4):
            matrix = random_matrix(size, seed)
            arguments = arguments_of(matrix, rank)
            check(f"seed {seed}", matrix, lambda x, a=arguments: torch.ops.fog.neighbor_allreduce(x, *a))


@pytest.mark.parametrize("size", SIZES)
def test_gradients(worlds, size):
    worlds(size).run(gradients)


def complex_gradients() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    mean = arguments_of(np.full((size, size), 1 / size), rank)
    x = make_input(rank, torch.complex128, 3).requires_grad_()
    output = torch.ops.fog.neighbor_allreduce(x, *mean)
    output.abs().square().sum().backward()
    # Every rank has the same mean m, and the loss of all ranks is size |m|^2, so the gradient is 2 m.
    assert torch.allclose(x.grad, 2 * output.detach(), rtol=1e-14)
    half = make_input(rank, torch.float16, 3).requires_grad_()
    torch.ops.fog.neighbor_allreduce(half, *mean).sum().backward()
    assert half.grad.dtype == torch.float16
    assert torch.allclose(half.grad, torch.ones(3, dtype=torch.float16), rtol=1e-3)


def test_gradients_of_other_dtypes(worlds):
    worlds(3).run(complex_gradients)


@on_ranks(2)
def test_registration() -> None:
    # Schema, fake kernel, autograd key and AOT dispatch are each compared with eager results.
    fogdist.init()
    arguments = arguments_of(random_matrix(fogdist.size(), 3), fogdist.rank())
    x = make_input(fogdist.rank(), torch.float64, (2, 3)).requires_grad_()
    group = torch.distributed.group.WORLD.group_name
    torch.library.opcheck(torch.ops.fog.neighbor_allreduce, (x, *arguments, group))


def compiled() -> None:
    import torch._dynamo

    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    arguments = arguments_of(random_matrix(size, 5), rank)

    def step(x: Tensor) -> Tensor:
        return (torch.ops.fog.neighbor_allreduce(torch.sin(x), *arguments) * 2).sum()

    x = make_input(rank, torch.float64, (3, 2)).requires_grad_()
    torch._dynamo.reset()
    # aot_eager traces with fake tensors, as every backend does, but needs no C++ compiler.
    program = torch.compile(step, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(step(x), x)
    result = program(x)
    (gradient,) = torch.autograd.grad(result, x)
    assert torch.equal(result, step(x))
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("size", sizes([4], [1, 3]))
def test_compiled_programs(worlds, size):
    worlds(size).run(compiled)


def test_tracing_needs_no_group():
    with FakeTensorMode():
        x = torch.empty(3, 4, dtype=torch.bfloat16).t()
        output = torch.ops.fog.neighbor_allreduce(x, 0.5, [1], [0.5], [1], [1.0], "a group")
        assert output.shape == (4, 3)
        assert output.dtype == torch.bfloat16
        assert output.is_contiguous()
        with pytest.raises(ValueError, match="dtype"):
            torch.ops.fog.neighbor_allreduce(torch.ones(2, dtype=torch.int32), 0.5, [], [], [], [])


def test_without_init():
    with pytest.raises(ValueError, match=r"fogdist\.init\(\)"):
        torch.ops.fog.neighbor_allreduce(torch.ones(2), 1.0, [], [], [], [])


@on_ranks(2)
def test_wrong_arguments() -> None:
    fogdist.init()
    x = torch.ones(2)
    if fogdist.rank() == 0:
        for arguments, message in [
            ((x, float("nan"), [], [], [], []), "self_weight.*finite"),
            ((x, 1.0, [1], [], [], []), "src_weights.*as many as src_ranks"),
            ((x, 1.0, [], [], [1], [1.0, 2.0]), "dst_weights.*as many as dst_ranks"),
            ((x, 1.0, [0], [1.0], [], []), "src_ranks.*itself"),
            ((x, 1.0, [], [], [2], [1.0]), "dst_ranks"),
            ((x, 1.0, [], [], [1], [float("inf")]), r"dst_weights\[0\].*finite"),
            ((x.int(), 1.0, [], [], [], []), "tensor.*int32"),
            ((x, 1.0, [], [], [], [], "no such group"), "group_name.*no such group"),
        ]:
            with pytest.raises(ValueError, match=message):
                torch.ops.fog.neighbor_allreduce(*arguments)
    dist.barrier()


@on_ranks(3)
def test_groups_by_name() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    group = torch.distributed.new_group(range(size), backend="fog")
    arguments = arguments_of(np.full((size, size), 1 / size), rank)
    x = torch.tensor([float(rank)])
    assert torch.ops.fog.neighbor_allreduce(x, *arguments, group.group_name).item() == pytest.approx(1.0)
    torch.distributed.destroy_process_group(group)
    with pytest.raises((ValueError, RuntimeError), match="group"):
        torch.ops.fog.neighbor_allreduce(x, *arguments, group.group_name)
