"""Compares DecentralizedDataParallel with one process that simulates all ranks, in float64.

Asynchronous training is compared step by step too: ranks take turns, in an order that the test chooses. asyncddp, which
this wrapper replaces, had these defects; each is followed by the test that would find it here:

- sender and receiver both apply the weights, and the first mix has its own scale, which divides by zero with one
  in-neighbor: `test_trajectories` with 2 ranks;
- the self term is frozen at the first iteration, and slots are zero before the first put: `test_turns`;
- schedulers never step in async mode: `test_turns` with a schedule;
- the global average of parameters is a sum: `test_average`;
- a parameter must be used exactly once in a backward pass, so tied or unused ones fail: `Net`.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import os
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import DecentralizedDataParallel
from fogdist import topology as topologies
from fogdist.compression import Int8
from harness import World, on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from training_cases import (
    EXACT,
    OPTIMIZERS,
    Net,
    Simulation,
    loss_of,
    make_net,
    snapshot,
    start,
    train_step,
    trained,
)

STEPS = 6


TOPOLOGIES: dict[str, Callable[[int], Any]] = {
    "group": lambda n: None,
    "ring": topologies.ring,
    "star": topologies.star,
    "one-peer": topologies.one_peer_exponential,
    "matching": topologies.random_matching,
}


def matrix_of(name: str, size: int, t: int) -> np.ndarray:
    """Returns the mixing matrix W of a round, where W[i, j] is the weight of rank i's values at rank j."""
    topology = TOPOLOGIES[name](size)
    if topology is None:
        return topologies.mixing_matrix(topologies.uniform_weights(topologies.exponential(size)))
    return (
        topology.matrix(t).copy()
        if isinstance(topology, topologies.Topology)
        else topologies.mixing_matrix(topology)
    )


# --- in step with the neighbors -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        optimizer: Name in OPTIMIZERS.
        topology: Name in TOPOLOGIES.
        size: Number of ranks.
        passes: Number of forward and backward passes before each step.
        no_sync: Whether all of them but the last are in `no_sync`; otherwise the last backward pass has two calls, too.
        local: Whether every other step is in `no_sync`.
        schedule: Whether a scheduler steps.
        function: Whether the wrapper gets a function that makes the optimizer.
        then: Name of the topology from step 3 on; the empty string keeps `topology`.
    """

    optimizer: str = "sgd"
    topology: str = "ring"
    size: int = 4
    passes: int = 1
    no_sync: bool = True
    local: bool = False
    schedule: bool = False
    function: bool = False
    then: str = ""


def backward(model: nn.Module, run: Run, rank: int, step: int) -> None:
    """Accumulates the gradient of a step. The simulation calls this function too, with the bare model."""
    is_wrapped = isinstance(model, DecentralizedDataParallel)
    for part in range(run.passes):
        is_last = part == run.passes - 1
        with model.no_sync() if is_wrapped and run.no_sync and not is_last else nullcontext():
            loss = loss_of(model, rank, step * run.passes + part)
            if is_last and not run.no_sync:
                loss = loss + loss_of(model, rank, 50 + step)
            loss.backward()


def scheduler_of(optimizer: Any, run: Run) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7 if run.schedule else 1.0)


def simulate(run: Run) -> list[Tensor]:
    """Returns the parameters of rank r after each step as [r][step]."""
    all_ranks = Simulation(
        "awc", map(make_net, range(run.size)), lambda m: OPTIMIZERS[run.optimizer](trained(m))
    )
    schedulers = [scheduler_of(optimizer, run) for (optimizer,) in all_ranks.optimizers]
    trajectories: list[list[Tensor]] = [[] for _ in range(run.size)]
    topology, t = run.topology, 0
    for step in range(STEPS):
        if run.then and step == 3:
            topology, t = run.then, 0
        mixes = not (run.local and step % 2 == 0)
        all_ranks.matrix = matrix_of(topology, run.size, t)
        all_ranks.step(lambda model, rank, k=step: backward(model, run, rank, k), mixes=mixes)
        t += mixes
        for scheduler in schedulers:
            scheduler.step()
        for trajectory, model in zip(trajectories, all_ranks.models, strict=True):
            trajectory.append(snapshot(model))
    return [torch.stack(trajectory) for trajectory in trajectories]


def train(run: Run) -> Tensor:
    rank, size = start()
    model = make_net(rank)
    made = OPTIMIZERS[run.optimizer]
    optimizer = made if run.function else made(model.parameters())
    wrapper = DecentralizedDataParallel(
        model, optimizer, TOPOLOGIES[run.topology](size), broadcast=False, bucket_cap_mb=2e-4
    )
    assert run.function or wrapper.optimizer is optimizer
    scheduler = scheduler_of(wrapper.optimizer, run)
    trajectory = []
    for step in range(STEPS):
        if run.then and step == 3:
            wrapper.set_topology(TOPOLOGIES[run.then](size))
        with wrapper.no_sync() if run.local and step % 2 == 0 else nullcontext():
            wrapper.optimizer.zero_grad()
            backward(wrapper, run, rank, step)
            wrapper.optimizer.step()
        scheduler.step()
        with torch.no_grad():
            wrapper.eval()
            loss_of(wrapper, rank, 99)  # this pass exchanges nothing
            wrapper.train()
        trajectory.append(snapshot(model))
    return torch.stack(trajectory)


RUNS = [
    Run("adamw", "one-peer"),
    *(Run(topology=topology) for topology in TOPOLOGIES),
    *(Run("adamw", topology, size=size) for size, topology in ((1, "group"), (2, "ring"), (3, "ring"))),
    Run("adamw", passes=3, schedule=True, function=True),
    Run("sgd", passes=2, no_sync=False),
    Run("sgd", "star", local=True, schedule=True),
    Run("adamw", "ring", then="one-peer"),
    Run("sgd", "matching", then="group", local=True),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_trajectories(worlds, run):
    for got, expected in zip(worlds(run.size).run(train, run), simulate(run), strict=True):
        torch.testing.assert_close(got, expected, **EXACT)


@on_ranks(4, mode=["sync", "async"])
def test_rounds_go_on(mode: str) -> None:
    """A new wrapper that gets the old one's round continues at that round of the topology."""
    rank, size = start()
    topology = topologies.one_peer_exponential(size)

    def values(stops: bool) -> list[Tensor]:
        found = []
        model, optimizer, wrapper = nn.Linear(1, 1), None, None
        nn.init.constant_(model.weight, float(rank))
        for number in range(5):
            if wrapper is None:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
                wrapper = DecentralizedDataParallel(model, optimizer, topology, mode, broadcast=False)
                assert wrapper.round == 0
                wrapper.round = number
            wrapper(torch.ones(1, 1)).sum().backward()
            if mode == "sync":
                with pytest.raises(RuntimeError, match="round must be set before a forward pass"):
                    wrapper.round = 3
            optimizer.step()
            dist.barrier()
            assert wrapper.round == number + 1
            found.append(model.weight.detach().clone())
            if stops and number == 0:
                dist.barrier()
                wrapper.close()
                wrapper = None
        with pytest.raises(ValueError, match="round must be"):
            wrapper.round = -1
        wrapper.set_topology(topology)
        assert wrapper.round == 0
        dist.barrier()
        wrapper.close()
        return found

    at_once, in_parts = values(stops=False), values(stops=True)
    if mode == "sync":
        assert torch.equal(torch.stack(at_once), torch.stack(in_parts))


@on_ranks(3)
def test_a_skipped_step_mixes_by_synchronize() -> None:
    """Rank 0 has infinite gradients in one step, and leaves it out."""
    rank, size = start()
    ring = topologies.ring(size)
    model = make_net(rank)
    simulation = Simulation(
        "awc",
        map(make_net, range(size)),
        lambda m: OPTIMIZERS["adam"](m.parameters()),
        topologies.mixing_matrix(ring),
    )
    wrapper = DecentralizedDataParallel(model, OPTIMIZERS["adam"](model.parameters()), ring, broadcast=False)
    for step in range(4):

        def backward(m: nn.Module, r: int, step: int = step) -> None:
            (loss_of(m, r, step) * (math.inf if (r, step) == (0, 1) else 1.0)).backward()
            loss_of(m, r, 10 + step)  # a pass for a log, without a backward pass

        wrapper.zero_grad()
        backward(wrapper, rank)
        if (rank, step) == (0, 1):
            wrapper.synchronize()
        else:
            wrapper.optimizer.step()
        simulation.step(backward, skips=[0] if step == 1 else [])
        simulation.check(rank, model)
    assert wrapper.round == 4


class Nested(torch.optim.Adam):
    """Its step calls the step of its base class, and on request raises an error before or after that call."""

    fails: str = ""

    def step(self, closure: Any = None) -> Any:
        if self.fails == "before":
            raise RuntimeError("before")
        result = super().step(closure)
        if self.fails == "after":
            raise RuntimeError("after")
        return result


@on_ranks(2, with_closure=[False, True])
def test_a_step_that_calls_its_base_class_mixes_once(with_closure: bool) -> None:
    """There is one exchange per step, even if torch calls hooks in the base class's step too."""
    rank, _ = start()
    if rank == 0:
        torch.optim.Adam(make_net(0).parameters())  # from now on Adam calls its hooks on this rank
    model = make_net(rank)
    optimizer = Nested(model.parameters(), lr=0.01)
    wrapper = DecentralizedDataParallel(model, optimizer)
    other = torch.optim.SGD(make_net(1).parameters(), lr=0.1)
    # A step that another optimizer's hook calls counts as a step too.
    other.register_step_post_hook(lambda *_: optimizer.step())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(wrapper, rank, 0)
        loss.backward()
        return loss

    for number, fails in enumerate(["", "before", "", "after", "after"]):
        optimizer.fails = fails
        if with_closure and fails != "before":
            arguments = (closure,)
        else:
            closure()
            arguments = ()
        with pytest.raises(RuntimeError, match=fails) if fails else nullcontext():
            optimizer.step(*arguments)
        assert wrapper.round == number + 1
    optimizer.fails = ""
    closure()
    other.step()
    assert wrapper.round == 6


def rounds_that_differ() -> None:
    rank, size = start()
    model = nn.Linear(1, 1)
    wrapper = DecentralizedDataParallel(
        model, torch.optim.SGD(model.parameters(), lr=0.1), topologies.one_peer_exponential(size)
    )
    wrapper.round = 5 + rank
    wrapper(torch.ones(1, 1)).sum().backward()
    with pytest.raises(dist.DistBackendError, match=f"in round {5 + rank} of fogdist.Decentralized"):
        wrapper.optimizer.step()


def test_ranks_in_different_rounds_do_not_mix(new_world):
    outcomes = new_world(2, timeout=3.0).run_raw(rounds_that_differ)
    assert [o.state for o in outcomes] == ["returned"] * 2, "\n".join(map(str, outcomes))


class Norm(nn.Module):
    """A module with batch statistics, which differ by rank, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()
        self.head = nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def features(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(50 * rank + step)
    return rank + torch.randn(6, 4, generator=generator, dtype=torch.float64)


@on_ranks(3, mode=["sync", "async"])
def test_average(mode: str) -> None:
    rank, _ = start()
    torch.manual_seed(rank)
    model = Norm()
    model.norm.running_mean.fill_(rank)
    model.norm.num_batches_tracked.fill_(rank)
    wrapper = DecentralizedDataParallel(
        model, torch.optim.SGD(model.parameters(), lr=0.01), mode=mode, broadcast=False
    )
    wrapper(features(rank, 0)).sum().backward()  # now an exchange is in flight
    before = [p.detach().clone() for p in model.parameters()]
    statistics = model.norm.running_mean.clone()
    wrapper.average(buffers=False)
    for p, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), bf.allreduce(value), rtol=1e-12, atol=1e-12)
    assert torch.equal(model.norm.running_mean, statistics)
    wrapper.average()
    mean = bf.allreduce(statistics)
    torch.testing.assert_close(model.norm.running_mean, mean, rtol=1e-12, atol=1e-12)
    assert model.norm.num_batches_tracked == rank + 1
    wrapper.close()


@on_ranks(4)
def test_average_after_a_forward_pass_on_one_rank() -> None:
    """Only rank 1 has begun an exchange; in the steps afterwards all ranks are together again."""
    rank, size = start()
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, float(rank))
    wrapper = DecentralizedDataParallel(
        model, lambda p: torch.optim.SGD(p, lr=0.0), topologies.one_peer_exponential(size), broadcast=False
    )
    for number in range(3):
        if rank == 1:
            wrapper(torch.ones(1, 1, dtype=torch.float64))
        wrapper.average()
        assert model.weight.item() == pytest.approx((size - 1) / 2)
        assert wrapper.round == 2 * number + 1
        wrapper(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        wrapper.optimizer.step()
    wrapper.average()
    assert wrapper.round == 6


# --- the module behaves as before ---------------------------------------------------------------------------


@on_ranks(3, mode=["sync", "async"])
def test_all_start_with_rank_0s_values(mode: str) -> None:
    rank, _ = start()
    torch.manual_seed(rank)
    model = nn.Sequential(Net().double(), nn.BatchNorm1d(3).double())
    model[1].running_mean.fill_(rank)
    torch.manual_seed(0)
    expected = nn.Sequential(Net().double(), nn.BatchNorm1d(3).double()).state_dict()
    expected["1.running_mean"].fill_(0)
    with DecentralizedDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), mode=mode) as wrapper:
        for key, value in wrapper.module.state_dict().items():
            assert torch.equal(value, expected[key]), key


@on_ranks(2)
def test_state_dicts() -> None:
    """The wrapper has the names that torch's has, for torch's functions for checkpoints too."""
    start()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    wrapper = DecentralizedDataParallel(model, optimizer)
    torch.manual_seed(0)
    state = {f"module.{name}": value for name, value in Net().state_dict().items()}
    assert list(wrapper.state_dict()) == list(get_model_state_dict(wrapper)) == list(state)
    wrapper.load_state_dict(state)
    train_step(wrapper, optimizer, 0, 0)
    torch.testing.assert_close(dict(wrapper.state_dict()), state)
    names = get_optimizer_state_dict(wrapper, optimizer)["state"]
    assert set(names) == {f"module.{name}" for name in get_optimizer_state_dict(model, optimizer)["state"]}
    with pytest.raises(RuntimeError, match=r"begin with 'module.'.*wrapper.module.load_state_dict"):
        wrapper.load_state_dict(model.state_dict())
    with pytest.raises(TypeError, match="copy its attribute `module`"):
        copy.deepcopy(wrapper)
    dist.barrier()


@on_ranks(3)
def test_ranks_that_disagree() -> None:
    """No wrapper is made, and the model can be wrapped on all ranks afterwards, again and again."""
    rank, size = start()
    model = nn.Linear(2, 2)
    frozen = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    frozen[0].bias.requires_grad_(rank == 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = topologies.ring(size) if rank == 0 else topologies.star(size)
    kept = []  # keeps the frames of the errors alive, as a notebook does
    for make, text in (
        (
            lambda: DecentralizedDataParallel(frozen, lambda p: torch.optim.SGD(p, lr=0.1)),
            "'0.bias'",
        ),
        (lambda: DecentralizedDataParallel(model, sgd, topology), "topology: round 0 has the matrix"),
        (lambda: DecentralizedDataParallel(model, sgd, mode="async" if rank else "sync"), "mode='async'"),
        (lambda: fogdist.algorithms.LocalSGD(sgd, model, local_steps=2 + rank), "same on all ranks"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            make()
        kept.append(caught)
    for _ in range(2):
        wrapper = DecentralizedDataParallel(model, sgd)
        with pytest.raises(ValueError, match="topology must be the same"):
            wrapper.set_topology(topology)
        wrapper(torch.ones(1, 2)).sum().backward()
        sgd.step()
        wrapper.close()
    assert len(kept) == 4


@on_ranks(2)
def test_bad_arguments() -> None:
    fogdist.init()
    size = fogdist.size()
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    make = DecentralizedDataParallel
    unweighted = topologies.ring(size)
    for edge in unweighted.edges:
        unweighted.edges[edge]["weight"] = 1.0
    for error, text, arguments, options in [
        (TypeError, "module must be a torch.nn.Module, got str", ("model", sgd), {}),
        (TypeError, "optimizer must be a torch.optim.Optimizer or a function", (model, 3), {}),
        (TypeError, "optimizer must be a torch.optim.Optimizer, got int", (model, lambda p: 3), {}),
        (ValueError, "mode must be one of 'sync', 'async', got 'both'", (model, sgd, None, "both"), {}),
        (
            ValueError,
            "max_staleness, skip_lost must not",
            (model, sgd),
            {"max_staleness": 1, "skip_lost": True},
        ),
        (ValueError, "max_staleness must be", (model, sgd, None, "async"), {"max_staleness": -1}),
        (ValueError, "compression must not", (model, sgd, None, "async"), {"compression": Int8()}),
        (ValueError, "bucket_cap_mb must be above 0", (model, sgd), {"bucket_cap_mb": 0}),
        (TypeError, "topology must be a fogdist.topology.Topology", (model, sgd, [1]), {}),
        (ValueError, "as many nodes as ranks", (model, sgd, topologies.ring(size + 1)), {}),
        (ValueError, "sum to 1", (model, sgd, unweighted), {}),
        (ValueError, "require gradients", (nn.Linear(2, 2).requires_grad_(False), sgd), {}),
        (ValueError, "optimizer must hold parameters of the model only", (nn.Linear(2, 2), sgd), {}),
        (ValueError, "got an LBFGS", (model, torch.optim.LBFGS(model.parameters())), {}),
    ]:
        with pytest.raises(error, match=text):
            make(*arguments, **options)
    distributed = bf.DistributedAdaptThenCombineOptimizer(sgd, model)
    with pytest.raises(ValueError, match="distributed already"):
        make(model, distributed)


@on_ranks(2, mode=["sync", "async"])
def test_a_closed_wrapper_mixes_nothing(mode: str) -> None:
    fogdist.init()
    model = make_net(fogdist.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attributes = set(vars(optimizer))
    wrapper = DecentralizedDataParallel(model, optimizer, mode=mode)
    train_step(wrapper, optimizer, 0, 0)
    loss_of(wrapper, 0, 1).backward()
    wrapper.close()
    assert set(vars(optimizer)) == attributes
    with pytest.raises(RuntimeError, match="after close"):
        wrapper.average()
    assert wrapper.staleness() == {}
    wrapper.pause()
    with torch.no_grad():
        model.position.fill_(fogdist.rank())
    train_step(wrapper, optimizer, 0, 0)
    assert model.position.eq(fogdist.rank()).all()
    reference = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert reference() is None


# --- each rank at its own pace ------------------------------------------------------------------------------

# The order in which ranks take steps: uneven from the start, and rank 3 begins late.
TURNS = [0, 0, 1, 2, 0, 1, 1, 3, 0, 2, 0, 0, 3, 1, 2, 2, 2, 0, 1, 3]


def simulate_turns(run: Run, size: int) -> tuple[list[Tensor], list[dict[int, int | None]]]:
    """Returns, after each turn, the parameters and the staleness on the rank that took the turn."""
    models = [make_net(rank) for rank in range(size)]
    optimizers = [OPTIMIZERS[run.optimizer](trained(m)) for m in models]
    schedulers = [scheduler_of(o, run) for o in optimizers]
    period = range(12)  # a common multiple of the periods of all topologies used here
    slots: dict[tuple[int, int], tuple[int, list[Tensor]]] = {}  # (writer, owner): iteration, values
    done = [0] * size
    states, ages = [], []
    for rank in TURNS:
        model, column = models[rank], matrix_of(run.topology, size, done[rank])[:, rank]
        optimizers[rank].zero_grad()
        loss_of(model, rank, done[rank]).backward()
        own, taken = float(column[rank]), []
        for j in range(size):
            if j != rank and column[j] != 0:
                weight = 0.0
                if (j, rank) in slots:
                    weight = float(column[j])
                    taken.append((weight, slots[j, rank][1]))
                own += float(column[j]) - weight
        with torch.no_grad():
            for place, p in enumerate(trained(model)):
                p.copy_(own * p + sum(weight * values[place] for weight, values in taken))
        optimizers[rank].step()
        schedulers[rank].step()
        row = matrix_of(run.topology, size, done[rank])[rank]
        done[rank] += 1
        for j in range(size):
            if j != rank and row[j] != 0:
                slots[rank, j] = done[rank], [p.detach().clone() for p in trained(model)]
        states.append(snapshot(model))
        union = np.any([matrix_of(run.topology, size, t)[:, rank] != 0 for t in period], axis=0)
        ages.append(
            {
                j: done[rank] - slots[j, rank][0] if (j, rank) in slots else None
                for j in range(size)
                if j != rank and union[j]
            }
        )
    return states, ages


def take_turns(run: Run) -> tuple[list[Tensor], list[dict[int, int | None]]]:
    rank, size = start()
    model = make_net(rank)
    wrapper = DecentralizedDataParallel(
        model,
        OPTIMIZERS[run.optimizer](trained(model)),
        TOPOLOGIES[run.topology](size),
        mode="async",
        broadcast=False,
        bucket_cap_mb=2e-4,
    )
    scheduler = scheduler_of(wrapper.optimizer, run)
    states, ages, done = [], [], 0
    for turn in TURNS:
        if turn == rank:
            train_step(wrapper, wrapper.optimizer, rank, done)
            scheduler.step()
            done += 1
            states.append(snapshot(model))
            ages.append(wrapper.staleness())
            # wait until the neighbors have the values, because a put between hosts takes time
            wrapper._driver.discard()
        dist.barrier()
    wrapper.close()
    return states, ages


@pytest.mark.parametrize(
    "run",
    [
        *(Run(topology=topology) for topology in ("ring", "star", "one-peer")),
        Run("adamw", "group", schedule=True),
    ],
    ids=str,
)
def test_turns(worlds, run):
    """Rank 0 takes its first steps before any put. Empty slots then do not count, not even as zeros."""
    check_turns(worlds(4), run)


def check_turns(world: World, run: Run) -> None:
    states, ages = simulate_turns(run, 4)
    results = world.run(take_turns, run)
    got = [(iter(own_states), iter(own_ages)) for own_states, own_ages in results]
    for turn, state, age in zip(TURNS, states, ages, strict=True):
        torch.testing.assert_close(next(got[turn][0]), state, **EXACT)
        assert next(got[turn][1]) == age


def test_turns_between_hosts(new_world):
    # the ranks exchange messages, as between hosts
    world = new_world(4, environment={"_FOG_LOCAL_LINKS": "0"})
    check_turns(world, Run(topology="one-peer"))


def make_scalar(
    value: float, topology: Any = topologies.ring, **options: Any
) -> tuple[nn.Parameter, DecentralizedDataParallel]:
    """Returns a model of one number that does not learn, by default on a ring."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, value)
    wrapper = DecentralizedDataParallel(
        model,
        lambda p: torch.optim.SGD(p, lr=0.0),
        topology(fogdist.size()),
        "async",
        broadcast=False,
        **options,
    )
    return model.weight, wrapper


def step(wrapper: DecentralizedDataParallel) -> None:
    wrapper(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    wrapper.optimizer.step()


@on_ranks(2)
def test_pause() -> None:
    """Rank 1 pauses: rank 0 goes on without its values and does not wait. Then rank 1 comes back."""
    rank, _ = start()
    x, wrapper = make_scalar(float(rank), max_staleness=1)
    if rank == 1:
        step(wrapper)
        wrapper.pause()
    dist.barrier()
    if rank == 0:
        for _ in range(5):
            step(wrapper)
        assert x == 0.0
        assert wrapper.staleness() == {1: None}
    dist.barrier()
    if rank == 1:
        step(wrapper)
        assert x == 0.5
        assert wrapper.staleness() == {0: 1}  # rank 1 does not have to catch up
    dist.barrier()
    if rank == 0:
        assert wrapper.staleness() == {1: -1}
        step(wrapper)
        assert x == 0.25
    dist.barrier()
    wrapper.average()
    assert x == 0.375
    assert wrapper.staleness() == {1 - rank: 0}
    dist.barrier()
    wrapper.close()


def to_the_last(size: int) -> nx.DiGraph:
    """Returns a graph in which all ranks send to the last one, which sends to no other rank."""
    matrix = np.eye(size)
    matrix[:, -1] = 1 / size
    return topologies.Topology("given", [matrix]).graph()


@on_ranks(3)
def test_a_rank_that_comes_back_counts_on() -> None:
    """It counts on from the neighbor that is farthest ahead."""
    rank, _ = start()
    _, wrapper = make_scalar(float(rank), to_the_last)
    step(wrapper)
    dist.barrier()
    if rank == 2:
        wrapper.pause()
    dist.barrier()
    if rank == 1:
        for _ in range(9):
            step(wrapper)
    dist.barrier()
    if rank == 2:
        step(wrapper)
        assert wrapper.staleness() == {0: 10, 1: 1}
    dist.barrier()
    wrapper.close()


def from_the_first(size: int) -> nx.DiGraph:
    """Returns a graph in which the first rank sends to all others."""
    matrix = np.eye(size)
    matrix[:, 1:] /= 2
    matrix[0, 1:] = 0.5
    return topologies.Topology("given", [matrix]).graph()


def lose_a_neighbor_beside_one_that_pauses() -> None:
    rank, _ = start()
    _, wrapper = make_scalar(float(rank), from_the_first)
    step(wrapper)
    dist.barrier()
    if rank == 1:
        wrapper.pause()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="rank 2 .* was lost"):
            while True:
                step(wrapper)


def test_one_that_pauses_hides_no_lost_neighbor(new_world):
    outcomes = new_world(4).run_raw(lose_a_neighbor_beside_one_that_pauses)
    assert [o.state for o in outcomes] == ["returned", "returned", "died", "returned"], outcomes[0]


def stop_a_neighbor() -> None:
    """Stops rank 0, from which rank 1 gets values, for 30 steps of rank 1."""
    rank, _ = start()
    _, wrapper = make_scalar(float(rank), from_the_first)
    step(wrapper)
    pids = bf.allgather(torch.tensor([os.getpid()])).tolist()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    try:
        for _ in range(30):
            step(wrapper)
    finally:
        os.kill(pids[0], signal.SIGCONT)


def test_a_neighbor_on_another_host_stops(new_world):
    """A rank waits for one second in all, not at each step: waiting for the group's timeout each time would be a hang."""
    new_world(2, environment={"_FOG_LOCAL_LINKS": "0"}).run(stop_a_neighbor)


@on_ranks(4)
def test_a_new_topology() -> None:
    """A new topology has new windows and neighbors, and the windows hold the present values of the ranks at once."""
    rank, size = start()
    x, wrapper = make_scalar(float(rank))
    address = x.data_ptr()
    for _ in range(rank):
        step(wrapper)
    dist.barrier()
    value = x.item()
    wrapper.set_topology(topologies.fully_connected(size))
    assert wrapper.staleness() == {r: 0 for r in range(size) if r != rank}
    mean = bf.allreduce(torch.tensor([value], dtype=torch.float64)).item()
    dist.barrier()
    if rank == 0:
        step(wrapper)
        assert x.item() == pytest.approx(mean, rel=1e-12)
    dist.barrier()
    assert x.data_ptr() == address
    # The topology of the group itself is never frozen.
    fogdist.set_topology(topologies.ring(size))
    wrapper.close()


@on_ranks(2)
def test_local_steps_put_nothing() -> None:
    rank, _ = start()
    x, wrapper = make_scalar(float(rank))
    for turn in (0, 1):
        if rank == turn:
            with wrapper.no_sync():
                step(wrapper)
            assert x == rank
            assert wrapper.staleness() == {1 - rank: None}
        dist.barrier()
    wrapper.close()


def lose_a_neighbor() -> None:
    rank, _ = start()
    x, wrapper = make_scalar(float(rank), skip_lost=True, max_staleness=1000)
    step(wrapper)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while wrapper.staleness()[2] is not None:
        step(wrapper)
    # No rank waits for the lost one, and each adds its weight to the own weight.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"last value of {rank}", repr(x.item()))
    other = float(store.get(f"last value of {1 - rank}"))
    if rank == 1:
        store.wait(["rank 0 has stepped"])
        other = float(store.get("last value of 0"))
    expected = (2 * x.item() + other) / 3
    step(wrapper)
    assert x.item() == pytest.approx(expected, rel=1e-14)
    if rank == 0:
        store.set("last value of 0", repr(x.item()))
        store.set("rank 0 has stepped", "")
    assert wrapper.staleness()[2] is None


def test_a_lost_neighbor_is_skipped_on_request(new_world):
    outcomes = new_world(3).run_raw(lose_a_neighbor)
    assert [o.state for o in outcomes] == ["returned", "returned", "died"], "\n".join(map(str, outcomes))


def end_early() -> None:
    """Rank 1 has no more work, pauses and ends; rank 0 goes on alone."""
    fogdist.init()
    x, wrapper = make_scalar(float(fogdist.rank()), max_staleness=1)
    step(wrapper)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if fogdist.rank() == 1:
        wrapper.pause()
        store.set("has ended", "")
        dist.destroy_process_group()
        return
    store.wait(["has ended"])
    before = x.item()
    for _ in range(100):
        step(wrapper)
        time.sleep(1e-3)
    assert x.item() == before
    assert wrapper.staleness() == {1: None}


@pytest.mark.parametrize("local_links", ["1", "0"], ids=["memory", "tcp"])
def test_a_rank_ends_early(new_world, local_links):
    new_world(2, environment={"_FOG_LOCAL_LINKS": local_links}, finalizing=None).run(end_early)


def leave(mode: str) -> None:
    """Ends as a script does while exchanges are in flight; each rank has its own pace."""
    fogdist.init()
    model = make_net(0)
    wrapper = DecentralizedDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), mode=mode)
    for number in range(3 if mode == "sync" else 1 + fogdist.rank()):
        loss_of(wrapper, fogdist.rank(), number).backward()
        wrapper.optimizer.step()
    loss_of(wrapper, fogdist.rank(), 9).backward()
    leave.wrapper = wrapper  # keeps it alive until exit


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_nothing_is_left(no_shared_memory_left, new_world, mode):
    world = new_world(3, finalizing=None)
    world.run(leave, mode)
    world.close()
