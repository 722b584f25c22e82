"""Virtual ranks against real ones: the same parameters up to rounding, and what is refused."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import torch
import training_cases
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.compression import Int8
from harness import on_ranks
from torch import Tensor, nn
from training_cases import OPTIMIZERS, Net, start
from virtual_training import GradientAverage, Result, StackedModel, as_operator, train

STEPS = 7
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


SAMPLES = {"samples": (2, 5, 5, 3)}
# An algorithm, its topology and local optimizer, and fragments or the samples of each rank; test_algorithms.py compares every
# algorithm with its recursion.
CASES: list[tuple[Callable[..., Any], Callable[[int], Any] | None, str, dict[str, Any]]] = [
    (bf.DistributedGradientAllreduceOptimizer, None, "sgd", {}),
    (partial(algorithms.DecentralizedSGD, order="awc"), None, "adamw", {}),
    (algorithms.DecentralizedSGD, topologies.one_peer_exponential, "sgd", {}),
    (partial(algorithms.DecentralizedSGD, compression=Int8()), topologies.one_peer_exponential, "sgd", {}),
    (algorithms.DecentralizedAdamW, topologies.random_matching, "adamw", SAMPLES),
    (partial(algorithms.DiLoCo, local_steps=2), None, "sgd", SAMPLES),
    # Its last exchange is in flight when the training ends.
    (partial(algorithms.DiLoCo, local_steps=4, delay=2), None, "sgd", {"fragments": 2}),
    (
        partial(algorithms.PushSumSGD, local_steps=2),
        lambda size: topologies.Topology(
            "triangle", [np.triu(np.ones((size, size))) / np.arange(1, size + 1)]
        ).graph(),
        "adam",
        {},
    ),
    (partial(algorithms.DiLoCo, local_steps=2), topologies.base_graph, "sgd", {}),
]


def make_net(seed: int = 0) -> Net:
    net = training_cases.make_net(seed)
    del net.unused  # the gradients of virtual ranks are zeros where those of real ones are missing
    return net


def batches(size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Data of all ranks, different on each."""

    def data(step: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(step)
        x = torch.randn(size, 5, 4, generator=random, dtype=torch.float64)
        own = torch.linspace(-1, 1, size, dtype=torch.float64)[:, None, None]
        return x, torch.randn(size, 5, 3, generator=random, dtype=torch.float64) + own

    return data


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@on_ranks(4, place=range(len(CASES)))
def test_virtual_ranks_are_real_ranks(place: int) -> None:
    """Each rank compares its parameters, and its loss in each step, with those of its row."""
    algorithm, graph, optimizer, more = CASES[place]
    averages_gradients = algorithm is bf.DistributedGradientAllreduceOptimizer
    rank, size = start(topologies.exponential)
    data, make = batches(size), OPTIMIZERS[optimizer]
    mixing = None if graph is None else graph(size)
    options: dict[str, Any] = {} if mixing is None else {"topology": mixing}
    samples = more.get("samples")
    options |= more if samples is None else {"by_samples": True}
    model = make_net()
    real = algorithm(make([p for p in model.parameters() if p.requires_grad]), model, **options)
    losses, distances = [], []
    for step in range(STEPS):
        inputs, targets = data(step)
        real.zero_grad()
        loss = squares(model(inputs[rank]), targets[rank])
        loss.backward()
        if samples is not None:
            real.samples = samples[rank]
        real.step()
        if step == STEPS - 1:
            real.settle()
        losses.append(float(bf.allreduce(loss.detach().reshape(1))))
        distances.append(fogdist.consensus_distance([*trained(model).values()]))
    virtual = train(
        make_net(),
        squares,
        data,
        ranks=size,
        steps=STEPS,
        topology=mixing,
        algorithm=GradientAverage if averages_gradients else algorithm,
        optimizer=make,
        **more,
    )
    assert virtual.losses.isfinite().all()
    own = trained(virtual.model.model_of(rank))
    for key, value in trained(model).items():
        torch.testing.assert_close(own[key], value, **CLOSE)
    torch.testing.assert_close(virtual.losses, torch.tensor(losses, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(virtual.consensus, torch.tensor(distances, dtype=torch.float64), **CLOSE)
    # Ranks have gone apart, but for those that end at the same parameters in each step.
    assert averages_gradients or virtual.consensus.max() > 1e-3


def test_thousands_of_ranks_mix_along_sparse_matrices():
    matrix = topologies.Topology.from_graph("exp2", topologies.exponential(2048)).matrix()
    values = torch.randn(2048, 4, dtype=torch.float64)
    operator = as_operator(matrix, values)
    assert operator.is_sparse
    torch.testing.assert_close(operator @ values, torch.from_numpy(matrix.T.copy()) @ values, **CLOSE)


# --- what is refused, and what is different -----------------------------------------------------------------


def classifier(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 3)).double()


def run(model: nn.Module, **options: Any) -> Result:
    given = {"data": batches(4), "ranks": 4, "steps": 2, "optimizer": OPTIMIZERS["sgd"], **options}
    return train(model, squares, **given)


def test_models_with_statistics_of_batches_are_refused():
    with pytest.raises(ValueError, match=r"statistics of batches.*BatchNorm1d '1' in training mode"):
        run(classifier(nn.BatchNorm1d(8)))
    model = classifier(nn.BatchNorm1d(8))
    model[1].eval()
    with pytest.raises(ValueError, match="BatchNorm1d"):
        run(model.train())
    model[1].eval()
    assert run(model).losses.isfinite().all()


def test_dropout_differs_between_ranks():
    stacked = StackedModel(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)), 4)
    results = stacked(torch.ones(4, 1, 4))
    assert all(not torch.equal(results[0] == 0, results[rank] == 0) for rank in (1, 2, 3))
    model = classifier(nn.Dropout(0.5))
    before = torch.get_rng_state()
    first, again, other = (run(model, seed=seed).losses for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_what_has_no_rows_is_refused():
    model = classifier()
    for error, message, options in (
        (
            ValueError,
            "topology must have as many nodes.*4, got 8",
            {"topology": topologies.one_peer_exponential(8)},
        ),
        (
            TypeError,
            "topology must be a .* for virtual ranks, got Machines",
            {"topology": algorithms.Machines()},
        ),
        (ValueError, "virtual ranks have neither messages nor windows", {"algorithm": algorithms.WinPut}),
        (
            ValueError,
            "patience must be None for virtual ranks",
            {"algorithm": partial(algorithms.DecentralizedSGD, patience=1)},
        ),
    ):
        with pytest.raises(error, match=message):
            run(model, **options)


def test_ranks_that_do_not_mix_stay_apart():
    alone = run(classifier(), steps=5, topology=algorithms.NoMixing())
    assert alone.consensus[-1] > run(classifier(), steps=5).consensus[-1] > 0


def test_evaluations_see_the_model_as_it_is_then():
    def evaluate(stacked: StackedModel) -> float:
        assert not stacked.training and not torch.is_grad_enabled()
        return stacked.consensus_distance()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(classifier(), steps=20, evaluate=evaluate, every=5)
    assert [step for step, _ in result.evaluated] == [0, 5, 10, 15, 20]
    for step, distance in result.evaluated:
        assert distance == (result.consensus[step - 1] if step else 0.0)


def test_a_schedule_ends_at_its_rate():
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 3))

    model = classifier()
    still, moved = (
        run(model, steps=steps, schedule=schedule, optimizer=OPTIMIZERS["sgd"]) for steps in (3, 6)
    )
    constant = run(model, steps=6, optimizer=OPTIMIZERS["sgd"])
    # The ranks mix on at a rate of 0, and their mean stays.
    mean = moved.model.stacked.mean(dim=0)
    assert torch.allclose(mean, still.model.stacked.mean(dim=0), atol=1e-12)
    assert not torch.allclose(mean, constant.model.stacked.mean(dim=0), atol=1e-6)


# --- the benchmark ------------------------------------------------------------------------------------------


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/time_to_loss.py, with a small task of random numbers."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    module = importlib.import_module("time_to_loss")
    task = ("random", torch.randn(40, 49), torch.arange(40) % 10, torch.randn(9, 49), torch.arange(9))
    monkeypatch.setattr(module, "load", lambda: task)
    return module


@pytest.mark.parametrize("split", ["iid", "sorted", 0.1, 10.0])
def test_shards_give_each_rank_samples_of_its_own(benchmark: Any, split: Any):
    labels = torch.arange(10).repeat_interleave(30)[torch.randperm(300)]
    shards = benchmark.Shards(torch.arange(300), labels, ranks=7, batch=4, split=split, seed=1)
    owned = shards.owned
    assert owned.shape == (7, 42) and len(set(owned.reshape(-1).tolist())) == 7 * 42
    seen: list[Tensor] = []
    for step in range(21):  # two epochs
        inputs, targets = shards(step)
        assert inputs.shape == targets.shape == (7, 4)
        torch.testing.assert_close(labels[inputs], targets)
        seen.append(inputs)
    for rank in range(7):
        counts = torch.bincount(torch.cat(seen, dim=1)[rank], minlength=300)
        assert counts[owned[rank]].eq(2).all()
    kinds = [len(set(labels[own].tolist())) for own in owned]
    assert max(kinds) <= 3 if split == "sorted" else max(kinds) > 3
    again = benchmark.Shards(torch.arange(300), labels, ranks=7, batch=4, split=split, seed=1)
    torch.testing.assert_close(again(13)[0], shards(13)[0])


def test_every_way_is_simulated(benchmark: Any):
    for way in benchmark.WAYS:
        point = benchmark.run(way, 8, "sorted", 3, 20, benchmark.load())
        assert point["steps"] == [0, 10, 20] and np.isfinite(point["losses"]).all(), way


def test_rates_are_chosen_and_then_kept(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(benchmark, "TUNING_RANKS", 4)
    monkeypatch.setattr(benchmark, "RATES", (0.1, 1e38))  # the second one diverges
    path = tmp_path / "loss.json"
    words = f"time_to_loss.py --ways ddp_fog local_sgd --splits iid --ranks 4 --more-ranks --json {path}"
    monkeypatch.setattr("sys.argv", f"{words} --steps 10 --seeds 1 2".split())
    benchmark.main()
    written = json.loads(path.read_text())
    assert [(p["way"], p["rate"]) for p in written["points"]] == [("ddp_fog", 0.1), ("local_sgd", 0.1)] * 2
    assert [row["loss"] is None for row in written["tuning"]] == [False, True] * 2


def test_settings_are_trained_once_with_as_many_samples(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """benchmarks/loss_of_settings.py."""
    module = importlib.import_module("loss_of_settings")
    task = module.mnist()
    equal, unequal = (module.batches_of(task, 1, samples) for samples in ((8,) * 8, module.HALF_SPEED))
    pairs = [(equal(step), unequal(step)) for step in range(4)]
    for rank, size in enumerate(module.HALF_SPEED):
        inputs, targets = (torch.cat([pair[1][part][rank, :size] for pair in pairs]) for part in (0, 1))
        count = min(len(targets), 32)
        assert torch.equal(inputs[:count], torch.cat([pair[0][0][rank] for pair in pairs])[:count])
        assert (targets != module.IGNORED).all()
    assert [sum(int((pair[part][1] != module.IGNORED).sum()) for pair in pairs) for part in (0, 1)] == [
        256,
        256,
    ]

    path = tmp_path / "settings.json"
    ways = ["DDP", "one peer, int8", "DiLoCo, 4 fragments, delay 2", "random pairs, a rank of half speed"]
    words = f"loss_of_settings.py --tasks MNIST --steps 17 --seeds 1 2 --json {path} --ways"
    monkeypatch.setattr("sys.argv", [*words.split(), *ways])
    module.main()
    written = json.loads(path.read_text())
    runs = [(point["seed"], point["way"]) for point in written["points"]]
    assert runs == [(seed, way) for seed in (1, 2) for way in ways]
    assert len(written["tuning"]) == 4 * len(task.rates)  # DiLoCo and one peer have rates for others
    assert [row["mean"] == 0 for row in written["differences"]] == [True, False, False, False]
    monkeypatch.setattr(module, "run", None)
    module.main()
    assert json.loads(path.read_text())["points"] == written["points"]
