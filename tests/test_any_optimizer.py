"""Distributed optimizers around any optimizer, any model and what training scripts do: each against a recursion.

Every case is trained by ranks, and by one process that holds all models and mixes them with the matrix.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fogdist
import numpy as np
import pytest
import torch
from fogdist import topology as topologies
from harness import BACKEND
from reference import Checks, mix
from test_optimizers import FACTORIES, batch, loss_of, make_net, snapshot
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

pytestmark = pytest.mark.skipif(BACKEND != "fog", reason="fog's own optimizers")

EXACT = {"rtol": 1e-11, "atol": 1e-12}
COMBINING = ["awc", "atc"]


class Global(Optimizer):
    """As a third party might write one: a step size for all parameters from all gradients, and methods of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "seen": 0.0})
        self.is_training = True
        self.calls = 0

    def train(self, mode: bool = True) -> Global:
        self.is_training = mode
        return self

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> str:  # type: ignore[override]
        assert closure is None and self.is_training
        self.calls += 1
        with_gradient = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(p.grad.square().sum()) for p in with_gradient)
        self.param_groups[0]["seen"] += total
        for p in with_gradient:
            self.state[p]["last"] = p.grad.clone()
            p.sub_(p.grad, alpha=self.defaults["lr"] / (1 + self.param_groups[0]["seen"]) ** 0.5)
        return "stepped"


class Rotation(nn.Module):
    """Complex parameters, and a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 6, dtype=torch.complex128))
        self.second = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x.to(torch.complex128) @ self.first) @ self.second).abs() + self.shift


def rotation(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return Rotation().double()


def single_net(rank: int) -> nn.Module:
    return make_net(rank).float()


def autocast_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = (t.float() for t in batch(rank, step))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    return (output.float() - y).square().mean()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in trained(model) if p.dim() == 2], "lr": 0.03, "weight_decay": 0.1},
        {"params": [p for p in trained(model) if p.dim() != 2], "weight_decay": 0.0, "momentum": 0.5},
    ]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """As Muon is used: it takes the matrices, another optimizer takes the rest."""
    matrices = [p for p in trained(model) if p.dim() == 2]
    return [
        torch.optim.Muon(
            [{"params": matrices[:1], "lr": 0.05}, {"params": matrices[1:], "momentum": 0.8}], lr=0.02
        ),
        torch.optim.AdamW([p for p in trained(model) if p.dim() != 2], lr=0.01),
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """Attributes:
    optimizers: makes those of a model.
    model: of a rank.
    loss: of a model, for a rank and a step.
    scheduler: of an optimizer, if any.
    limit: clips the norm of gradients, if any.
    tolerance: how near a trajectory comes to its reference.
    """

    optimizers: Callable[[nn.Module], Iterable[Optimizer]]
    model: Callable[[int], nn.Module] = make_net
    loss: Callable[[nn.Module, int, int], Tensor] = loss_of
    scheduler: Callable[[Optimizer], Any] | None = None
    limit: float | None = None
    tolerance: float = 1e-11


def sgd(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


CASES = {
    "fused AdamW": Case(lambda m: [torch.optim.AdamW(m.parameters(), lr=0.02, fused=True)]),
    "foreach AdamW": Case(lambda m: [torch.optim.AdamW(m.parameters(), lr=0.02, foreach=True)]),
    "fused SGD": Case(lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True)]),
    "tensor learning rate": Case(lambda m: [torch.optim.Adam(m.parameters(), lr=torch.tensor(0.02))]),
    "NAdam": Case(lambda m: [torch.optim.NAdam(m.parameters(), lr=0.02)]),
    "Adafactor": Case(lambda m: [torch.optim.Adafactor(m.parameters(), lr=0.02)], tolerance=1e-9),
    "Rprop": Case(lambda m: [torch.optim.Rprop(m.parameters(), lr=0.02)]),
    "groups": Case(lambda m: [torch.optim.SGD(groups(m), lr=0.1, momentum=0.9)]),
    "third party": Case(lambda m: [Global(m.parameters(), lr=0.3).train()]),
    "complex": Case(lambda m: [torch.optim.AdamW(m.parameters(), lr=0.02)], rotation),
    "autocast": Case(sgd, single_net, autocast_loss, tolerance=5e-3),
    "clipped": Case(sgd, limit=0.05),
    "one cycle": Case(sgd, scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=6)),
    "warm-up from 0": Case(sgd, scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: n / 5)),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    # It orthogonalizes in bfloat16.
    CASES["Muon and AdamW"] = Case(muon_and_adamw, tolerance=2e-3)
STEPS = 5


def finish(case: Case, model: nn.Module) -> None:
    if case.limit is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.limit)


def train(name: str, kind: str) -> Tensor:
    case = CASES[name]
    fogdist.init()
    rank = fogdist.rank()
    model = case.model(rank)
    optimizers = [FACTORIES[kind](base, model) for base in case.optimizers(model)]
    schedulers = [case.scheduler(each) for each in optimizers if case.scheduler]
    trajectory = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            case.loss(model, rank, step).backward()
            if kind == "gradient":
                for optimizer in optimizers:
                    optimizer.synchronize()
            finish(case, model)
            results = [optimizer.step() for optimizer in optimizers]
            for scheduler in schedulers:
                scheduler.step()
            trajectory.append(snapshot_of(model))
    if name == "third party":
        assert results == ["stepped"]
        assert optimizers[0].calls == STEPS
        wrapped = optimizers[0]._fog_wrapped
        assert optimizers[0].train(False).calls == wrapped.calls and not wrapped.is_training
    return torch.stack(trajectory)


def snapshot_of(model: nn.Module) -> Tensor:
    """All parameters, in float64."""
    parts = [torch.view_as_real(p) if p.is_complex() else p for p in model.parameters()]
    return torch.cat([p.detach().double().reshape(-1) for p in parts])


def simulate(name: str, kind: str, size: int) -> list[Tensor]:
    case = CASES[name]
    models = [case.model(r) for r in range(size)]
    optimizers = [list(case.optimizers(m)) for m in models]
    schedulers = [case.scheduler(each) for own in optimizers for each in own if case.scheduler]
    trajectories: list[list[Tensor]] = [[] for _ in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            case.loss(model, rank, step).backward()
        if kind == "gradient":
            average_gradients(models)
        for model in models:
            finish(case, model)
        if kind == "awc":
            combine(models)
        for own in optimizers:
            for optimizer in own:
                optimizer.step()
        if kind == "atc":
            combine(models)
        for scheduler in schedulers:
            scheduler.step()
        for trajectory, model in zip(trajectories, models):
            trajectory.append(snapshot_of(model))
    return [torch.stack(trajectory) for trajectory in trajectories]


def matrix_of(size: int) -> np.ndarray:
    return topologies.mixing_matrix(topologies.uniform_weights(topologies.ExponentialGraph(size)))


def combine(models: list[nn.Module]) -> None:
    with torch.no_grad():
        for same in zip(*(trained(m) for m in models)):
            for parameter, value in zip(
                same, mix([p.detach().clone() for p in same], matrix_of(len(models)))
            ):
                parameter.copy_(value)


def average_gradients(models: list[nn.Module]) -> None:
    for same in zip(*(trained(m) for m in models)):
        if same[0].grad is not None:
            mean = torch.stack([p.grad for p in same]).mean(0)
            for p in same:
                p.grad = mean.clone()


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("name", CASES)
def test_trajectories(worlds, name, kind):
    tolerance = CASES[name].tolerance
    for got, expected in zip(worlds(3).run(train, name, kind), simulate(name, kind, 3)):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# --- closures that are evaluated several times --------------------------------------------------------------


def lbfgs(kind: str) -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    models = [make_net(r) for r in range(size)]
    model = copy.deepcopy(models[rank])
    options: dict[str, Any] = {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    optimizer = FACTORIES[kind](torch.optim.LBFGS(trained(model), **options), model)
    bases = [torch.optim.LBFGS(trained(m), **options) for m in models]

    def closure_of(model: nn.Module, optimizer: Optimizer, r: int) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, r, 0)
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        loss = optimizer.step(closure_of(model, optimizer, rank))
        losses = [base.step(closure_of(m, base, r)) for r, (m, base) in enumerate(zip(models, bases))]
        combine(models)
        torch.testing.assert_close(loss, losses[rank], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(snapshot(model), snapshot(models[rank]), rtol=1e-7, atol=1e-9)


def test_lbfgs(worlds):
    worlds(3).run(lbfgs, "atc")


class WithOptions(torch.optim.SGD):
    """Its step takes more than a closure."""

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, scale: float = 1.0
    ) -> tuple[Any, float]:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=scale * group["lr"])
        return loss, scale


VIEWS = {**FACTORIES, "win_put": fogdist.DistributedWinPutOptimizer}


def options_of_step(kind: str) -> None:
    fogdist.init(lambda size: topologies.FullyConnectedGraph(size))
    rank = fogdist.rank()
    model = make_net(0)
    options = {"force_barrier": True} if kind == "win_put" else {}
    optimizer = VIEWS[kind](WithOptions(model.parameters(), lr=0.1), model)
    for name, value in options.items():
        setattr(optimizer, name, value)
    scales = [2.0, 0.5, 0.0, 1.0]
    for step, scale in enumerate(scales):
        optimizer.zero_grad()
        before = snapshot(model)
        loss = loss_of(model, 0, step)
        loss.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        gradient = torch.cat([each.reshape(-1) for each in gradients])
        result = optimizer.step(scale=scale) if step < 3 else optimizer.step()
        assert result == (None, scale)
        # Ranks are alike, so averages change nothing.
        torch.testing.assert_close(snapshot(model), before - 0.1 * scale * gradient, rtol=1e-11, atol=1e-12)
    for arguments, named in (((None, 3), {}), ((None,), {"closure": None})):
        with pytest.raises(TypeError, match="one argument without a name"):
            optimizer.step(*arguments, **named)
    with pytest.raises(TypeError, match="unknown"):
        optimizer.step(unknown=rank)
    if kind == "win_put":
        optimizer.unregister_window()
    if kind == "atc":
        del optimizer
        optimizer = VIEWS[kind](WithOptions(model.parameters(), lr=0.1), model, step_in_backward=True)
        with pytest.raises(TypeError, match=r"step_in_backward=True, got scale"):
            optimizer.step(scale=2.0)


@pytest.mark.parametrize("kind", VIEWS)
def test_options_of_step(worlds, kind):
    worlds(2).run(options_of_step, kind)


# --- gradient scalers ---------------------------------------------------------------------------------------

OVERFLOWS = {(0, 1), (2, 1), (1, 3)}  # rank and step


def scaled(kind: str, form: str) -> None:
    """Ranks whose gradients overflow leave out their own step, each by itself, but not the average."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    models: list[nn.Module] = [single_net(r) for r in range(size)]
    model = copy.deepcopy(models[rank])

    def make(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.02, fused=form == "fused")

    optimizer = FACTORIES[kind](make(model), model)
    bases = [make(m) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            x, y = (t.float() for t in batch(rank, step))
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            if (rank, step) in OVERFLOWS:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if form == "unscaled":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

            for r, each in enumerate(models):
                x, y = (t.float() for t in batch(r, step))
                bases[r].zero_grad()
                (each(x) - y).square().mean().backward()
                if form == "unscaled":
                    nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            if kind == "awc":
                combine(models)
            for r, base in enumerate(bases):
                if (r, step) not in OVERFLOWS:
                    base.step()
            if kind == "atc":
                combine(models)
    assert scaler.get_scale() == 1024.0 / 2 ** sum(r == rank for r, _ in OVERFLOWS)
    assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer._fog_wrapped, "found_inf")
    torch.testing.assert_close(snapshot(model), snapshot(models[rank]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["scaled", "unscaled", "fused"])
@pytest.mark.parametrize("kind", COMBINING)
def test_gradients_that_overflow_on_some_ranks(worlds, kind, form):
    worlds(3).run(scaled, kind, form)


def averaged_and_scaled(form: str) -> None:
    """With averaged gradients an overflow on one rank is everybody's: as in one process with the mean of the losses."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    model, reference = single_net(0), single_net(0)

    def make(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.02, fused=form == "fused")

    every = 2 if form == "accumulated" else 1
    optimizer = fogdist.DistributedGradientAllreduceOptimizer(make(model), model, every)
    base = make(reference)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]

    def loss_of_rank(model: nn.Module, r: int, number: int) -> Tensor:
        x, y = (t.float() for t in batch(r, number))
        loss = (model(x) - y).square().mean()
        return loss * float("inf") if (r, number // every) in OVERFLOWS else loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            optimizer.zero_grad()
            base.zero_grad()
            for number in range(every * step, every * (step + 1)):
                scalers[0].scale(loss_of_rank(model, rank, number)).backward()
                mean = sum(loss_of_rank(reference, r, number) for r in range(size)) / size
                scalers[1].scale(mean).backward()
            if form in ("synchronized", "clipped"):
                optimizer.synchronize()
            for scaler, each, net in zip(scalers, (optimizer, base), (model, reference), strict=True):
                if form == "clipped":
                    scaler.unscale_(each)
                    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                scaler.step(each)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            torch.testing.assert_close(snapshot(model), snapshot(reference), rtol=1e-4, atol=1e-5)
    assert scalers[0].get_scale() == 1024.0 / 2 / 2 * 2
    assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer._fog_wrapped, "found_inf")


@pytest.mark.parametrize("form", ["scaled", "synchronized", "clipped", "accumulated", "fused"])
def test_gradients_that_are_averaged_and_scaled(worlds, form):
    worlds(3).run(averaged_and_scaled, form)


def unscaled_too_early() -> None:
    """What a scaler unscales before the average is refused, on all ranks, and the next iteration is sound."""
    fogdist.init()
    rank = fogdist.rank()
    model = single_net(0)
    optimizer = fogdist.DistributedGradientAllreduceOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        x, y = (t.float() for t in batch(rank, step))
        scaler.scale((model(x) - y).square().mean()).backward()
        if step % 2 == 0:
            before = snapshot(model)
            scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match=r"synchronize\(\) before"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scaler.step(optimizer)
            assert torch.equal(snapshot(model), before)
        else:
            scaler.step(optimizer)
            assert not torch.equal(snapshot(model), before)
        scaler.update()
    assert fogdist.consensus_distance(model) == 0


def test_a_scaler_must_not_unscale_before_the_average(worlds):
    worlds(2).run(unscaled_too_early)


# --- checkpoints --------------------------------------------------------------------------------------------


def steps(kind: str, model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, fogdist.rank(), step).backward()
        optimizer.step()
    optimizer.zero_grad()


def checkpoints(kind: str, folder: str) -> None:
    """Training that was interrupted goes on as if it were not, from each kind of checkpoint."""
    fogdist.init()
    rank = fogdist.rank()
    own = Path(folder) / kind / str(rank)

    def start(seed: int) -> tuple[nn.Module, Any]:
        model = make_net(seed)
        del (
            model.unused
        )  # torch.distributed.checkpoint wants state of every parameter, as plain optimizers have too
        return model, FACTORIES[kind](torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.1), model)

    model, optimizer = start(rank)
    steps(kind, model, optimizer, 0, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    weights, state = get_state_dict(model, optimizer)
    # Ranks differ, so each has a checkpoint of its own.
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=own, no_dist=True)
    steps(kind, model, optimizer, 3, 6)

    with Checks() as checks:
        other, resumed = start(10 + rank)
        file.seek(0)
        saved = torch.load(file)
        other.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
        steps(kind, other, resumed, 3, 6)
        checks.true("torch.save", torch.equal(snapshot(other), snapshot(model)))

        other, resumed = start(20 + rank)
        if rank == 1:
            fogdist.barrier()  # a rank loads when it likes: nothing is exchanged meanwhile
        weights, state = get_state_dict(other, resumed)
        checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=own, no_dist=True)
        set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
        if rank == 0:
            fogdist.barrier()
        steps(kind, other, resumed, 3, 6)
        checks.true("torch.distributed.checkpoint", torch.equal(snapshot(other), snapshot(model)))


@pytest.mark.parametrize("kind", FACTORIES)
def test_checkpoints(worlds, kind, tmp_path):
    worlds(2).run(checkpoints, kind, str(tmp_path))


# --- torch.compile ------------------------------------------------------------------------------------------


def compiled(wraps: str) -> None:
    """A compiled model, whether its optimizer was given that or the model itself, before it was called or after."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    with Checks() as checks:
        for kind in FACTORIES:
            torch.compiler.reset()
            models: list[nn.Module] = [make_net(r) for r in range(size)]
            model = copy.deepcopy(models[rank])
            called = torch.compile(model, backend="aot_eager")
            if wraps == "called before":
                loss_of(called, rank, 9).backward()
                model.zero_grad()
            given = called if wraps == "compiled" else model
            optimizer = FACTORIES[kind](torch.optim.SGD(given.parameters(), lr=0.1, momentum=0.9), given)
            bases = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
            for step in range(3):
                optimizer.zero_grad()
                loss = loss_of(called, rank, step)
                if kind == "awc":
                    checks.true(f"{wraps} {step} overlaps", optimizer.is_in_round)
                loss.backward()
                optimizer.step()
                for r, each in enumerate(models):
                    bases[r].zero_grad()
                    loss_of(each, r, step).backward()
                if kind == "gradient":
                    average_gradients(models)
                if kind == "awc":
                    combine(models)
                for base in bases:
                    base.step()
                if kind == "atc":
                    combine(models)
            difference = (snapshot(model) - snapshot(models[rank])).abs().max().item()
            checks.true(f"{kind}: {difference}", difference < 1e-11)


@pytest.mark.parametrize("wraps", ["model", "compiled", "called before"])
def test_compiled_models(worlds, wraps):
    worlds(2).run(compiled, wraps)
