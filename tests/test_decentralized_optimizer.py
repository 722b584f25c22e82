"""Tests `DecentralizedOptimizer`, and what all algorithms share: `no_sync`, `average`, `close`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import networkx as nx
import pytest
import torch
from fogdist import algorithms, topology
from fogdist.compression import Int8
from harness import on_ranks
from reference import Checks
from torch import nn
from training_cases import EXACT, IN_STEP, OPTIMIZERS, VIEWS, WINDOWS, loss_of, make_net, sgd, snapshot, start

KINDS = [*IN_STEP, *WINDOWS, "awc", "atc", "push-sum", "AsynchronousGossip", "DecentralizedAdamW"]


def made(kind: str, model: nn.Module) -> Any:
    """Returns an algorithm around a new optimizer of the model."""
    factory = VIEWS[kind] if kind in VIEWS else partial(getattr(algorithms, kind), broadcast=False)
    base = OPTIMIZERS["adamw"](model.parameters()) if kind == "DecentralizedAdamW" else sgd(model)
    return factory(base, model)


def step(optimizer: Any, model: nn.Module, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, number).backward()
    optimizer.step()


@on_ranks(4)
def test_its_steps_are_those_of_the_algorithm() -> None:
    """The choice of the algorithm, the broadcast, and the argument `topology` in each of its forms."""
    rank, size = start()
    ring = topology.ring(size)
    cases: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
        "sgd": ("sgd", {}, algorithms.DecentralizedSGD, {"order": "awc"}),
        "adamw": ("adamw", {"topology": ring}, algorithms.DecentralizedAdamW, {"topology": ring}),
        "adam with decay": ("adam", {}, algorithms.DecentralizedSGD, {"order": "awc"}),
        "adamw, order": ("adamw", {"order": "atc"}, algorithms.DecentralizedSGD, {}),
        "name": (
            "sgd",
            {"topology": "ring"},
            algorithms.DecentralizedSGD,
            {"order": "awc", "topology": ring},
        ),
        "graphs": (
            "sgd",
            {"topology": [ring, ring]},
            algorithms.DecentralizedSGD,
            {"order": "awc", "topology": ring},
        ),
        "sequence": (
            "sgd",
            {"topology": "one-peer-exp2", "local_steps": 2},
            algorithms.DecentralizedSGD,
            {"order": "awc", "topology": topology.one_peer_exponential(size), "local_steps": 2},
        ),
        "codec": (
            "adamw",
            {"topology": ring, "compression": Int8()},
            algorithms.DecentralizedSGD,
            {"order": "awc", "topology": algorithms.Neighbors(ring, compression=Int8())},
        ),
    }
    with Checks() as checks:
        for name, (base, given, algorithm, options) in cases.items():
            ours, theirs = make_net(rank), make_net(0)
            optimizer = fogdist.DecentralizedOptimizer(OPTIMIZERS[base](ours.parameters()), ours, **given)
            other = algorithm(OPTIMIZERS[base](theirs.parameters()), theirs, **options)
            for number in range(3):
                step(optimizer, ours, rank, number)
                step(other, theirs, rank, number)
            checks.equal(name, snapshot(ours), snapshot(theirs))


@on_ranks(3)
def test_all_ranks_start_from_rank_0() -> None:
    """The parameters and the buffers, in all algorithms."""
    rank, _ = start(topology.symmetric_exponential)
    for kind in (*IN_STEP, "WinPut", "AsynchronousGossip", "DecentralizedAdamW"):
        model = make_net(rank)
        model.register_buffer("mean", torch.full((2,), float(rank)))
        base = OPTIMIZERS["adamw"](model.parameters()) if kind == "DecentralizedAdamW" else sgd(model)
        optimizer = getattr(algorithms, kind)(base, model)
        assert torch.equal(snapshot(model), snapshot(make_net(0))) and not model.mean.any(), kind
        optimizer.close()


@on_ranks(2)
def test_local_steps_count_steps_of_the_optimizer() -> None:
    """However many passes a step has."""
    rank, _ = start()
    awc = {"order": "awc"}
    for kind, more in (("DecentralizedSGD", awc), ("WinPut", {}), ("PushSumSGD", awc)):
        model = make_net(rank)
        with getattr(algorithms, kind)(sgd(model), model, local_steps=2, **more) as optimizer:
            for number in range(4):
                loss_of(model, rank, number).backward()
                step(optimizer, model, rank, number)
                assert optimizer.rounds == (number + 1) // 2, kind


@on_ranks([1, 3])
def test_the_end_of_training() -> None:
    """`average` gives all ranks the mean that push-sum and all others conserve; after `close` no step is made."""
    rank, size = start()
    for kind in KINDS:
        model = make_net(rank)
        model.register_buffer("mean", torch.full((2,), float(rank), dtype=torch.float64))
        with made(kind, model) as optimizer:
            for number in range(3):
                step(optimizer, model, rank, number)
            if kind in WINDOWS:
                optimizer.settle()  # so that the parameters below are those of the end
            own = 1.0 if optimizer.mean_weight is None else float(optimizer.numbers[optimizer.mean_weight])
            total = bf.allreduce(torch.tensor(own), average=False)
            expected = {
                p: bf.allreduce(p.detach() * own, average=False) / total
                for p in model.parameters()
                if p.requires_grad
            }
            optimizer.average()
            for parameter, value in expected.items():
                torch.testing.assert_close(
                    bf.allreduce(parameter.detach()), parameter.detach(), **EXACT, msg=kind
                )
                if kind not in (*WINDOWS, "AsynchronousGossip"):  # these may have taken more values meanwhile
                    torch.testing.assert_close(parameter.detach(), value, **EXACT, msg=kind)
            assert torch.equal(model.mean, torch.full((2,), (size - 1) / 2, dtype=torch.float64)), kind
        optimizer.close()
        with pytest.raises(RuntimeError, match="was closed"):
            optimizer.step()


@on_ranks(2)
def test_passes_of_an_accumulated_batch() -> None:
    """Passes in `no_sync` begin no exchange and are not counted, and a step there is refused."""
    rank, _ = start()
    for kind in ("awc", "atc", "DecentralizedSGD", "put"):
        whole, parts = make_net(rank), make_net(rank)
        with made(kind, whole) as one, made(kind, parts) as other:
            # These count forward passes, of which `one` has two a step.
            one.local_steps, other.local_steps = (2 if kind == "DecentralizedSGD" else 4), 2
            if kind == "put":
                one.force_barrier = other.force_barrier = True
            for number in range(4):
                one.zero_grad()
                sum(loss_of(whole, rank, 2 * number + part) for part in (0, 1)).backward()
                one.step()
                other.zero_grad()
                with other.no_sync():
                    loss_of(parts, rank, 2 * number).backward()
                    with pytest.raises(RuntimeError, match="no_sync"):
                        other.step()
                loss_of(parts, rank, 2 * number + 1).backward()
                other.step()
            torch.testing.assert_close(snapshot(parts), snapshot(whole), **EXACT, msg=kind)


@on_ranks(2)
def test_wrong_arguments() -> None:
    start()
    model = make_net(0)
    mean, weighted = nx.DiGraph([(0, 1), (1, 0)]), nx.DiGraph([(0, 1, {"weight": 0.5}), (1, 0)])
    cases: dict[str, tuple[type[Exception], dict[str, Any]]] = {
        "order must be one of 'atc', 'awc', 'cta', got 'sync'": (ValueError, {"order": "sync"}),
        "name must be one of ring, .*, random-matching, got 'cube'": (ValueError, {"topology": "cube"}),
        "topology must be .* a name that `fog topology` lists": (TypeError, {"topology": 3}),
        "topology must be .* a sequence of graphs, .* got list": (TypeError, {"topology": []}),
        "each column of graph must sum to 1": (ValueError, {"topology": [mean, weighted]}),
        "compression must be None with topology=GlobalAverage": (
            ValueError,
            {"topology": algorithms.GlobalAverage(), "compression": Int8()},
        ),
        "local_steps must be at least 1, got 0": (ValueError, {"local_steps": 0}),
    }
    for message, (kind, options) in cases.items():
        with pytest.raises(kind, match=message):
            fogdist.DecentralizedOptimizer(sgd(model), model, **options)
    with pytest.raises(TypeError, match=r"write fogdist.topology.named\('ring', fogdist.size\(\)\)"):
        algorithms.Neighbors("ring")
    # A graph without weights stands for plain means, in a sequence too.
    assert (algorithms.Neighbors([mean, mean]).topology.matrix(1) == 0.5).all()


@on_ranks(2)
def test_an_adamw_keeps_its_moments() -> None:
    """Those of steps before it was wrapped, or of a loaded state, and in steps after the end."""
    start()  # all ranks make the same steps, so averages change nothing
    for loads in (False, True):
        (model, plain), (ours, base) = (
            (net, OPTIMIZERS["adamw"](net.parameters())) for net in (make_net(0), make_net(0))
        )
        for number in range(3):
            step(plain, model, 0, number)
            if not loads:
                step(base, ours, 0, number)
        optimizer = fogdist.DecentralizedOptimizer(base, ours)
        if loads:
            ours.load_state_dict(model.state_dict())
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        with optimizer:
            step(plain, model, 0, 3)
            step(optimizer, ours, 0, 3)
        pairs = [
            (base.state[a], plain.state.get(b))
            for a, b in zip(ours.parameters(), model.parameters(), strict=True)
        ]
        compared = [(mine, its) for mine, its in pairs if its]  # not those without a gradient
        assert compared
        for mine, its in compared:
            assert mine["step"] == its["step"] == 4
            torch.testing.assert_close(mine["exp_avg"], its["exp_avg"])
            torch.testing.assert_close(mine["exp_avg_sq"], its["exp_avg_sq"])
        step(base, ours, 0, 4)


@on_ranks(2)
def test_the_step_of_a_subclass_of_adam_is_made() -> None:
    start()
    model, calls = make_net(0), []

    class Mine(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            calls.append(1)
            return super().step(closure)

    optimizer = fogdist.DecentralizedOptimizer(Mine(model.parameters()), model)
    step(optimizer, model, 0, 0)
    assert calls == [1]
    with pytest.raises(ValueError, match="optimizer must be no subclass.*got Mine"):
        algorithms.DecentralizedAdamW(Mine(model.parameters()), model)
    of_complex = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="optimizer must have real parameters, got a complex one"):
        algorithms.DecentralizedAdamW(torch.optim.AdamW(of_complex.parameters()), of_complex)
    with pytest.raises(
        AttributeError, match="neither DecentralizedSGD nor the Mine that it wraps has an attribute .topology"
    ):
        optimizer.topology = "ring"
