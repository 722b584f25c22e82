"""Distributed optimizers against one process that simulates all ranks with the mixing matrix.

Models and mixing are in float64, so that a wrong weight, a lost update or a gradient at the wrong point shows
at once: trajectories agree to rounding or not at all.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fogdist
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import CommunicationType
from fogdist import topology as topologies
from harness import sizes
from reference import Checks, mix
from test_machines import machines_of
from torch import Tensor, nn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
FACTORIES: dict[str, Callable[..., Any]] = {
    "awc": fogdist.DistributedAdaptWithCombineOptimizer,
    "atc": fogdist.DistributedAdaptThenCombineOptimizer,
    "gradient": fogdist.DistributedGradientAllreduceOptimizer,
}


class Net(nn.Module):
    """Every kind of parameter that a walk over leaf modules, or over gradients, would miss."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(4))  # held by the container itself
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight  # tied
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(2, 2)  # never has a gradient
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(x + self.position))
        return self.head(torch.tanh(self.frozen(self.decoder(hidden)) + self.encoder(hidden)))


def make_net(rank: int, **options: Any) -> Net:
    torch.manual_seed(100 + rank)  # ranks start apart, so that every exchange shows
    return Net(**options).double()


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return (
        torch.randn(5, 4, generator=generator, dtype=torch.float64),
        torch.randn(5, 3, generator=generator, dtype=torch.float64),
    )


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    there = next(model.parameters()).device
    x, y = (part.to(there) for part in batch(rank, number))
    return (model(x) - y).square().mean()


def snapshot(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run: what is optimized, how, and who talks to whom.

    Attributes:
        kind: awc, atc or gradient.
        optimizer: Name in OPTIMIZERS.
        steps: Calls of step().
        every: num_steps_per_communication.
        passes: Forward and backward passes before each step().
        mixing: "static" (the topology's plain mean), "weighted", "dynamic" (one peer, from the generator),
            "random" (new weights and edges each step), "machines" and "random machines" (of two ranks each),
            "allreduce" or "empty".
        in_backward: step_in_backward, with small buckets.
    """

    kind: str
    optimizer: str
    steps: int = 7
    every: int = 1
    passes: int = 1
    mixing: str = "static"
    in_backward: bool = False


def matrices(run: Run, size: int) -> list[np.ndarray]:
    """The mixing matrix of each step."""
    graph = topologies.StarGraph(size) if run.mixing == "weighted" else topologies.ExponentialGraph(size)
    result = []
    generators = [topologies.GetDynamicOnePeerSendRecvRanks(graph, r) for r in range(size)]
    for step in range(run.steps):
        matrix = np.eye(size)
        if run.mixing == "static":
            matrix = topologies.mixing_matrix(topologies.uniform_weights(graph))
        elif run.mixing == "weighted":
            matrix = topologies.mixing_matrix(graph)
        elif run.mixing == "dynamic":
            for r in range(size):
                _, sources = next(generators[r])
                matrix[[r, *sources], r] = 1 / (len(sources) + 1)
        elif run.mixing == "random":
            matrix = random_matrix(size, step)
        elif run.mixing == "machines":
            machines = topologies.uniform_weights(topologies.ExponentialGraph(size // 2))
            matrix = of_ranks(topologies.mixing_matrix(machines))
        elif run.mixing == "random machines":
            matrix = of_ranks(random_matrix(size // 2, step))
        elif run.mixing == "allreduce":
            matrix = np.full((size, size), 1 / size)
        result.append(matrix)
    return result


def random_matrix(size: int, step: int) -> np.ndarray:
    random = np.random.default_rng([step, size])
    matrix = random.random((size, size)) * ((random.random((size, size)) < 0.5) | np.eye(size, dtype=bool))
    return matrix / matrix.sum(axis=0)


def of_ranks(machines: np.ndarray) -> np.ndarray:
    """The mixing matrix of ranks from that of their machines."""
    return np.kron(machines, np.full((2, 2), 0.5))


def simulate(run: Run, size: int) -> list[Tensor]:
    """Trains all ranks in this process; returns the parameters of rank r after step s as [r][s]."""
    models = [make_net(r) for r in range(size)]
    optimizers = [OPTIMIZERS[run.optimizer](m.parameters()) for m in models]
    trajectories: list[list[Tensor]] = [[] for _ in range(size)]
    done, number = 0, 0
    for matrix in matrices(run, size):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(run.passes):
            for rank, model in enumerate(models):
                loss_of(model, rank, number).backward()
            number += 1
        done += run.passes
        communicate = done >= run.every
        done = 0 if communicate else done
        if communicate and run.kind == "awc":
            mix_parameters(models, matrix)
        if communicate and run.kind == "gradient":
            for same in zip(*(m.parameters() for m in models)):
                if same[0].grad is not None:
                    mean = torch.stack([p.grad for p in same]).mean(0)
                    for p in same:
                        p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if communicate and run.kind == "atc":
            mix_parameters(models, matrix)
        for trajectory, model in zip(trajectories, models):
            trajectory.append(snapshot(model))
    return [torch.stack(trajectory) for trajectory in trajectories]


def mix_parameters(models: list[Net], matrix: np.ndarray) -> None:
    with torch.no_grad():
        for same in zip(*(m.parameters() for m in models)):
            if same[0].requires_grad:
                for parameter, value in zip(same, mix([p.detach().clone() for p in same], matrix)):
                    parameter.copy_(value)


def set_dynamic(optimizer: Any, matrix: np.ndarray, rank: int) -> None:
    """Gives an optimizer one step's column of weights as its dynamic attributes."""
    others = [r for r in range(len(matrix)) if r != rank]
    optimizer.self_weight = matrix[rank, rank]
    optimizer.src_weights = {r: matrix[r, rank] for r in others if matrix[r, rank] != 0}
    optimizer.dst_weights = [r for r in others if matrix[rank, r] != 0]


def set_dynamic_machines(optimizer: Any, matrix: np.ndarray, rank: int) -> None:
    """The same for its machine, from the matrix of ranks."""
    machines = 2 * matrix[::2, ::2]
    machine = rank // 2
    others = [m for m in range(len(machines)) if m != machine]
    optimizer.self_weight = machines[machine, machine]
    optimizer.src_machine_weights = {m: machines[m, machine] for m in others if machines[m, machine] != 0}
    optimizer.dst_machine_weights = [m for m in others if machines[machine, m] != 0]


def distribute(run: Run, model: nn.Module) -> Any:
    base = OPTIMIZERS[run.optimizer](model.parameters())
    if run.kind == "gradient":
        return FACTORIES[run.kind](base, model, num_steps_per_communication=run.every)
    machines = CommunicationType.hierarchical_neighbor_allreduce
    kinds = {"allreduce": CommunicationType.allreduce, "empty": CommunicationType.empty}
    kinds |= {"machines": machines, "random machines": machines}
    kind = kinds.get(run.mixing, CommunicationType.neighbor_allreduce)
    options: dict[str, Any] = {"step_in_backward": True, "bucket_cap_mb": 1e-4} if run.in_backward else {}
    return FACTORIES[run.kind](base, model, kind, num_steps_per_communication=run.every, **options)


def train(run: Run) -> Tensor:
    with machines_of(2) if "machines" in run.mixing else contextlib.nullcontext():
        return train_here(run)


def train_here(run: Run) -> Tensor:
    if "machines" in run.mixing:
        fogdist.set_machine_topology(topologies.ExponentialGraph(fogdist.machine_size()))
    else:
        fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.set_topology(*((topologies.StarGraph(size), True) if run.mixing == "weighted" else ()))
    model = make_net(rank)
    optimizer = distribute(run, model)
    trajectory, number = [], 0
    for step, matrix in enumerate(matrices(run, size)):
        if run.mixing in ("dynamic", "random"):
            set_dynamic(optimizer, matrix, rank)
            optimizer.enable_topo_check = step % 2 == 0
        elif run.mixing == "random machines":
            set_dynamic_machines(optimizer, matrix, rank)
            optimizer.enable_topo_check = step % 2 == 0
        optimizer.zero_grad()
        for _ in range(run.passes):
            loss_of(model, rank, number).backward()
            number += 1
        optimizer.step()
        trajectory.append(snapshot(model))
    return torch.stack(trajectory)


RUNS = [
    *(Run(kind, optimizer) for kind in FACTORIES for optimizer in OPTIMIZERS),
    *(Run(kind, "adam", every=3, passes=3) for kind in FACTORIES),  # accumulate, then one step
    *(Run(kind, "sgd", every=3) for kind in FACTORIES),  # local steps
    *(
        Run(kind, "sgd", mixing=mixing)
        for kind in ("awc", "atc")
        for mixing in ("weighted", "dynamic", "allreduce")
    ),
    *(Run(kind, "adamw", mixing="random") for kind in ("awc", "atc")),
    *(Run(kind, "adam", every=3, mixing="dynamic", steps=10) for kind in ("awc", "atc")),
    *(Run(kind, "sgd", mixing="empty") for kind in ("awc", "atc")),
]


@pytest.mark.filterwarnings("ignore:step.. after")
@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("size", sizes([1, 4], [3]))
def test_trajectories(worlds, size, run):
    for got, expected in zip(worlds(size).run(train, run), simulate(run, size)):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "run", [dataclasses.replace(run, in_backward=True) for run in RUNS if run.kind == "atc"], ids=str
)
def test_trajectories_of_steps_in_backward_passes(worlds, run):
    for got, expected in zip(worlds(3).run(train, run), simulate(run, 3)):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mixing", ["machines", "random machines"])
@pytest.mark.parametrize("kind", ["awc", "atc"])
def test_trajectories_between_machines(worlds, kind, mixing):
    run = Run(kind, "adamw", mixing=mixing)
    for got, expected in zip(worlds(4).run(train, run), simulate(run, 4)):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("size", sizes([5], [2]))
def test_other_sizes(worlds, size, kind):
    run = Run(kind, "adam", mixing="dynamic" if kind != "gradient" else "static")
    for got, expected in zip(worlds(size).run(train, run), simulate(run, size)):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


# --- buckets ------------------------------------------------------------------------------------------------


def exchange_by_parameter() -> None:
    fogdist.init()
    rank = fogdist.rank()
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(1100, 1000).double(),  # more than one bucket by itself
        nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
        nn.Linear(3, 5).bfloat16(),
        nn.Linear(1000, 1100).double(),
        nn.Linear(7, 9),
    )
    optimizer = fogdist.DistributedAdaptThenCombineOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model
    )
    expected = [fogdist.neighbor_allreduce(p) for p in model.parameters()]
    layouts = [p.stride() for p in model.parameters()]
    optimizer.step()
    with Checks() as checks:
        for i, (parameter, value) in enumerate(zip(model.parameters(), expected)):
            checks.equal(f"parameter {i}", parameter.detach().clone(), value)
        checks.equal("strides", [p.stride() for p in model.parameters()], layouts)


@pytest.mark.parametrize("size", [1, 3])
def test_fused_exchange_equals_one_exchange_a_parameter(worlds, size):
    worlds(size).run(exchange_by_parameter)


def views_of_one_buffer(kind: str) -> None:
    fogdist.init()
    rank = fogdist.rank()
    model = nn.Linear(4, 3).double()
    values = snapshot(model)
    optimizer = FACTORIES[kind](torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert torch.equal(snapshot(model), values)
    views = [model.weight.detach().view(-1), model.bias.detach()]
    array = model.weight.detach().numpy()
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()
    assert torch.equal(snapshot(model), torch.cat(views))
    assert np.array_equal(array, model.weight.detach().numpy())
    assert not torch.equal(snapshot(model), values)


@pytest.mark.parametrize("kind", FACTORIES)
def test_training_keeps_the_memory_of_parameters(worlds, kind):
    # BlueFog's p.set_(output) cut parameters from the memory they shared, at every step. The model is a bare leaf module.
    worlds(2).run(views_of_one_buffer, kind)


# --- it is the user's optimizer -----------------------------------------------------------------------------


def is_the_users_optimizer(kind: str) -> None:
    fogdist.init()
    rank = fogdist.rank()
    with Checks() as checks, warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns when it does not see the steps
        model = make_net(rank)
        base = torch.optim.Adam(model.parameters(), lr=0.02)
        before = torch.optim.lr_scheduler.StepLR(base, 1, 0.5)
        loss_of(model, rank, 0).backward()
        base.step()
        calls = []
        base.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer = FACTORIES[kind](base, model)
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        checks.true("isinstance", isinstance(optimizer, torch.optim.Adam))
        checks.equal("class name", type(optimizer).__name__, "Adam")
        checks.true("repr", repr(optimizer).startswith("Adam ("))
        checks.true("shared groups", optimizer.param_groups is base.param_groups)
        checks.true("shared state", optimizer.state is base.state and len(base.state) > 0)
        checks.equal("defaults", optimizer.defaults["lr"], 0.02)
        after = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        checks.equal("first step kept", int(next(iter(optimizer.state.values()))["step"]), 1)
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()
            before.step()
            after.step()
        checks.equal("steps counted", int(next(iter(base.state.values()))["step"]), 3)
        checks.equal("hooks", calls, ["pre", "post"] * 2)
        checks.close("schedulers", torch.tensor(base.param_groups[0]["lr"]), torch.tensor(0.02 * 0.25 * 0.1))

        # State dicts go both ways between plain and distributed optimizers.
        state = copy.deepcopy(optimizer.state_dict())
        plain = torch.optim.Adam(make_net(0).parameters(), lr=1.0)
        plain.load_state_dict(state)
        checks.equal("to plain", plain.param_groups[0]["lr"], base.param_groups[0]["lr"])
        state["param_groups"][0]["lr"] = 0.125
        optimizer.load_state_dict(state)
        checks.equal(
            "from dict", (optimizer.param_groups[0]["lr"], base.param_groups[0]["lr"]), (0.125, 0.125)
        )
        checks.true(
            "still shared", optimizer.param_groups is base.param_groups and optimizer.state is base.state
        )

        # zero_grad in both forms, attributes, and no copies.
        loss_of(model, rank, 9).backward()
        optimizer.zero_grad(set_to_none=False)
        checks.true("zeros", all(not p.grad.any() for p in model.head.parameters()))
        optimizer.zero_grad()
        checks.true("none", all(p.grad is None for p in model.parameters()))
        optimizer.note = 5
        checks.equal("attributes are the user's", base.note, 5)
        del optimizer.note
        checks.true("deleted", not hasattr(base, "note"))
        with pytest.raises(TypeError, match="state_dict"):
            copy.deepcopy(optimizer)


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("size", [1, 2])
def test_it_is_the_users_optimizer(worlds, size, kind):
    worlds(size).run(is_the_users_optimizer, kind)


def groups_and_closures(kind: str, **options: Any) -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    models = [make_net(r) for r in range(size)]
    model = copy.deepcopy(models[rank])
    bases = [torch.optim.SGD([m.position], lr=0.1) for m in models]
    optimizer = FACTORIES[kind](torch.optim.SGD([model.position], lr=0.1), model, **options)
    with pytest.raises(ValueError, match="model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.2})
    for base, other in zip(bases, models):
        base.add_param_group({"params": other.head.parameters(), "lr": 0.2})
    held = [[m.position, *m.head.parameters()] for m in models]
    matrix = topologies.mixing_matrix(topologies.uniform_weights(fogdist.load_topology()))
    evaluated = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, rank, 0)
        loss.backward()
        evaluated.append(loss.item())
        return loss

    def mix_held() -> None:
        with torch.no_grad():
            for same in zip(*held):
                for parameter, value in zip(same, mix([p.detach().clone() for p in same], matrix)):
                    parameter.copy_(value)

    for _ in range(3):
        loss = optimizer.step(closure)
        assert loss.item() == evaluated[-1]
        for r, other in enumerate(models):
            bases[r].zero_grad()
            loss_of(other, r, 0).backward()
        if kind == "gradient":
            for same in zip(*held):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.grad.copy_(mean)
        if kind == "awc":
            mix_held()
        for base in bases:
            base.step()
        if kind == "atc":
            mix_held()
    assert len(evaluated) == 3
    torch.testing.assert_close(snapshot(model), snapshot(models[rank]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("size", [1, 3])
def test_added_groups_and_closures(worlds, size, kind):
    # Only parameters that the optimizer holds are averaged, from the moment it holds them.
    worlds(size).run(groups_and_closures, kind)


def closures_in_backward() -> None:
    groups_and_closures("atc", step_in_backward=True, bucket_cap_mb=1e-4)


def test_closures_with_steps_in_the_backward_pass(worlds):
    worlds(3).run(closures_in_backward)


def lbfgs() -> None:
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(rank)
    base = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], max_iter=4)
    for kind in ("awc", "gradient"):
        with pytest.raises(ValueError, match="LBFGS"):
            FACTORIES[kind](base, model)
    optimizer = FACTORIES["atc"](base, model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, rank, 0)
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = optimizer.step(closure).item()
        for _ in range(3):
            last = optimizer.step(closure).item()
    assert last < first


def test_lbfgs(worlds):
    worlds(2).run(lbfgs)


# --- wrong arguments ----------------------------------------------------------------------------------------


def wrong_arguments(kind: str) -> None:
    fogdist.init()
    make = FACTORIES[kind]
    model = make_net(0)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    for arguments, options, error, message in [
        ((model, model), {}, TypeError, "optimizer.*Net"),
        ((base, base), {}, TypeError, "model.*SGD"),
        ((base, [model, 3]), {}, TypeError, "model"),
        ((base, model), {"num_steps_per_communication": 0}, ValueError, "num_steps_per_communication.*0"),
        (
            (base, model),
            {"num_steps_per_communication": 1.0},
            TypeError,
            "num_steps_per_communication.*float",
        ),
        ((base, model), {"bucket_cap_mb": 0}, ValueError, r"bucket_cap_mb.*0"),
        ((base, model), {"bucket_cap_mb": "8"}, TypeError, "bucket_cap_mb.*str"),
        ((stranger, model), {}, ValueError, r"parameter \d+ of group 0, of shape \(3,\)"),
        ((base, [model, make_net(1)]), {}, ValueError, "position"),
        ((base, []), {}, ValueError, "model"),
    ]:
        with pytest.raises(error, match=message):
            make(*arguments, **options)
    with pytest.raises(ValueError, match="distributed already"):
        make(make(base, model), model)
    if kind == "atc":
        with pytest.raises(TypeError, match=r"step_in_backward.*int"):
            make(base, model, step_in_backward=1)
        with pytest.raises(ValueError, match="LBFGS"):
            make(torch.optim.LBFGS(model.parameters()), model, step_in_backward=True)
    if kind != "gradient":
        with pytest.raises(TypeError, match=r"communication_type.*neighbor_allreduce"):
            make(base, model, "allreduce")
        optimizer = make(base, model)
        assert optimizer.communication_type is CommunicationType.neighbor_allreduce
        with pytest.raises(TypeError, match="communication_type"):
            optimizer.communication_type = "empty"
        optimizer.communication_type = CommunicationType.empty
        for old, new in [
            ("neighbor_weights", "src_weights"),
            ("send_neighbors", "dst_weights"),
            ("neighbor_machine_weights", "src_machine_weights"),
            ("send_neighbor_machines", "dst_machine_weights"),
        ]:
            with pytest.warns(DeprecationWarning, match=f"{old}.*{new}"):
                setattr(optimizer, old, [1])
            assert getattr(optimizer, new) == getattr(optimizer, old) == [1]
    fogdist.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        make(base, model)


@pytest.mark.parametrize("kind", FACTORIES)
def test_wrong_arguments(worlds, kind):
    worlds(2).run(wrong_arguments, kind)


@pytest.mark.parametrize("kind", FACTORIES)
def test_before_init(kind):
    model = make_net(0)
    with pytest.raises(ValueError, match=r"fogdist\.init\(\)"):
        FACTORIES[kind](torch.optim.SGD(model.parameters(), lr=0.1), model)


def other_neighbors(kind: str) -> None:
    fogdist.init()
    model = make_net(0)
    optimizer = FACTORIES[kind](torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.src_machine_weights = {}
    with pytest.raises(ValueError, match=r"src_machine_weights or dst_machine_weights.*neighbor_allreduce"):
        optimizer.step()
    optimizer.src_machine_weights = None
    optimizer.dst_weights = []
    optimizer.communication_type = CommunicationType.hierarchical_neighbor_allreduce
    with pytest.raises(ValueError, match=r"src_weights or dst_weights.*hierarchical_neighbor_allreduce"):
        optimizer.step()
    optimizer.communication_type = CommunicationType.neighbor_allreduce
    with pytest.raises(ValueError, match=r"dst_weights must come with self_weight"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["awc", "atc"])
def test_weights_of_the_other_kind_of_neighbors(worlds, kind):
    # In BlueFog weights that were not used were weights that did nothing.
    worlds(2).run(other_neighbors, kind)


# --- names of older scripts ---------------------------------------------------------------------------------

OLD_NAMES = {
    "DistributedAllreduceOptimizer": "allreduce",
    "DistributedNeighborAllreduceOptimizer": "static",
    "DistributedHierarchicalNeighborAllreduceOptimizer": "machines",
}


def train_with_old_name(name: str) -> Tensor:
    machines = OLD_NAMES[name] == "machines"
    with machines_of(2) if machines else contextlib.nullcontext():
        if not machines:
            fogdist.init()
        rank = fogdist.rank()
        model = make_net(rank)
        base = OPTIMIZERS["sgd"](model.parameters())
        with pytest.warns(PendingDeprecationWarning, match=f"{name} is .*AdaptWithCombine") as caught:
            optimizer = getattr(fogdist, name)(base, model, 2)
        assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
        if machines:
            fogdist.set_machine_topology(topologies.ExponentialGraph(fogdist.machine_size()))
        trajectory = []
        for step in range(7):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            trajectory.append(snapshot(model))
    return torch.stack(trajectory)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names(worlds, name):
    run = Run("awc", "sgd", every=2, mixing=OLD_NAMES[name])
    for got, expected in zip(worlds(4).run(train_with_old_name, name), simulate(run, 4)):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def bluefog(form: str) -> None:
    """With windows that are put into before anybody goes on, so that it is an average with the neighbors."""
    fogdist.init()
    fogdist.win_free()
    rank, size = fogdist.rank(), fogdist.size()
    models = [make_net(r) for r in range(size)]
    model = copy.deepcopy(models[rank])
    base = OPTIMIZERS["sgd"](model.parameters())
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "model": ((base, model), {}),
        "models": ((base, [model]), {}),
        "named_parameters": ((base,), {"named_parameters": model.named_parameters()}),
        "named": ((base, model.named_parameters()), {}),
        "optimizer": ((base,), {}),
    }
    given, options = arguments[form]
    with pytest.warns(DeprecationWarning, match=r"DistributedWinPutOptimizer"):
        optimizer = fogdist.DistributedBluefogOptimizer(*given, window_prefix=form, **options)
    optimizer.force_barrier = True
    bases = [OPTIMIZERS["sgd"](m.parameters()) for m in models]
    matrix = topologies.mixing_matrix(topologies.uniform_weights(topologies.ExponentialGraph(size)))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        for r, each in enumerate(models):
            bases[r].zero_grad()
            loss_of(each, r, step).backward()
        mix_parameters(models, matrix)
        for each_base in bases:
            each_base.step()
    torch.testing.assert_close(snapshot(model), snapshot(models[rank]), rtol=1e-11, atol=1e-12)
    assert all(name.startswith(form) for name in fogdist.get_current_created_window_names())
    optimizer.unregister_window()
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="model and named_parameters"):
        fogdist.DistributedBluefogOptimizer(base, model, named_parameters=[])


@pytest.mark.parametrize("form", ["model", "models", "named_parameters", "named", "optimizer"])
def test_the_first_name_of_the_optimizer_on_windows(worlds, form):
    worlds(3).run(bluefog, form)


# --- passes, steps and warnings -----------------------------------------------------------------------------


def too_many_passes(kind: str) -> list[str]:
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(rank)
    optimizer = FACTORIES[kind](
        torch.optim.SGD(model.parameters(), lr=0.1), model, num_steps_per_communication=2
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            for _ in range(3):
                loss_of(model, rank, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        # Passes without gradients, and in evaluation mode, are no passes.
        model.eval()
        for _ in range(5):
            with torch.no_grad():
                loss_of(model, rank, 0)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", FACTORIES)
def test_too_many_passes_warn_once(worlds, kind):
    for messages in worlds(2).run(too_many_passes, kind):
        assert len(messages) == 1
        assert messages[0].startswith("Unexpected behavior: more than local_steps=2")


def gradients_after_too_many_passes(who: str) -> None:
    """All passes are in the average, also of buckets that were sent before; and the next steps are sound."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    model, reference = make_net(0), make_net(0)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    # With the layer that has no gradient in a bucket of its own: the others are sent by the first pass.
    optimizer = FACTORIES["gradient"](base, model, bucket_cap_mb=1e-4)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)

    def passes(r: int, step: int) -> range:
        return range(3 if step == 1 and (who == "all ranks" or r == 1) else 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            optimizer.zero_grad()
            plain.zero_grad()
            for number in passes(rank, step):
                loss_of(model, rank, 10 * step + number).backward()
                fogdist.barrier() if who == "all ranks" else None
            assert optimizer._average._in_flight
            optimizer.step()
            for r in range(size):
                for number in passes(r, step):
                    (loss_of(reference, r, 10 * step + number) / size).backward()
            plain.step()
            torch.testing.assert_close(snapshot(model), snapshot(reference), rtol=1e-11, atol=1e-12)
            for got, expected in zip(model.parameters(), reference.parameters()):
                torch.testing.assert_close(got.grad, expected.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("who", ["all ranks", "one rank"])
def test_no_gradient_is_lost_after_too_many_passes(worlds, who):
    worlds(3).run(gradients_after_too_many_passes, who)


def one_average_more() -> int:
    """A rank that averages once more within a step must not get what the others average in the next one.

    Returns the step that failed.
    """
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(0)
    optimizer = FACTORIES["gradient"](torch.optim.SGD(model.parameters(), lr=0.1), model)
    for number in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        if (rank, number) == (0, 1):
            optimizer.synchronize()
            loss_of(model, rank, number).backward()
        try:
            optimizer.step()
        except dist.DistBackendError:
            return number
    return -1


def test_an_average_that_only_one_rank_makes(new_world):
    failed = new_world(2, timeout=3.0).run(one_average_more)
    assert failed[0] == 1
    assert failed[1] in (1, 2)


def rank_without_data(kind: str) -> Tensor:
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(rank)
    optimizer = FACTORIES[kind](torch.optim.SGD(model.parameters(), lr=0.1), model)
    for number in range(4):
        optimizer.zero_grad()
        if (rank, number) != (1, 2):  # its data ended early
            loss_of(model, rank, number).backward()
        fogdist.barrier()
        optimizer.step()
    if kind == "gradient":
        assert all(p.grad is not None for p in model.head.parameters())
        assert model.unused.weight.grad is None
    return snapshot(model)


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_rank_without_data_for_one_step(worlds, kind):
    size = 3
    models = [make_net(r) for r in range(size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    matrix = topologies.mixing_matrix(topologies.uniform_weights(topologies.ExponentialGraph(size)))
    for number in range(4):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            (loss_of(model, rank, number) * float((rank, number) != (1, 2))).backward()
        if kind == "gradient":
            for same in zip(*(m.parameters() for m in models)):
                if same[0].grad is not None:
                    mean = torch.stack([p.grad for p in same]).mean(0)
                    for p in same:
                        p.grad = mean.clone()
        if kind == "awc":
            mix_parameters(models, matrix)
        for optimizer in optimizers:
            optimizer.step()
        if kind == "atc":
            mix_parameters(models, matrix)
    for got, model in zip(worlds(size).run(rank_without_data, kind), models):
        torch.testing.assert_close(got, snapshot(model), rtol=1e-11, atol=1e-12)


class Routed(nn.Module):
    """Each rank's data goes through a layer of its own; nobody uses the last one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(size + 1))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](x)


def gradients_on_some_ranks_only() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    torch.manual_seed(0)
    model = Routed(size).double()
    reference = copy.deepcopy(model)
    optimizer = FACTORIES["gradient"](torch.optim.AdamW(model.parameters(), lr=0.1), model)
    base = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for number in range(4):
        optimizer.zero_grad()
        base.zero_grad()
        (x, y), mine = batch(rank, number), (rank + number) % size
        (model(x, mine) - y).square().mean().backward()
        optimizer.step()
        for r in range(size):
            x, y = batch(r, number)
            ((reference(x, (r + number) % size) - y).square().mean() / size).backward()
        base.step()
    with Checks() as checks:
        for i, (got, expected) in enumerate(zip(model.parameters(), reference.parameters())):
            checks.close(f"parameter {i}", got.detach(), expected.detach())
        # Weight decay would move it if it had a gradient of zeros.
        checks.true("nobody's layer", model.experts[size].weight.grad is None)


@pytest.mark.parametrize("size", [1, 4])
def test_gradients_that_exist_on_some_ranks_only(worlds, size):
    worlds(size).run(gradients_on_some_ranks_only)


def clipped_gradients() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    model, reference = make_net(0), make_net(0)
    optimizer = FACTORIES["gradient"](torch.optim.SGD(model.parameters(), lr=0.5), model)
    base = torch.optim.SGD(reference.parameters(), lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            if number == 0:
                with pytest.raises(RuntimeError, match="synchronize"), optimizer.skip_synchronize():
                    pass
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if number == 1:
                optimizer.step()
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
            base.zero_grad()
            (sum(loss_of(reference, r, number) for r in range(size)) / size).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            base.step()
    torch.testing.assert_close(snapshot(model), snapshot(reference), rtol=1e-11, atol=1e-12)
    # Clipped without synchronize(), after the average was sent.
    layer = nn.Linear(4, 3).double()
    optimizer = FACTORIES["gradient"](torch.optim.SGD(layer.parameters(), lr=0.5), layer)
    loss_of(layer, rank, 7).backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
    with pytest.warns(UserWarning, match="synchronize"):
        optimizer.step()


def test_clipped_gradients(worlds):
    worlds(2).run(clipped_gradients)


def discarded_gradients() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    model, reference = make_net(0), make_net(0)
    optimizer = FACTORIES["gradient"](torch.optim.SGD(model.parameters(), lr=0.5), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, rank, 0).backward()
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        optimizer.step()
    (sum(loss_of(reference, r, 1) for r in range(size)) / size).backward()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    torch.testing.assert_close(snapshot(model), snapshot(reference), rtol=1e-11, atol=1e-12)


def test_zero_grad_discards_an_average_in_flight(worlds):
    worlds(2).run(discarded_gradients)


def sparse_gradients() -> None:
    fogdist.init()
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = FACTORIES["gradient"](torch.optim.SparseAdam(model.parameters()), model)
    with pytest.raises(ValueError, match="dense"):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    for kind in ("awc", "atc"):
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = FACTORIES[kind](torch.optim.SparseAdam(model.parameters()), model)
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


def test_sparse_gradients(worlds):
    worlds(2).run(sparse_gradients)


def local_step_of_gradient_averaging() -> list[str]:
    fogdist.init()
    model = make_net(fogdist.rank())
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = FACTORIES["gradient"](base, model, num_steps_per_communication=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, fogdist.rank(), number).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


def test_local_steps_of_gradient_averaging_warn_once(worlds):
    for messages in worlds(2).run(local_step_of_gradient_averaging):
        assert len(messages) == 1
        assert "after 1 of local_steps=4" in messages[0]


# --- models -------------------------------------------------------------------------------------------------


def several_models(kind: str) -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    pairs = []
    for r in range(size):
        torch.manual_seed(r)
        pairs.append([nn.Sequential(nn.Linear(4, 4)).double(), nn.Module()])
        pairs[-1][1].add_module("head", nn.Linear(4, 3).double())
        pairs[-1][1].forward = pairs[-1][1].head.forward
    models = copy.deepcopy(pairs[rank])
    models[1].forward = models[1].head.forward
    optimizer = FACTORIES[kind](torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1), models)
    for number in range(3):
        optimizer.zero_grad()
        x, y = batch(rank, number)
        (models[1](models[0](x)) - y).square().mean().backward()
        optimizer.step()
    matrix = topologies.mixing_matrix(topologies.uniform_weights(fogdist.load_topology()))
    joined = [nn.ModuleList(pair) for pair in pairs]
    bases = [torch.optim.SGD(j.parameters(), lr=0.1) for j in joined]
    for number in range(3):
        for r, pair in enumerate(pairs):
            bases[r].zero_grad()
            x, y = batch(r, number)
            (pair[1](pair[0](x)) - y).square().mean().backward()
        if kind == "awc":
            mix_parameters(joined, matrix)
        for base in bases:
            base.step()
        if kind == "atc":
            mix_parameters(joined, matrix)
    torch.testing.assert_close(
        snapshot(nn.ModuleList(models)), snapshot(joined[rank]), rtol=1e-11, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["awc", "atc"])
def test_several_models(worlds, kind):
    worlds(3).run(several_models, kind)


def unfrozen(kind: str) -> None:
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(rank)
    optimizer = FACTORIES[kind](
        torch.optim.SGD(model.parameters(), lr=0.1), model, num_steps_per_communication=1
    )
    frozen = model.frozen.weight.detach().clone()
    with Checks() as checks:
        for number in range(6):
            if number == 3:
                checks.equal("frozen", model.frozen.weight.detach().clone(), frozen)
                model.frozen.requires_grad_(True)
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()
        checks.true("unfrozen", not torch.equal(model.frozen.weight, frozen))


@pytest.mark.parametrize("kind", FACTORIES)
def test_parameters_that_are_unfrozen(worlds, kind):
    worlds(2).run(unfrozen, kind)


def optimizer_dropped(kind: str) -> None:
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(rank)
    optimizer = FACTORIES[kind](torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    assert not model._forward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    # Only rank 0 goes on, alone: nothing of the dropped optimizer communicates.
    if rank == 0:
        for number in range(3):
            loss_of(model, rank, number).backward()
    fogdist.barrier()


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_dropped_optimizer_leaves_the_model(worlds, kind):
    worlds(2).run(optimizer_dropped, kind)


HOOKED = {
    "awc": FACTORIES["awc"],
    "atc": FACTORIES["atc"],
    "gradient": FACTORIES["gradient"],
    "win_put": fogdist.DistributedWinPutOptimizer,
}


def stored(model: nn.Module) -> nn.Module:
    """What comes back from a file."""
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded: nn.Module = torch.load(stream, weights_only=False)
    return loaded


def copied_models(kind: str) -> None:
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(rank)
    optimizer = HOOKED[kind](torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.turn_on_timeline()
    for step in range(2):
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), stored(model)):
            torch.testing.assert_close(snapshot(copied), snapshot(model), rtol=0, atol=0)
            # On one rank only: were these passes the model's own, they would begin an exchange there.
            if rank == 0:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    for number in range(3):
                        loss_of(copied, rank, number).backward()
                assert optimizer._fog_marks._open is None  # the range of a pass would go on to the step
        fogdist.barrier()
        if kind in ("awc", "win_put"):
            assert not optimizer.is_in_round
        loss = loss_of(model, rank, step)
        if kind in ("awc", "win_put"):
            assert optimizer.is_in_round
        loss.backward()
        optimizer.step()
    if kind == "win_put":
        optimizer.unregister_window()


@pytest.mark.parametrize("kind", HOOKED)
def test_copies_of_a_model_are_not_of_its_optimizer(worlds, kind):
    worlds(2).run(copied_models, kind)


def function_transforms(kind: str) -> None:
    """Gradients by torch.func are nobody's passes; given to `step`, they do as others."""
    fogdist.init()
    rank = fogdist.rank()
    models = [make_net(rank) for _ in range(2)]
    optimizers = [FACTORIES[kind](torch.optim.SGD(m.parameters(), lr=0.1), m) for m in models]
    for number in range(3):

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return (torch.func.functional_call(models[0], parameters, (x,)) - y).square().mean()

        gradients = torch.func.grad(loss)(dict(models[0].named_parameters()), *batch(rank, number))
        for name, parameter in models[0].named_parameters():
            if parameter.requires_grad and "unused" not in name:
                parameter.grad = gradients[name].detach()
        for optimizer in optimizers:
            if optimizer is optimizers[1]:
                optimizer.zero_grad()
                loss_of(models[1], rank, number).backward()
            optimizer.step()
    torch.testing.assert_close(snapshot(models[0]), snapshot(models[1]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", FACTORIES)
def test_function_transforms(worlds, kind):
    worlds(2).run(function_transforms, kind)


def gradient_scaler(kind: str) -> None:
    fogdist.init()
    rank = fogdist.rank()
    models = [make_net(rank).float() for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = FACTORIES[kind](torch.optim.AdamW(models[0].parameters(), lr=0.01), models[0])
    plain = FACTORIES[kind](torch.optim.AdamW(models[1].parameters(), lr=0.01), models[1])
    for number in range(3):
        x, y = (t.float() for t in batch(rank, number))
        for model, optimizer in zip(models, (scaled, plain)):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            (scaler.scale(loss) if optimizer is scaled else loss).backward()
            if kind == "gradient":
                optimizer.synchronize()
        scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        plain.step()
    torch.testing.assert_close(snapshot(models[0]), snapshot(models[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FACTORIES)
def test_gradient_scaler(worlds, kind):
    worlds(2).run(gradient_scaler, kind)


# --- timeline -----------------------------------------------------------------------------------------------


def marked_passes(kind: str) -> None:
    fogdist.init()
    events: list[str] = []

    class Range:  # what the profiler would show
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
    make = FACTORIES.get(kind) or getattr(fogdist.algorithms, kind)
    optimizer = make(base, model)

    def trace() -> list[str]:
        """Two steps, and a forward pass that is none of the training."""
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
        assert trace() == plain
        optimizer.turn_on_timeline()
        optimizer.turn_on_timeline()  # once is enough
        assert trace() == [*step * 2, "forward pass"]
        events.clear()
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(4, 4))
        assert events == ["forward(", ")forward"]  # a pass that fails ends its range
        model(torch.ones(4, 3)).sum().backward()
        optimizer.turn_off_timeline()
        optimizer.turn_off_timeline()
        assert events[-1] == ")gradient"
        optimizer.step()
        assert trace() == plain


@pytest.mark.parametrize("kind", [*FACTORIES, "ExactDiffusion"])
def test_timeline(worlds, kind):
    worlds(2).run(marked_passes, kind)


# --- a learning rate of 0 -----------------------------------------------------------------------------------


def warm_up(kind: str, factor: float) -> Tensor:
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(rank).double()
    optimizer = FACTORIES[kind](torch.optim.SGD(model.parameters(), lr=0.1), model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: k / 4)
    for k in range(4):
        optimizer.zero_grad()
        (loss_of(model, rank, k) * (factor if k == 0 and rank == 1 else 1.0)).backward()
        optimizer.step()
        scheduler.step()
    return snapshot(model)


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_step_of_a_warm_up_is_no_checkpoint(worlds, kind):
    """Gradients of zero on one rank do not matter where the learning rate is 0, and count as a step."""
    for got, expected in zip(worlds(2).run(warm_up, kind, 0.0), worlds(2).run(warm_up, kind, 1.0)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
