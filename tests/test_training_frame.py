"""Tests of the training frame: each test checks one promise for all entries that make it.

Each test compares a run of an entry with another run of the same entry, or with one process that simulates all ranks.
The recursions have their own tests: `test_optimizers`, `test_window_optimizers`, `test_algorithms` and
`test_decentralized_ddp`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.training.pass_watch import _watched
from harness import on_ranks
from reference import Checks
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training_cases import (
    BLUEFOGS,
    ENTRIES,
    EXACT,
    IN_STEP,
    RULES,
    VIEWS,
    WINDOWS,
    Net,
    Simulation,
    averages_begun,
    batch,
    distribute,
    distributed,
    end,
    loss_of,
    make_net,
    sgd,
    snapshot,
    start,
    train_step,
)

from fog_pg import _C

# Algorithms whose recursion uses the learning rate in addition to the optimizer's own step.
READ_RATES = ("ExactDiffusion",)
OVERLAPPING = ("awc", "cta", "push-sum", *WINDOWS, "wrapper")


def but(*names: str) -> list[str]:
    """Returns all entries except `names`."""
    assert set(names) <= set(ENTRIES)
    return [kind for kind in ENTRIES if kind not in names]


# --- changes that must not affect the result ----------------------------------------------------------------


class Scalable(torch.optim.SGD):
    """An optimizer whose `step` takes an argument in addition to the closure."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            group["lr"] *= scale
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] /= scale
        return result


@dataclasses.dataclass
class Training:
    """The state of one training run of an entry."""

    kind: str
    rank: int
    model: Net
    called: Any
    optimizer: Any
    scaler: Any

    def is_in_flight(self) -> bool:
        if self.kind == "wrapper":
            return bool(self.called._driver.is_in_round)
        return bool(getattr(self.optimizer, "is_in_round", False))

    def loss(self, step: int) -> Tensor:
        """Returns the loss of a training pass."""
        assert not self.is_in_flight()
        loss = loss_of(self.called, self.rank, step)
        assert self.is_in_flight() == (self.kind in OVERLAPPING and self.called.training)
        return loss


def plainly(run: Training, step: int) -> None:
    run.optimizer.zero_grad()
    run.loss(step).backward()
    run.optimizer.step()


def with_closure(run: Training, step: int) -> None:
    losses: list[Tensor] = []

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        losses.append(run.loss(step))
        losses[-1].backward()
        return losses[-1]

    result = run.optimizer.step(closure) if step % 2 else run.optimizer.step(closure=closure)
    assert result is losses[0] and len(losses) == 1


def with_scaler(run: Training, step: int) -> None:
    run.optimizer.zero_grad()
    run.scaler.scale(run.loss(step)).backward()
    if step % 2:
        if run.kind == "gradient":
            run.optimizer.synchronize()
        run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert run.scaler.get_scale() == 1024.0


def with_option(run: Training, step: int) -> None:
    run.optimizer.zero_grad()
    run.loss(step).backward()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.05
    run.optimizer.step(scale=2.0)


def with_other_passes(run: Training, step: int) -> None:
    """Adds forward passes that do not belong to the training, and zeroes gradients in place."""
    run.called.eval()
    loss_of(run.called, run.rank, 50)
    run.called.train()
    with torch.no_grad():
        loss_of(run.called, run.rank, 51)
    run.optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert step % 2 == 0 or not run.model.head.weight.grad.any()
    run.loss(step).backward()
    run.optimizer.step()


def with_a_pass_that_does_not_count(run: Training, step: int) -> None:
    run.called.train(step != 1)
    plainly(run, step)


def with_transforms(run: Training, step: int) -> None:
    """One rank also computes gradients by `torch.func`."""
    if run.rank == 0:
        x, y = batch(0, step)
        torch.func.grad(lambda x: (run.called(x) - y).square().mean())(x)
    plainly(run, step)


def with_gradients_of_functions(run: Training, step: int) -> None:
    """Passes in `torch.func` are not training passes, but their gradients work in `step` like all others."""
    x, y = batch(run.rank, step)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(run.model, parameters, (x,)) - y).square().mean()

    gradients = torch.func.grad(loss)(dict(run.model.named_parameters()))
    for name, parameter in run.model.named_parameters():
        if parameter.requires_grad and "unused" not in name:
            parameter.grad = gradients[name].detach()
    run.optimizer.step()


def with_reloads(run: Training, step: int) -> None:
    run.optimizer.zero_grad()
    run.loss(step).backward()
    if step % 2:  # loading a state dict ends the exchange in flight
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        assert run.is_in_flight() == (run.kind == "wrapper")
    run.optimizer.step()
    for each in (run.called, run.optimizer):
        each.load_state_dict(copy.deepcopy(each.state_dict()))


def with_saves(run: Training, step: int) -> None:
    """Only rank 0 saves. Its optimizer has no state yet, so torch makes it take a step with gradients of zero."""
    if run.rank == 0 and step in (0, 2):
        get_state_dict(run.model, run.optimizer)
    run.loss(step).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def synchronized(run: Training, step: int) -> None:
    run.optimizer.zero_grad()
    run.loss(step).backward()
    with pytest.raises(RuntimeError, match="synchronize"), run.optimizer.skip_synchronize():
        pass
    before = snapshot(run.model)
    run.optimizer.synchronize()
    assert torch.equal(before, snapshot(run.model)) == (run.kind == "gradient")
    with run.optimizer.skip_synchronize():
        run.optimizer.step()


COMPILED = {"compiled": "called", "given compiled": "given", "called before": "called"}
VARIATIONS: dict[str, tuple[Callable[[Training, int], None], list[str]]] = {
    "closure": (with_closure, ENTRIES),
    "scaler": (with_scaler, ENTRIES),
    "option of step": (with_option, but(*READ_RATES)),
    "other passes": (with_other_passes, ENTRIES),
    "a pass that does not count": (with_a_pass_that_does_not_count, but("cta")),
    "transforms": (with_transforms, ENTRIES),
    "gradients of functions": (with_gradients_of_functions, but("cta")),
    "reloads": (with_reloads, but("streaming")),  # which has an exchange in flight between two steps
    "saves": (with_saves, ENTRIES),
    "synchronize": (synchronized, ["awc", "push-sum", *WINDOWS, "gradient"]),
    "compiled": (plainly, ["awc", "atc", "gradient", "cta", "put", "wrapper"]),
    "given compiled": (plainly, ["awc", "atc", "gradient", "wrapper"]),
    "called before": (plainly, ["awc", "atc", "gradient"]),
}


def train(kind: str, variation: str, step_of: Callable[[Training, int], None]) -> Tensor:
    rank, _ = start()
    model = make_net(rank)
    base = Scalable(
        model.parameters(),
        lr=0.1,
        momentum=0.0 if variation == "saves" else 0.9,
    )
    given: Any = model
    compiled: Any = None
    if step_of is plainly and variation in COMPILED:
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager")
        if variation == "called before":
            loss_of(compiled, rank, 9).backward()
            model.zero_grad()
        elif variation == "given compiled":
            given = compiled
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch compiles on Python 3.13.0 too.
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
        with distributed(kind, base, given) as (called, optimizer):
            is_itself = compiled is not None and called is model
            run = Training(kind, rank, model, compiled if is_itself else called, optimizer, scaler)
            for step in range(4):
                step_of(run, step)
    return snapshot(model)


@functools.cache
def train_plainly(kind: str, variation: str) -> Tensor:
    return train(kind, variation, plainly)


# Algorithms that do everything in `step` attach to the model and the optimizer in the same way, so a sample is enough.
SAMPLE = ("DecentralizedSGD", "LocalSGD", "GradientTracking", "PushSumSGD")
ALIKE = ("other passes", "transforms", "gradients of functions", "reloads")


def marked(*case: str) -> Any:
    """Marks a case as `long` if its entry, the first item, is represented by an entry of SAMPLE."""
    return pytest.param(*case, marks=[pytest.mark.long] * (case[0] in IN_STEP and case[0] not in SAMPLE))


def variations() -> list[Any]:
    return [
        marked(kind, variation) if variation in ALIKE else (kind, variation)
        for variation, (_, kinds) in VARIATIONS.items()
        for kind in kinds
    ]


@pytest.mark.parametrize(("kind", "variation"), variations())
@on_ranks(2)
def test_what_changes_nothing(kind: str, variation: str) -> None:
    step_of, _ = VARIATIONS[variation]
    expected = train_plainly(kind, "saves" if variation == "saves" else "")
    torch.testing.assert_close(train(kind, variation, step_of), expected, **EXACT)


# --- the user's optimizer and arguments ---------------------------------------------------------------------


@on_ranks([1, 2], kind=VIEWS)
def test_it_is_the_users_optimizer(kind: str) -> None:
    rank, _ = start()
    with Checks() as checks, warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns if it does not see the steps
        model = make_net(rank)
        parameters = list(model.parameters())
        base = torch.optim.Adam(model.parameters(), lr=0.02)
        before = torch.optim.lr_scheduler.StepLR(base, 1, 0.5)
        loss_of(model, rank, 0).backward()
        base.step()
        calls: list[str] = []
        base.register_step_pre_hook(lambda *_: calls.append("pre"))
        frozen = model.frozen.weight.detach().clone()
        values = snapshot(model)
        attributes = set(vars(base))
        _, optimizer = distribute(kind, base, model)
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        checks.true("isinstance", isinstance(optimizer, torch.optim.Adam))
        if kind in IN_STEP:
            checks.true("isinstance of ours", isinstance(optimizer, getattr(algorithms, kind)))
        checks.equal("class name", type(optimizer).__name__, "Adam")
        checks.true("repr", repr(optimizer).startswith("Adam ("))
        checks.true("shared groups", optimizer.param_groups is base.param_groups)
        checks.true("shared state", optimizer.state is base.state)
        checks.equal("defaults", optimizer.defaults["lr"], 0.02)
        checks.true("same parameters", all(a is b for a, b in zip(parameters, model.parameters())))
        checks.equal("values", snapshot(model), values)
        checks.equal("tied", model.decoder.weight.data_ptr(), model.encoder.weight.data_ptr())
        after = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
            optimizer.step()
            if kind != "gradient":
                checks.equal("own gradients", [p.grad for p in parameters], gradients)
            before.step()
            after.step()
        # The step before the optimizer was distributed counts too.
        checks.equal("steps counted", int(next(iter(base.state.values()))["step"]), 3)
        checks.equal("hooks", calls, ["pre", "post"] * 2)
        checks.close("schedulers", torch.tensor(base.param_groups[0]["lr"]), torch.tensor(0.02 * 0.25 * 0.1))
        checks.equal("frozen", model.frozen.weight.detach().clone(), frozen)

        # State dicts can be loaded in both directions between plain and distributed optimizers.
        state = copy.deepcopy(optimizer.state_dict())
        plain = torch.optim.Adam(copy.deepcopy(model).parameters(), lr=1.0)
        plain.load_state_dict(state)
        checks.equal("to plain", plain.param_groups[0]["lr"], base.param_groups[0]["lr"])
        for group in plain.param_groups:  # including parameters for which only the algorithm had state
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        plain.step()
        state = copy.deepcopy(base.state_dict())
        state["param_groups"][0]["lr"] = 0.125
        optimizer.load_state_dict(state)
        checks.equal(
            "from plain", (optimizer.param_groups[0]["lr"], base.param_groups[0]["lr"]), (0.125,) * 2
        )
        shared = optimizer.param_groups is base.param_groups and optimizer.state is base.state
        checks.true("still shared", shared)
        # All of our state is in the view, so the optimizer can be kept, copied and distributed again.
        checks.equal("attributes", set(vars(base)), attributes)

        with pytest.raises(AttributeError, match="nor the Adam that it wraps has an attribute 'note'"):
            optimizer.note = 4
        base.note = 4  # type: ignore[attr-defined]
        optimizer.note = 5
        checks.equal("attributes are the user's", base.note, 5)  # type: ignore[attr-defined]
        del optimizer.note
        checks.true("deleted", not hasattr(base, "note"))
        with pytest.raises(TypeError, match="state_dict"):
            copy.deepcopy(optimizer)
        twin = snapshot(copy.deepcopy(model))
        end(model, optimizer)
        checks.equal("parameters keep their values", snapshot(model), twin)


@on_ranks(2, kind=[*BLUEFOGS, "cta", *WINDOWS, "GradientTracking"])
def test_wrong_arguments(kind: str) -> None:
    start()
    make = VIEWS[kind]
    model = make_net(0)
    base = sgd(model)
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    away = nn.Linear(2, 2, device="meta")
    named = sgd(model)
    named.local_steps = 5  # type: ignore[attr-defined]
    is_bluefogs = kind in BLUEFOGS or kind in WINDOWS
    interval = "num_steps_per_communication" if is_bluefogs else "local_steps"
    rows: list[tuple[Any, ...]] = [
        ((model, model), {}, TypeError, "optimizer.*Net"),
        ((base, base), {}, TypeError, "model.*SGD"),
        ((base, [model, 3]), {}, TypeError, "model"),
        ((base, model), {interval: 0}, ValueError, f"{interval}.*0"),
        ((base, model), {interval: 1.0}, TypeError, f"{interval}.*float"),
        ((base, model), {"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb must be above 0"),
        ((base, model), {"bucket_cap_mb": "8"}, TypeError, "bucket_cap_mb.*str"),
        ((stranger, model), {}, ValueError, r"parameter \d+ of group 0, of shape \(3,\)"),
        ((base, [model, make_net(1)]), {}, ValueError, "position"),
        ((base, []), {}, ValueError, "model"),
        ((named, model), {}, ValueError, "no attributes of its own.*SGD with 'local_steps'; give"),
        ((sgd(away), away), {}, ValueError, "'weight' must have memory, got one on the device meta"),
        ((torch.optim.LBFGS(model.parameters()), model), {}, ValueError, "LBFGS"),
    ]
    before = snapshot(model)
    for arguments, options, error, message in rows:
        with pytest.raises(error, match=message):
            make(*arguments, **options)
    assert torch.equal(snapshot(model), before) and not bf.get_current_created_window_names()
    optimizer = make(base, model)
    with pytest.raises(ValueError, match="distributed already"):
        make(optimizer, model)
    bf.win_free()
    fogdist.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        make(base, model)


@pytest.mark.parametrize("kind", ENTRIES)
def test_before_init(kind):
    model = make_net(0)
    base = sgd(model, momentum=0.0)
    with pytest.raises(ValueError, match=r"fogdist\.init\(\)"):
        distribute(kind, base, model)


class WithResult(Scalable):
    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        super().step(closure, scale=scale)
        return "stepped"


@on_ranks(2, kind=["awc", "atc", "gradient", "put", "GradientTracking"])
def test_arguments_of_step(kind: str) -> None:
    start()
    model = make_net(0)
    with distributed(kind, WithResult(model.parameters(), lr=0.1), model) as (_, optimizer):
        loss_of(model, 0, 0).backward()
        # Without momentum SGD has no state, but these are no calls that make it, as the rate is not 0.
        assert optimizer.step(closure=None) == optimizer.step() == "stepped" and optimizer.steps == 2
        with pytest.raises(TypeError, match="unknown"):
            optimizer.step(unknown=1)
        for arguments, named in (((None, 3), {}), ((None,), {"closure": None})):
            with pytest.raises(TypeError, match="positional arguments|multiple values"):
                optimizer.step(*arguments, **named)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


@on_ranks(2, kind=["awc", "atc", "wrapper"])
def test_a_step_that_needs_its_closure(kind: str) -> None:
    rank, _ = start()
    found = []
    for base in (torch.optim.SGD, NeedsClosure):
        model = make_net(rank)
        with distributed(kind, base(model.parameters(), lr=0.1), model) as (called, optimizer):
            for number in range(3):
                losses = []

                def closure() -> Tensor:
                    optimizer.zero_grad()
                    losses.append(loss_of(called, rank, number))
                    losses[-1].backward()
                    return losses[-1]

                assert optimizer.step(closure) is losses[0] and len(losses) == 1
            found.append(snapshot(model))
    assert torch.equal(*found)


# --- changes of parameters ----------------------------------------------------------------------------------


def set_data(model: Any, step: int) -> None:
    if step in (1, 3):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
    if step == 2:
        model.encoder.weight.data = model.encoder.weight.data.t().contiguous().t()


def set_by_vector(model: Any, step: int) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()) * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())


def load_state(model: Any, step: int) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def unfreeze(model: Any, step: int) -> None:
    model.frozen.requires_grad_(step >= 3)


CHANGES: dict[str, Callable[[Any, int], None]] = {
    "": lambda model, step: None,
    "data": set_data,
    "vector": set_by_vector,
    "state dict": load_state,
    "unfrozen": unfreeze,
}


class Embedding(nn.Module):
    """A module whose forward pass changes its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.words = nn.Embedding(5, 3, max_norm=0.8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.words(torch.arange(5))


def embedding(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return Embedding().double()


Models = Callable[[int], nn.Module]
# Kinds with changes and models, and options: parameters that get other values or memory; small buckets; parameters that others
# read where they are, until somebody replaces their data; forward passes that change parameters.
FOLLOWED: list[tuple[str, str, Models, dict[str, Any]]] = [
    # Unfreezing is an error with windows; see below.
    *((kind, change, make_net, {}) for kind in RULES for change in CHANGES if change not in ("", "unfrozen")),
    *((kind, "unfrozen", make_net, {}) for kind in RULES if kind not in WINDOWS),
    *((kind, "", make_net, {"bucket_cap_mb": 1e-4}) for kind in RULES),
    *((kind, "", embedding, {}) for kind in RULES),
]


@on_ranks(
    3, case=[pytest.param(case, id=f"{case[0]}-{case[1]}-{case[2].__name__}{case[3]}") for case in FOLLOWED]
)
def test_parameters_that_change(case: tuple[str, str, Models, dict[str, Any]]) -> None:
    """The same changes are applied to the model and to the simulated models before each step's forward pass."""
    kind, change, model_of, options = case
    rank, size = start()
    simulation = Simulation(RULES[kind], [model_of(r) for r in range(size)])
    model = model_of(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with distributed(kind, sgd(model), model, **options) as (called, optimizer):
            if kind != "gradient":
                buckets = (called._driver if kind == "wrapper" else optimizer).buckets
                assert len(buckets.flats) > 4 if "bucket_cap_mb" in options else len(buckets.flats) == 1
                assert not any(_C.is_shared(p) for p in model.parameters())
            views = [p.detach().view(-1) for p in model.parameters()] if change == "" else []
            for step in range(5):
                for each in (model, *simulation.models):
                    CHANGES[change](each, step)
                train_step(called, optimizer, rank, step)
                simulation.train(step)
                simulation.check(rank, model)
            assert all(torch.equal(v, p.detach().view(-1)) for v, p in zip(views, model.parameters()))


@on_ranks(3, kind=IN_STEP)
def test_parameters_that_are_unfrozen(kind: str) -> None:
    """A parameter takes part from the step in which it is unfrozen, and the state of the other parameters is kept."""
    rank, _ = start()
    runs = []
    for freezes in (True, False):
        model = make_net(0)
        base = sgd(model, momentum=0.0)
        with distributed(kind, base, model) as (_, optimizer):
            # In the run that does not freeze the head, the head has no gradient in the first steps.
            model.head.requires_grad_(not freezes)
            kept = model.head.weight.detach().clone()
            for step in range(6):
                if step == 4:
                    model.head.requires_grad_(True)
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                if step < 4:
                    model.head.weight.grad = model.head.bias.grad = None
                optimizer.step()
                if step < 4:
                    torch.testing.assert_close(model.head.weight.detach(), kept, rtol=0, atol=1e-12)
        runs.append(snapshot(model))
        assert not torch.equal(model.head.weight, kept)
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)


def thaw(model: nn.Module) -> None:
    model.frozen.requires_grad_(True)


CONVERTED = r"'position' must stay torch.float64.*Convert a model before"
FROZEN = r"shape \(4, 4\) was frozen when the optimizer was made"
# The kind, the change, the error and its message.
Refusal = tuple[str, Callable[[nn.Module], object], type[Exception], str]
REFUSED: list[Refusal] = [
    *((kind, thaw, ValueError, FROZEN) for kind in WINDOWS),
    *(
        (kind, nn.Module.float, ValueError, CONVERTED)
        for kind in ("awc", "atc", "cta", "put", "GradientTracking", "wrapper")
    ),
]


@on_ranks(2, case=REFUSED)
def test_changes_that_are_refused(case: Refusal) -> None:
    kind, change, error, message = case
    rank, _ = start()
    model = make_net(rank)
    called, optimizer = distribute(kind, sgd(model, momentum=0.0), model)
    change(model)
    with pytest.raises(error, match=message):
        loss_of(called, 0, 0).backward()
        optimizer.step()
    model.double()
    end(called, optimizer)


@on_ranks([1, 3], kind=[kind for kind in RULES if kind not in (*WINDOWS, "wrapper")])
def test_several_models_and_what_is_added(kind: str) -> None:
    """The optimizer mixes all that it holds: several models, added groups, and parameters that a model gets later."""
    rank, size = start()

    def models_of(r: int) -> nn.ModuleList:
        net = make_net(r)
        return nn.ModuleList([net, nn.Linear(3, 3).double()])

    def partly(models: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([models[0].position, models[0].encoder.weight], lr=0.1, momentum=0.9)

    def loss(models: Any, r: int, step: int) -> Tensor:
        x, y = batch(r, step)
        error = (models[1](models[0](x)) - y).square().mean()
        return error + (models[1].extra * (r + 1)).square().sum() if hasattr(models[1], "extra") else error

    simulation = Simulation(RULES[kind], map(models_of, range(size)), partly)
    models = models_of(rank)
    base = partly(models)
    with distributed(kind, base, list(models)) as (_, optimizer):
        with pytest.raises(ValueError, match="model"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert len(optimizer.param_groups) == 1
        for step in range(5):
            for r, each in enumerate((*simulation.models, models)):
                if step == 1:
                    group: dict[str, Any] = {"params": list(each[1].parameters()), "lr": 0.2}
                elif step == 3:
                    values = torch.full((3,), float(r if each is not models else rank), dtype=torch.float64)
                    each[1].extra = nn.Parameter(values)
                    group = {"params": [each[1].extra], "lr": 0.3}
                else:
                    continue
                (optimizer if each is models else simulation.optimizers[r][0]).add_param_group(group)
            optimizer.zero_grad()
            loss(models, rank, step).backward()
            optimizer.step()
            simulation.step(lambda m, r, k=step: loss(m, r, k).backward())
            simulation.check(rank, models)
        assert len(optimizer.param_groups) == 3


@on_ranks(2, kind=["awc", "atc", "gradient", "cta", "put", "GradientTracking", "wrapper"])
def test_ranks_with_other_parameters(kind: str) -> None:
    rank, _ = start()
    with Checks() as checks:
        wider = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2 + (rank == 1)))
        message = (
            r"(?s)(model|module) must be the same on all ranks.*only on ranks \[0\].*'1.weight'.*\(2, 3\)"
        )
        with pytest.raises(ValueError, match=message) as caught:
            distribute(kind, sgd(wider), wider)
        checks.true("only what differs", "'0.weight'" not in str(caught.value))
        if kind == "wrapper":
            return
        # These have the same length, so an average would succeed without the check.
        model = make_net(rank)
        other = [model.position, *model.encoder.parameters(), *model.head.parameters()]
        if rank == 1:
            other[0], other[2] = other[2], other[0]
        with pytest.raises(ValueError, match=r"(?s)model must be the same.*'encoder.bias'.*'position'"):
            distribute(kind, torch.optim.SGD(other, lr=0.1), model)
        if kind in WINDOWS:
            return
        model = make_net(rank)
        _, optimizer = distribute(kind, sgd(model), model)
        optimizer.step()
        before = snapshot(model)
        (model.frozen.bias if rank == 0 else model.position).requires_grad_(rank == 0)
        with pytest.raises(ValueError, match=r"(?s)model must be the same.*position"):
            optimizer.step()
        checks.true("not averaged", torch.equal(snapshot(model), before))


REPLACED = ["awc", "atc", "gradient", "cta", "put", "push-sum", "ExactDiffusion", "wrapper"]


def hooks_of(model: nn.Module) -> int:
    """Returns how often a model and its parameters are watched."""
    hooks = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    watches = _watched[model].watches if model in _watched else []
    return sum(map(len, [*hooks, watches]))


TAKES_OVER = [
    *((kind, "awc") for kind in REPLACED),
    ("awc", "gradient"),
    ("gradient", "gradient"),
    ("awc", "wrapper"),
]


@on_ranks(3, case=TAKES_OVER)
def test_a_later_optimizer_takes_over(case: tuple[str, str]) -> None:
    """As when a notebook's cell runs again: the last optimizer trains as if the earlier ones had never existed."""
    kind, later = case
    rank, size = start(topologies.ring)
    model = make_net(rank)
    simulation = Simulation(later if later != "wrapper" else "awc", map(make_net, range(size)))
    with distributed(later, sgd(alone := make_net(rank)), alone):
        hooks = hooks_of(alone)
    replaced = []
    options = {"window_prefix": "again"} if kind in WINDOWS else {}
    for number in range(3):
        called, optimizer = distribute(kind, sgd(model), model, **options)
        train_step(called, optimizer, rank, 10 + number)
        loss_of(called, rank, 20).backward()  # without a step, so an exchange may be in flight
        if kind != "wrapper":
            optimizer.turn_on_timeline()
        replaced.append((called, optimizer))
    model.zero_grad()
    with torch.no_grad():
        for mine, first in zip(model.parameters(), make_net(rank).parameters(), strict=True):
            mine.copy_(first)
    with distributed(later, sgd(model), model) as (called, optimizer):
        assert hooks_of(model) == hooks
        assert not bf.get_current_created_window_names()
        for step in range(3):
            train_step(called, optimizer, rank, step)
            simulation.train(step)
            before = snapshot(model)
            for old, earlier in replaced:
                if kind == "wrapper":
                    calls = [lambda old=old: loss_of(old, rank, 0), old.average]
                else:
                    calls = [earlier.step, lambda earlier=earlier: earlier.add_param_group({"params": []})]
                for call in [*calls, *([earlier.synchronize] if kind == "gradient" else [])]:
                    with pytest.raises(RuntimeError, match=r"fogdist\.\w+ \d+ was replaced: another"):
                        call()
                end(old, earlier)
            assert torch.equal(snapshot(model), before) and hooks_of(model) == hooks
            if kind == "wrapper":
                replaced.clear()  # a closed one calls its module
    simulation.check(rank, model)


@on_ranks(3)
def test_parameters_that_gradients_are_averaged_of_later_are_taken_over_too() -> None:
    """An optimizer does not own parameters that are frozen when it is made until it finds them unfrozen in training."""
    rank, _ = start(topologies.ring)
    model = make_net(0)
    model.head.requires_grad_(False)
    first = distribute("gradient", sgd(model), model)[1]
    model.head.requires_grad_(True)
    head = bf.DistributedAdaptThenCombineOptimizer(sgd(model.head), model.head)
    train_step(model, first, rank, 1)
    with pytest.raises(RuntimeError, match="was replaced"):
        head.step()


@on_ranks(2)
def test_windows_without_names_are_taken_over() -> None:
    """The windows of this algorithm are not in the group's table of names."""
    rank, _ = start(topologies.ring)
    model = make_net(0)
    first = algorithms.AsynchronousGossip(sgd(model), model)
    for step in range(3):
        train_step(model, first, rank, step)
    fogdist.broadcast_parameters(model.named_parameters(), 0)
    second = algorithms.AsynchronousGossip(sgd(model), model)
    with pytest.raises(RuntimeError, match="was replaced"):
        first.step()
    if rank == 0:
        first.close()  # there is nothing left to end, so it does not wait for others
    for step in range(3):
        train_step(model, second, rank, step)
    second.close()
    assert second.rounds > 0 and snapshot(model).isfinite().all()


@on_ranks(2, kind=["awc", "atc", "gradient", "put"])
def test_an_optimizer_that_was_refused_takes_nothing_over(kind: str) -> None:
    rank, size = start(topologies.fully_connected)
    model = make_net(rank)
    simulation = Simulation(RULES[kind], map(make_net, range(size)))
    with distributed(kind, sgd(model), model) as (called, optimizer):
        for step in range(4):
            with pytest.raises(ValueError, match="model must be the same on all ranks"):
                distribute("ExactDiffusion", sgd(model), model, local_steps=1 + rank)
            fewer = torch.optim.SGD(list(model.parameters())[rank:], lr=0.1)
            with pytest.raises(ValueError, match="model must be the same on all ranks"):
                distribute("gradient", fewer, model)
            train_step(called, optimizer, rank, step)
            simulation.train(step)
    simulation.check(rank, model)


@on_ranks(2, kind=["awc", "wrapper"], how=["in place", "data"])
def test_values_that_change_while_they_travel(kind: str, how: str) -> None:
    """If parameters change while older values are being exchanged, the change is lost, and one warning says so."""
    rank, size = start()
    model = make_net(rank)
    simulation = Simulation("awc", map(make_net, range(size)))
    with (
        warnings.catch_warnings(record=True) as caught,
        distributed(kind, sgd(model), model) as (called, optimizer),
    ):
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(called, rank, step).backward()
            if step > 0:
                dist.barrier()
                if how == "in place":
                    with torch.no_grad():
                        model.head.weight.mul_(2)
                else:
                    model.head.weight.data = model.head.weight.data * 2
            optimizer.step()
            simulation.train(step)
            simulation.check(rank, model)
    (warning,) = caught
    assert str(warning.message).startswith("'head.weight' was changed between the forward pass and step()")
    assert warning.filename == __file__


# --- when ranks exchange ------------------------------------------------------------------------------------


class Watching(nn.Linear):
    """Calls a function in its forward pass."""

    watch: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        self.watch()
        return super().forward(x)


@on_ranks(3)
def test_awc_averages_during_the_forward_pass() -> None:
    """Rank 0 gets the average of the parameters in its forward pass, while the other ranks are still in theirs."""
    rank, _ = start()
    torch.manual_seed(rank)
    model = Watching(4, 3).double()
    _, optimizer = distribute("awc", sgd(model), model)
    seen: list[bool] = []

    def watch() -> None:
        dist.barrier()
        before = snapshot(model)
        if rank == 0:
            assert optimizer.is_in_round
            while not works[-1].is_completed():
                pass
            seen.append(True)
        dist.barrier()
        assert torch.equal(snapshot(model), before)  # the average is not written before step()

    model.watch = watch
    with averages_begun() as works:
        for step in range(3):
            train_step(model, optimizer, rank, step)
    assert seen == [True] * 3 * (rank == 0)
    model.watch = lambda: None


# How many passes a rank makes before a step.
PASSES: dict[str, Callable[[int, int], int]] = {
    "several": lambda rank, step: 2 + (step > 1),
    "none": lambda rank, step: int((rank, step) != (1, 2)),  # the data of rank 1 ended one step early
    "more": lambda rank, step: 3 if (rank, step) == (1, 1) else 1,
}
# The kind, its passes, and local_steps.
NUMBERS_OF_PASSES = [
    *((kind, "several", local_steps) for kind in (*BLUEFOGS, *WINDOWS) for local_steps in (1, 2)),
    *((kind, "none", 1) for kind in RULES),
    *((kind, "more", 1) for kind in BLUEFOGS),
]


@on_ranks(3, case=NUMBERS_OF_PASSES)
def test_any_number_of_passes_before_a_step(case: tuple[str, str, int]) -> None:
    """Each step averages what all passes gave, whatever their number on a rank, and nothing warns."""
    kind, passes, local_steps = case
    rank, size = start()
    simulation = Simulation(RULES[kind], map(make_net, range(size)), lambda m: sgd(m, momentum=0.0))
    model = make_net(rank)

    def backward(called: nn.Module, r: int, step: int) -> None:
        for number in range(PASSES[passes](r, step)):
            loss_of(called, r, 10 * step + number).backward()

    options: dict[str, Any] = {"num_steps_per_communication": local_steps} if local_steps > 1 else {}
    if (
        kind == "gradient"
    ):  # the layer without a gradient has its own bucket, so a pass sends the other buckets
        options["bucket_cap_mb"] = 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with distributed(kind, sgd(model, momentum=0.0), model, **options) as (called, optimizer):
            for step in range(5):
                optimizer.zero_grad()
                backward(called, rank, step)
                if passes == "none" and kind != "cta":  # "cta" exchanges in the forward pass
                    dist.barrier()
                optimizer.step()
                simulation.step(functools.partial(backward, step=step))
                simulation.check(rank, model)
                if kind == "gradient":  # also those of passes after an average had begun
                    for got, expected in zip(model.parameters(), simulation.models[rank].parameters()):
                        torch.testing.assert_close(got.grad, expected.grad, **EXACT)


def warm_up(kind: str, factor: float) -> Tensor:
    rank, _ = start()
    model = make_net(rank)
    del model.unused  # all parameters need gradients, as torch sets them for its checkpoints
    with distributed(kind, sgd(model, momentum=0.0), model) as (called, optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: k / 4)
        for k in range(4):
            optimizer.zero_grad()
            (loss_of(called, rank, k) * (factor if k == 0 and rank == 1 else 1.0)).backward()
            optimizer.step()
            scheduler.step()
        if kind in IN_STEP:
            assert optimizer.state_dict()["param_groups"][0]["fog_steps"] == 4
    return snapshot(model)


@pytest.mark.parametrize("kind", [*RULES, "DecentralizedSGD"])
def test_a_step_of_a_warm_up_is_no_checkpoint(worlds, kind):
    """Gradients of zero on one rank change nothing if the learning rate is 0, and the step still counts."""
    for got, expected in zip(worlds(2).run(warm_up, kind, 0.0), worlds(2).run(warm_up, kind, 1.0)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


# --- gradient scalers ---------------------------------------------------------------------------------------

OVERFLOWS = {(0, 1), (2, 1), (1, 3), (0, 4)}  # pairs of a rank and a step; the last pair is in the last step


@on_ranks(3, kind=[*BLUEFOGS, "cta", *WINDOWS, "wrapper"], form=["scaled", "unscaled", "fused"])
def test_gradients_that_overflow_on_some_ranks(kind: str, form: str) -> None:
    """If a rank's gradients overflow, it leaves out its own step, but still takes part in the average.

    Where gradients are averaged, the overflow is in the average, so all ranks leave out the step.
    """
    rank, size = start()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.02, fused=form == "fused")

    simulation = Simulation(RULES[kind], map(make_net, range(size)), make)
    model = make_net(rank)
    base = make(model)
    scaler, halvings = torch.amp.GradScaler("cpu", init_scale=1024.0), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with distributed(kind, base, model) as (called, optimizer):
            for step in range(5):
                accumulates = kind in ("gradient", "wrapper") and form == "unscaled" and step % 2 == 1
                if step % 2:
                    optimizer.zero_grad()
                if accumulates:
                    with called.no_sync() if kind == "wrapper" else nullcontext():
                        scaler.scale(loss_of(called, rank, 100 + step)).backward()
                loss = loss_of(called, rank, step) * (float("inf") if (rank, step) in OVERFLOWS else 1.0)
                if step % 2 == 0:
                    optimizer.zero_grad()
                scaler.scale(loss).backward()
                if form == "unscaled":
                    if kind == "gradient":
                        optimizer.synchronize()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                numbers = [100 + step, step] if accumulates else [step]
                overflowed = [r for r, when in OVERFLOWS if when == step]
                skips = list(range(size)) if kind == "gradient" and overflowed else overflowed
                halvings += rank in skips
                simulation.step(
                    lambda m, r, numbers=numbers: [loss_of(m, r, k).backward() for k in numbers],
                    skips=skips,
                    clips=0.5 if form == "unscaled" else None,
                )
                simulation.check(rank, model, rtol=1e-9, atol=1e-9)
            assert scaler.get_scale() == 1024.0 / 2**halvings
            assert not hasattr(optimizer, "found_inf") and not hasattr(base, "found_inf")
            if kind == "wrapper":  # nothing is left of the last step, which was skipped
                assert not called._driver.is_in_round
                called.average()
                simulation.matrix = np.full((size, size), 1 / size)
                simulation.mix()
                simulation.check(rank, model, rtol=1e-9, atol=1e-9)


def one_overflow(kind: str, overflows: bool) -> tuple[Tensor, int]:
    """In the third step rank 0's gradients overflow; in the run to compare with, they move nothing."""
    rank, _ = start()
    model = make_net(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=overflows)
    before: list[Tensor] = []
    with distributed(kind, sgd(model, momentum=0.0), model) as (_, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if step == 2 and rank == 0:
                for gradient, kept in zip(gradients, before, strict=True):
                    if overflows:
                        gradient.fill_(torch.inf)
                    elif kind == "GradientTracking":  # it continues with its last gradient
                        gradient.copy_(kept)
                    else:
                        gradient.zero_()
            before = [gradient.clone() for gradient in gradients]
            scaler.step(optimizer)
            scaler.update()
    if overflows:
        assert scaler.get_scale() == (4.0 if rank == 0 else 8.0)
    return snapshot(model), optimizer.state_dict()["param_groups"][0]["fog_steps"]


@pytest.mark.parametrize("kind", IN_STEP)
def test_a_rank_whose_gradients_overflow_leaves_out_its_local_step_only(worlds, kind):
    plain, overflowed = (worlds(3).run(one_overflow, kind, overflows) for overflows in (False, True))
    for one, two in zip(plain, overflowed, strict=True):
        torch.testing.assert_close(one[0], two[0], rtol=0, atol=1e-12)
        assert two[0].isfinite().all()
        assert one[1] == two[1] == 6


# --- checkpoints --------------------------------------------------------------------------------------------


@on_ranks(
    2,
    kind=[
        "awc",
        "atc",
        "gradient",
        "put",
        "push-sum",
        "GradientTracking",
        "PushSumSGD",
        "DiLoCo",
        "streaming",
        "wrapper",
    ],
    of_sgd=[False, True],
)
def test_checkpoints(kind: str, of_sgd: bool, tmp_path: Path) -> None:
    """An interrupted training continues from each kind of checkpoint as if it had not been interrupted."""
    rank, size = start()
    own, file = tmp_path / str(rank), io.BytesIO()

    def begin(seed: int) -> tuple[Net, torch.optim.Optimizer]:
        model = make_net(seed)
        # torch.distributed.checkpoint needs state for every parameter; this holds for plain optimizers too.
        del model.unused
        adam = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.1)
        return model, sgd(model, momentum=0.0) if of_sgd else adam

    def go_on(called: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            train_step(called, optimizer, rank, step)
        optimizer.zero_grad()

    def from_file(called: Any, optimizer: Any) -> None:
        file.seek(0)
        saved = torch.load(file)
        called.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    def by_torch(called: Any, optimizer: Any) -> None:
        if rank == 1:
            dist.barrier()  # a rank may load at any time, because loading exchanges nothing
        weights, state = get_state_dict(called, optimizer)
        checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=own, no_dist=True)
        set_state_dict(called, optimizer, model_state_dict=weights, optim_state_dict=state)
        if rank == 0:
            dist.barrier()

    def by_fogdist(called: Any, optimizer: Any) -> None:
        loaded = fogdist.checkpoint.load(tmp_path / "fog", called, optimizer)
        assert loaded == fogdist.checkpoint.Loaded(3, size, False, {"rank": rank})
        # Without it, the fourth graph of a sequence would be the first one again.
        assert kind != "wrapper" or called.round == 3

    model, base = begin(rank)
    with distributed(kind, base, model) as (called, optimizer):
        go_on(called, optimizer, 0, 3)
        if kind == "streaming":
            optimizer.settle()
        torch.save({"model": called.state_dict(), "optimizer": optimizer.state_dict()}, file)
        weights, state = copy.deepcopy(get_state_dict(called, optimizer))
        # The ranks' values differ, so each rank has its own checkpoint.
        checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=own, no_dist=True)
        fogdist.checkpoint.save(tmp_path / "fog", called, optimizer, step=3, extra={"rank": rank})
        kept = snapshot(model)
        go_on(called, optimizer, 3, 6)
    assert not torch.equal(kept, snapshot(model))
    for number, restore in enumerate((from_file, by_torch, by_fogdist)):
        other, base = begin(10 * (number + 1) + rank)
        with distributed(kind, base, other) as (called, optimizer):
            restore(called, optimizer)
            assert torch.equal(snapshot(other), kept)
            go_on(called, optimizer, 3, 6)
            assert torch.equal(snapshot(other), snapshot(model))


# --- ends ---------------------------------------------------------------------------------------------------


@on_ranks(2, kind=map(marked, ENTRIES))
def test_what_is_dropped_leaves_the_model(kind: str) -> None:
    rank, _ = start()
    model = make_net(rank)
    called, optimizer = distribute(kind, sgd(model, momentum=0.0), model)
    loss_of(called, rank, 0).backward()
    optimizer.step()
    reference = weakref.ref(called if kind == "wrapper" else optimizer)
    gc.disable()
    try:
        del called, optimizer
        if kind != "wrapper":  # which ends at once, so ranks do not end it at different times
            gc.collect()
        assert reference() is None
    finally:
        gc.enable()
    assert hooks_of(model) == 0 and model._compiled_call_impl is None
    # Only rank 0 continues: no dropped optimizer or wrapper communicates, not even when it is destroyed.
    if rank == 0:
        for number in range(3):
            loss_of(model, rank, number).backward()
    dist.barrier()
    assert len(bf.get_current_created_window_names()) == (kind in WINDOWS)
    bf.win_free()


@on_ranks(2, kind=[*BLUEFOGS, *WINDOWS])
def test_shutdown_with_an_exchange_in_flight(kind: str) -> None:
    rank, _ = start()
    model = make_net(rank)
    called, optimizer = distribute(kind, sgd(model), model)
    loss_of(called, rank, 0).backward()
    optimizer.step()
    if kind in WINDOWS:
        optimizer.force_barrier = False
    loss_of(called, rank, 1).backward()  # now an exchange is in flight
    fogdist.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        optimizer.step()
    if kind in WINDOWS:
        end(model, optimizer)
    assert snapshot(model).isfinite().all()


# --- timeline -----------------------------------------------------------------------------------------------


@on_ranks(2, kind=[*BLUEFOGS, "put", "ExactDiffusion"])
def test_timeline(kind: str) -> None:
    start()
    events: list[str] = []

    class Range(nullcontext):  # stands in for the profiler's range
        def __init__(self, name: str) -> None:
            self._name = name.removeprefix("fogdist.")

        def __enter__(self) -> None:
            events.append(f"{self._name}(")

        def __exit__(self, *_: object) -> None:
            events.append(f"){self._name}")

    model = nn.Linear(3, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_forward_hook(lambda *_: events.append("forward pass"))
    model.weight.register_hook(lambda _: events.append("backward pass"))
    base.register_step_post_hook(lambda *_: events.append("step"))
    _, optimizer = distribute(kind, base, model)

    def trace() -> list[str]:
        """Runs two steps, and a forward pass that is not part of the training."""
        events.clear()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.ones(4, 3))
        return list(events)

    plain = [*["forward pass", "backward pass", "step"] * 2, "forward pass"]
    step = ["forward(", "forward pass", ")forward", "gradient(", "backward pass", ")gradient", "step"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.profiler, "record_function", Range)
        for _ in range(2):  # the second call does nothing
            optimizer.turn_on_timeline()
        assert trace() == [*step * 2, "forward pass"]
        events.clear()
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(4, 4))
        assert events == ["forward(", ")forward"]  # a pass that fails closes its range
        model(torch.ones(4, 3)).sum().backward()
        optimizer.turn_off_timeline()
        assert events[-1] == ")gradient"
        optimizer.step()
        assert trace() == plain
    end(model, optimizer)


# --- after refused arguments and failures -------------------------------------------------------------------


@on_ranks(2)
def test_what_one_rank_makes_alone_is_not_counted_by_the_others() -> None:
    """Message names count the objects of this group only, and only those that were really made."""
    fogdist.init()
    rank = fogdist.rank()
    groups = [dist.new_group([each], backend="fog") for each in range(2)]
    model = make_net(0)
    if rank == 0:
        other = make_net(0)
        fogdist.algorithms.DecentralizedSGD(sgd(other), other, group=groups[0])
        with pytest.raises(ValueError, match="local_steps"):
            fogdist.algorithms.DecentralizedSGD(sgd(model), model, local_steps=0)
    optimizer = fogdist.algorithms.DecentralizedSGD(sgd(model), model)
    loss_of(model, rank, 0).backward()
    optimizer.step()


@on_ranks(2)
def test_parameters_that_have_no_window_are_not_in_the_optimizer() -> None:
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(0)
    optimizer = bf.DistributedWinPutOptimizer(sgd(model), model)
    model.extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="must be there when DistributedWinPutOptimizer is made"):
        optimizer.add_param_group({"params": [model.extra]})
    assert len(optimizer.param_groups) == 1 and model.extra not in optimizer.buckets
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.unregister_window()
