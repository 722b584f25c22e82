"""Compares BlueFog's optimizers and gradient averaging with one process that simulates all ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from fogdist.bluefog.common import topology_util
from harness import on_ranks
from reference import Checks
from test_machines import machines_of
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor
from training_cases import (
    EXACT,
    FACTORIES,
    OPTIMIZERS,
    Simulation,
    batch,
    loss_of,
    make_net,
    sgd,
    snapshot,
    start,
    train_step,
    trained,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        kind: awc, atc or gradient.
        optimizer: Name in OPTIMIZERS.
        steps: Number of calls of step().
        every: num_steps_per_communication.
        passes: Number of forward and backward passes before each step().
        mixing: "static" (the topology's plain mean), "weighted", "dynamic" (one peer, from the generator), "random"
            (new weights and edges each step), "machines" and "random machines" (of two ranks each), "allreduce" or
            "empty".
    """

    kind: str
    optimizer: str
    steps: int = 7
    every: int = 1
    passes: int = 1
    mixing: str = "static"


def matrices(run: Run, size: int) -> list[np.ndarray]:
    """Returns the mixing matrix of each step."""
    graph = topologies.star(size) if run.mixing == "weighted" else topologies.exponential(size)
    result = []
    generators = [topology_util.GetDynamicOnePeerSendRecvRanks(graph, r) for r in range(size)]
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
            machines = topologies.uniform_weights(topologies.exponential(size // 2))
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
    """Returns the mixing matrix of the ranks, given that of their machines."""
    return np.kron(machines, np.full((2, 2), 0.5))


def simulate(run: Run, size: int) -> list[Tensor]:
    """Trains all ranks in this process; returns the parameters of rank r after step s as [r][s]."""
    all_ranks = Simulation(
        run.kind, map(make_net, range(size)), lambda m: OPTIMIZERS[run.optimizer](m.parameters())
    )
    trajectories: list[list[Tensor]] = [[] for _ in range(size)]
    done = number = 0
    for matrix in matrices(run, size):

        def backward(model: nn.Module, rank: int, number: int = number) -> None:
            for part in range(run.passes):
                loss_of(model, rank, number + part).backward()

        number += run.passes
        done += run.passes
        all_ranks.matrix = matrix if run.kind != "gradient" else all_ranks.matrix
        all_ranks.step(backward, mixes=done >= run.every or run.kind == "gradient")
        done = 0 if done >= run.every else done
        for trajectory, model in zip(trajectories, all_ranks.models):
            trajectory.append(snapshot(model))
    return [torch.stack(trajectory) for trajectory in trajectories]


def set_dynamic(optimizer: Any, matrix: np.ndarray, rank: int) -> None:
    """Sets one step's column of weights as the optimizer's dynamic attributes."""
    others = [r for r in range(len(matrix)) if r != rank]
    optimizer.self_weight = matrix[rank, rank]
    optimizer.src_weights = {r: matrix[r, rank] for r in others if matrix[r, rank] != 0}
    optimizer.dst_weights = [r for r in others if matrix[rank, r] != 0]


def set_dynamic_machines(optimizer: Any, matrix: np.ndarray, rank: int) -> None:
    """Sets the weights of the rank's machine, given the matrix of ranks."""
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
    machines = bf.CommunicationType.hierarchical_neighbor_allreduce
    kinds = {"allreduce": bf.CommunicationType.allreduce, "empty": bf.CommunicationType.empty}
    kinds |= {"machines": machines, "random machines": machines}
    kind = kinds.get(run.mixing, bf.CommunicationType.neighbor_allreduce)
    return FACTORIES[run.kind](base, model, kind, num_steps_per_communication=run.every)


def train(run: Run) -> Tensor:
    with machines_of(2) if "machines" in run.mixing else contextlib.nullcontext():
        return train_here(run)


def train_here(run: Run) -> Tensor:
    is_weighted = run.mixing == "weighted"
    rank, size = start(topologies.star if is_weighted else None)
    if "machines" in run.mixing:
        fogdist.set_machine_topology(topologies.exponential(fogdist.machine_size()))
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
    *(Run(kind, "adam", every=3, passes=3) for kind in FACTORIES),  # accumulate gradients, then take one step
    *(
        Run(kind, "sgd", every=3) for kind in FACTORIES
    ),  # with local steps; gradients are averaged in each of them
    *(
        Run(kind, "sgd", mixing=mixing)
        for kind in ("awc", "atc")
        for mixing in ("weighted", "dynamic", "allreduce", "empty")
    ),
    *(Run(kind, "adamw", mixing="random") for kind in ("awc", "atc")),
    *(Run(kind, "adam", every=3, mixing="dynamic", steps=10) for kind in ("awc", "atc")),
]
SAMPLES = [
    Run("awc", "adam", mixing="dynamic"),
    Run("atc", "adam", every=3, passes=3),
    Run("gradient", "adam"),
]
# The number of ranks, and the run.
TRAJECTORIES = [
    *((4, run) for run in RUNS),
    *((size, run) for size in (1, 5) for run in SAMPLES),
    *(
        (4, Run(kind, "adamw", mixing=mixing))
        for kind in ("awc", "atc")
        for mixing in ("machines", "random machines")
    ),
]


@pytest.mark.parametrize(("size", "run"), TRAJECTORIES, ids=str)
def test_trajectories(worlds, size, run):
    for got, expected in zip(worlds(size).run(train, run), simulate(run, size), strict=True):
        torch.testing.assert_close(got, expected, **EXACT)


@on_ranks([1, 3])
def test_fused_exchange_equals_one_exchange_a_parameter() -> None:
    """Buckets hold parameters of any dtype and layout, which keep their memory."""
    rank, _ = start()
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(1100, 1000).double(),  # larger than one bucket
        nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
        nn.Linear(3, 5).bfloat16(),
        nn.Linear(1000, 1100).double(),
        nn.Linear(7, 9),
    )
    model.more = nn.ParameterList(
        [
            nn.Parameter(torch.tensor(1.5 + rank)),
            nn.Parameter(torch.empty(0, 4)),
            nn.Parameter(torch.randn(4, 3)[:, 1]),
            nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        ]
    )
    optimizer = bf.DistributedAdaptThenCombineOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    expected = [fogdist.neighbor_allreduce(p) if p.numel() else p.detach() for p in model.parameters()]
    layouts = [(p.stride(), p.data_ptr()) for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    optimizer.step()
    with Checks() as checks:
        for i, (parameter, value) in enumerate(zip(model.parameters(), expected)):
            checks.equal(f"parameter {i}", parameter.detach().clone(), value.clone())
            # autograd notices
            checks.true(
                f"version {i}", parameter._version > versions[i] or fogdist.size() == 1 or not value.numel()
            )
        checks.equal("layouts", [(p.stride(), p.data_ptr()) for p in model.parameters()], layouts)


@on_ranks(2)
def test_parameters_that_no_bucket_takes() -> None:
    rank, _ = start()
    model = nn.Conv2d(2, 3, 3)
    for bad, error, message in [
        (torch.eye(3).to_sparse(), TypeError, "'more' must be dense .*sparse_coo"),
        (torch.zeros(3, 1).expand(3, 4), ValueError, "'more' must not be expanded"),
        (nn.LazyLinear(3).weight, ValueError, "'more' must have a shape, got a Uninit"),
        (TwoTensor(torch.ones(3), torch.ones(3)), TypeError, "'more' must be an ordinary tensor, got TwoT"),
    ]:
        model.more = bad if isinstance(bad, nn.Parameter) else nn.Parameter(bad)
        with pytest.raises(error, match=message):
            bf.DistributedAdaptThenCombineOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    del model.more
    if rank == 1:
        model.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="model must be the same on all ranks"):
        bf.DistributedAdaptThenCombineOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


# --- any optimizer ------------------------------------------------------------------------------------------


class Global(Optimizer):
    """An optimizer of a third party: its step size depends on all gradients, and it has its own methods."""

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
    """A module with two complex parameters and a real one."""

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


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in trained(model) if p.dim() == 2], "lr": 0.03, "weight_decay": 0.1},
        {"params": [p for p in trained(model) if p.dim() != 2], "weight_decay": 0.0, "momentum": 0.5},
    ]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Returns optimizers as Muon needs them: it takes the matrices, another optimizer takes the rest."""
    matrices = [p for p in trained(model) if p.dim() == 2]
    return [
        torch.optim.Muon(
            [{"params": matrices[:1], "lr": 0.05}, {"params": matrices[1:], "momentum": 0.8}], lr=0.02
        ),
        torch.optim.AdamW([p for p in trained(model) if p.dim() != 2], lr=0.01),
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """A combination of model and optimizer.

    Attributes:
        optimizers: Makes the optimizers of a model.
        model: Makes the model of a rank.
        loss: Computes the loss of a model for a rank and a step.
        scheduler: Makes a scheduler, if any, for an optimizer.
        limit: Limit of the norm of gradients, if they are clipped.
        tolerance: Allowed difference between a trajectory and its reference.
    """

    optimizers: Callable[[Any], Optimizer | list[Optimizer]]
    model: Callable[[int], nn.Module] = make_net
    loss: Callable[[nn.Module, int, int], Tensor] = loss_of
    scheduler: Callable[[Optimizer], Any] | None = None
    limit: float | None = None
    tolerance: float = 1e-11


CASES = {
    "fused AdamW": Case(lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, fused=True)),
    "foreach AdamW": Case(lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, foreach=True)),
    "fused SGD": Case(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True)),
    "tensor learning rate": Case(lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.02))),
    "NAdam": Case(lambda m: torch.optim.NAdam(m.parameters(), lr=0.02)),
    "Adafactor": Case(lambda m: torch.optim.Adafactor(m.parameters(), lr=0.02), tolerance=1e-9),
    "Rprop": Case(lambda m: torch.optim.Rprop(m.parameters(), lr=0.02)),
    "groups": Case(lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9)),
    "third party": Case(lambda m: Global(m.parameters(), lr=0.3).train()),
    "complex": Case(lambda m: torch.optim.AdamW(m.parameters(), lr=0.02), rotation),
    "autocast": Case(sgd, single_net, autocast_loss, tolerance=5e-3),
    "clipped": Case(sgd, limit=0.05),
    "one cycle": Case(sgd, scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=6)),
    "warm-up from 0": Case(sgd, scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: n / 5)),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    # Muon orthogonalizes in bfloat16.
    CASES["Muon and AdamW"] = Case(muon_and_adamw, tolerance=2e-3)
STEPS = 5


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@on_ranks(3, name=CASES, kind=FACTORIES)
def test_trajectories_of_any_optimizer(name: str, kind: str) -> None:
    case = CASES[name]
    rank, size = start()
    simulation = Simulation(kind, map(case.model, range(size)), case.optimizers)
    model = case.model(rank)
    made = case.optimizers(model)
    optimizers = [FACTORIES[kind](base, model) for base in (made if isinstance(made, list) else [made])]
    schedulers = []
    if case.scheduler is not None:
        simulated = [each for own in simulation.optimizers for each in own]
        schedulers = [case.scheduler(each) for each in (*optimizers, *simulated)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            case.loss(model, rank, step).backward()
            if kind == "gradient":
                for optimizer in optimizers:
                    optimizer.synchronize()
            if case.limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.limit)
            results = [optimizer.step() for optimizer in optimizers]
            simulation.step(lambda m, r, k=step: case.loss(m, r, k).backward(), clips=case.limit)
            for scheduler in schedulers:
                scheduler.step()
            simulation.check(rank, model, rtol=case.tolerance, atol=case.tolerance)
    if name == "third party":
        assert results == ["stepped"]
        assert optimizers[0].calls == STEPS
        wrapped = optimizers[0]._fog_wrapped
        assert optimizers[0].train(False).calls == wrapped.calls and not wrapped.is_training


# --- settings -----------------------------------------------------------------------------------------------


@on_ranks(2, kind=["awc", "atc"])
def test_settings_and_weights_that_are_wrong(kind: str) -> None:
    fogdist.init()
    make = FACTORIES[kind]
    model = make_net(0)
    base = sgd(model)
    with pytest.raises(TypeError, match=r"communication_type.*neighbor_allreduce"):
        make(base, model, "allreduce")
    optimizer = make(base, model)
    assert optimizer.communication_type is bf.CommunicationType.neighbor_allreduce
    with pytest.raises(TypeError, match="communication_type"):
        optimizer.communication_type = "empty"
    for old, new in [
        ("neighbor_weights", "src_weights"),
        ("send_neighbors", "dst_weights"),
        ("neighbor_machine_weights", "src_machine_weights"),
        ("send_neighbor_machines", "dst_machine_weights"),
    ]:
        with pytest.warns(DeprecationWarning, match=f"{old}.*{new}"):
            setattr(optimizer, old, [1])
        assert getattr(optimizer, new) == getattr(optimizer, old) == [1]
        setattr(optimizer, new, None)
    optimizer.src_machine_weights = {}  # without an effect, as in BlueFog
    optimizer.dst_weights = []
    with pytest.raises(ValueError, match=r"dst_weights must come with self_weight"):
        optimizer.step()


# --- averaged gradients -------------------------------------------------------------------------------------


def one_average_more() -> int:
    """If a rank averages twice within a step, its second average must not match the next average of the others.

    Returns the step that failed.
    """
    rank, _ = start()
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


class Routed(nn.Module):
    """Each rank's data goes through another layer; no rank uses the last one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(size + 1))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](x)


@on_ranks([1, 4])
def test_gradients_that_exist_on_some_ranks_only() -> None:
    rank, size = start()
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
        # With a gradient of zeros, weight decay would move it.
        checks.true("nobody's layer", model.experts[size].weight.grad is None)


@on_ranks(2)
def test_discarded_gradients() -> None:
    rank, size = start()
    simulation = Simulation("gradient", [make_net(0) for _ in range(size)])
    model = make_net(0)
    optimizer = FACTORIES["gradient"](sgd(model), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            loss_of(model, rank, 5).backward()
            optimizer.zero_grad()
            train_step(model, optimizer, rank, step)
            simulation.train(step)
            simulation.check(rank, model)


@on_ranks(2)
def test_sparse_gradients() -> None:
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


@on_ranks(2)
def test_a_scaler_must_not_unscale_before_the_average() -> None:
    """Unscaling before the average raises an error on all ranks, and the next iteration is correct."""
    rank, _ = start()
    model = single_net(0)
    optimizer = bf.DistributedGradientAllreduceOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
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


@on_ranks(2)
def test_atc_counts_the_passes_of_a_step_after_local_steps_were_set() -> None:
    rank, _ = start()
    model = make_net(rank)
    optimizer = FACTORIES["atc"](sgd(model), model)
    train_step(model, optimizer, rank, 0)
    optimizer.local_steps = 2
    for passes, is_average in ((2, True), (1, False), (1, True)):
        for number in range(passes):
            loss_of(model, rank, number).backward()
        optimizer.step()
        first, second = bf.allgather(model.encoder.weight.detach()[None])
        assert torch.equal(first, second) == is_average
