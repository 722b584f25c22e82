"""Tests distributed optimizers inside the wrappers of training frameworks, whose classes derive from the optimizer's.

At run time, Lightning and its Fabric derive a class from their own class and the class of the given optimizer. Each
case is trained twice: with such a wrapper, and without one. `test_frameworks` has the frameworks themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fogdist
import pytest
import torch
from fogdist import algorithms
from harness import on_ranks
from reference import Checks
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from training_cases import VIEWS, loss_of, make_net, snapshot, train_step

KINDS: dict[str, Callable[[Optimizer, nn.Module], Any]] = {
    kind: VIEWS[kind] for kind in ("awc", "atc", "gradient", "put", "DecentralizedSGD", "GradientTracking")
}
DYNAMIC = ["awc", "atc", "DecentralizedSGD"]


class Strategy:
    """Stands in for the strategy that a framework gives to its wrappers."""

    def __init__(self) -> None:
        self.steps = 0

    def optimizer_step(self, optimizer: Optimizer, *arguments: Any) -> Any:
        self.steps += 1
        return optimizer.step(*arguments)


class Wrapper:
    """The common part of both forms of a wrapper."""

    _optimizer: Optimizer
    _strategy: Strategy | None

    def step(self, *arguments: Any) -> Any:
        assert self._strategy is not None
        return self._strategy.optimizer_step(self._optimizer, *arguments)


class Holding(Wrapper):
    """Holds the optimizer and asks it for missing attributes, as Lightning does today."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._strategy = None
        self.__class__ = type(f"Holding{type(optimizer).__name__}", (Holding, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Copying(Wrapper):
    """Copies the optimizer's attributes when it is made, as earlier versions of Lightning did."""

    def __init__(self, optimizer: Optimizer) -> None:
        taken = {name: value for name, value in vars(optimizer).items() if name not in ("state_dict", "step")}
        self.__dict__ = taken
        self.__class__ = type(f"Copying{type(optimizer).__name__}", (Copying, type(optimizer)), {})
        self._optimizer = optimizer
        self._strategy = None


FORMS: list[type[Wrapper]] = [Holding, Copying]


def trained(kind: str, form: Callable[[Optimizer], Any] | None, checks: Checks) -> Tensor:
    """Returns the parameters after some steps, through a wrapper or without one."""
    rank, size = fogdist.rank(), fogdist.size()
    label = f"{kind} {form.__name__ if form else 'alone'}"
    model = make_net(rank)
    plain = SGD(model.parameters(), lr=0.1, momentum=0.5)
    view = optimizer = KINDS[kind](plain, model)
    if kind == "put":
        view.force_barrier = True
    if form is not None:
        optimizer = form(view)
        optimizer._strategy = strategy = Strategy()
        checks.true(f"{label}: class", isinstance(optimizer, SGD))
        checks.true(f"{label}: strategy", "_strategy" in vars(optimizer) and not hasattr(view, "_strategy"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):
        if kind in DYNAMIC and step == 2:
            view.enable_topo_check = True
            optimizer.self_weight = 0.25
            optimizer.src_weights = {(rank - 1) % size: 0.75}
            optimizer.dst_weights = [(rank + 1) % size]
            checks.equal(f"{label}: weights", (view.self_weight, optimizer.self_weight), (0.25, 0.25))
            checks.true(f"{label}: check", optimizer.enable_topo_check)
        train_step(model, optimizer, rank, step)
        scheduler.step()
    checks.equal(f"{label}: rate", plain.param_groups[0]["lr"], 0.025)
    ours = {name for name in vars(plain) if view._fog_is_declared(name)}
    checks.equal(f"{label}: in the user's optimizer", ours, set())
    if form is not None:
        checks.equal(f"{label}: steps", strategy.steps, 4)
        del optimizer._strategy
        checks.true(f"{label}: deleted", "_strategy" not in vars(optimizer))
        optimizer.turn_on_timeline()
        checks.true(f"{label}: timeline", view._fog_marks is not None)
        optimizer.turn_off_timeline()
        checks.true(f"{label}: no timeline", view._fog_marks is None)
        if kind in ("awc", "atc", "gradient", "put"):  # BlueFog's
            with pytest.warns(DeprecationWarning, match="src_weights"):
                optimizer.neighbor_weights = {}
            checks.equal(f"{label}: old name", view.src_weights, {})
        with pytest.raises(ValueError, match="distributed already"):
            KINDS[kind](optimizer, model)
    optimizer.load_state_dict(optimizer.state_dict())
    if kind == "put":
        optimizer.unregister_window()
    return snapshot(model)


def scaled(form: Callable[[Optimizer], Any] | None) -> Tensor:
    """Steps with a gradient scaler, which sets its marks on the wrapper; they are meant for the view."""
    rank = fogdist.rank()
    model = make_net(rank)
    optimizer: Any = algorithms.DecentralizedSGD(SGD(model.parameters(), lr=0.1), model)
    if form is not None:
        optimizer = form(optimizer)
        optimizer._strategy = Strategy()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        if step == 1 and rank == 0:
            next(model.parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    return snapshot(model)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@on_ranks(3)
def test_frameworks_that_derive_from_the_class() -> None:
    fogdist.init()
    with Checks() as checks:
        for kind in KINDS:
            expected = trained(kind, None, checks)
            for form in FORMS:
                checks.equal(f"{kind} {form.__name__}", trained(kind, form, checks), expected)
        expected = scaled(None)
        for form in FORMS:
            checks.equal(f"scaled {form.__name__}", scaled(form), expected)
