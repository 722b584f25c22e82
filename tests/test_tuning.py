"""``tune=``: a running job measures its links and compute, and all ranks move to another setting together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fogdist
import pytest
import torch
from fogdist import algorithms, topology
from fogdist.compression import BFloat16, Int8, TopK
from fogdist.tuning import decision
from harness import World, on_ranks
from hosts import run_on_hosts
from reference import Checks
from test_membership import TIMEOUT, survivors_of
from torch import nn
from training_cases import start

COMPUTE = 0.05


def model_of(elements: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(elements, 1, bias=False)


def train(optimizer: Any, model: nn.Module, steps: int, seconds: float) -> list[float]:
    """Makes steps whose forward and backward pass take so long; returns the seconds of each."""
    taken = []
    x = torch.ones(1, model.in_features)  # type: ignore[arg-type]
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).sum()
        time.sleep(seconds)
        loss.backward()
        optimizer.step()
        taken.append(time.perf_counter() - begin)
    return taken


def told(optimizer: Any) -> list[dict[str, Any]]:
    """The history without what only a log shows, which must be the same on all ranks."""
    return [
        {
            "step": each.step,
            "topology": each.topology,
            "local_steps": each.local_steps,
            "codec": repr(each.compression),
            "reason": each.reason,
            "sites": each.sites,
            "compute": each.compute,
        }
        for each in optimizer.tuning.history
    ]


def tuned_here(elements: int, steps: int, slow: int | None = None) -> list[Any]:
    """Trains on each rank with ``tune=True``; one rank may need twice the time."""
    fogdist.init()
    model = model_of(elements)
    optimizer = fogdist.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model, tune=True)
    seconds = COMPUTE * (2 if fogdist.rank() == slow else 1)
    taken = train(optimizer, model, steps, seconds)
    history = told(optimizer)
    rates = [list(each.rates) for each in optimizer.tuning.history]
    optimizer.close()
    fogdist.shutdown()
    return [taken, history, rates]


@pytest.mark.parametrize("slow", [None, 1])
def test_slow_links(tmp_path: Path, slow: int | None) -> None:
    """2 MB over 40 Mbit/s take 0.4 s, eight times the compute; with Int8 0.1 s. A slow rank is no slow link."""
    found = run_on_hosts(
        tmp_path, range(4), "test_tuning", [("tuned_here", [500_000, 24, slow])], rate="40mbit"
    )
    answers = [each[0] for each in found]
    assert all(each[1:] == answers[0][1:] for each in answers)
    history, rates = answers[0][1], answers[0][2][-1]
    assert len(history) > 1 and history[0]["reason"] == "the start"
    assert history[1]["codec"] == repr(Int8()) and history[1]["step"] <= 10
    assert all(2.5e6 < rate < 8e6 for rate in rates), rates
    assert set(history[-1]["sites"]) == {0}


@on_ranks(4)
def test_fast_links_need_no_change_of_what_is_sent() -> None:
    """On one host nothing is compressed; the recursion stays that of decentralized SGD."""
    rank, size = start()
    ours, theirs = model_of(64), model_of(64)
    plain = topology.one_peer_exponential(size)
    optimizer = fogdist.DecentralizedOptimizer(
        torch.optim.SGD(ours.parameters(), 0.1 * rank), ours, tune=True
    )
    other = fogdist.DecentralizedOptimizer(
        torch.optim.SGD(theirs.parameters(), 0.1 * rank), theirs, topology=plain
    )
    for model, made in ((ours, optimizer), (theirs, other)):
        train(made, model, 10, 0.005)
    with Checks() as checks:
        if len(optimizer.tuning.history) == 1:
            checks.equal("parameters", ours.weight.detach(), theirs.weight.detach())
        checks.true("codec", optimizer.tuning.setting.compression is None)
    optimizer.close()


def train_with_moves(kind: str, options: dict[str, Any]) -> tuple[list[Any], float]:
    """Moves to another setting whenever ranks have told each other. Returns the history and the parameter."""
    os.environ["FOG_NODES_PER_MACHINE"] = (
        "1"  # so that transfers between ranks are transfers between machines
    )
    fogdist.init()
    calls: list[Any] = []

    def each_time(groups: Any, now: Any, compute: float) -> Any:
        calls.append(now)
        found = [each for group in groups for each in group]
        return found[(7 * len(calls)) % len(found)]

    decision.moved = each_time  # type: ignore[assignment]
    model = model_of(1000)
    optimizers = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    made = optimizers[kind](model.parameters(), 1e-3 * fogdist.rank())
    bounds = fogdist.Tune(max_local_steps=2, codecs=() if kind == "adamw" else [Int8(), BFloat16()])
    optimizer: Any = fogdist.DecentralizedOptimizer(made, model, tune=bounds, **options)
    for step in range(40):
        if step == 20:
            optimizer.tuning.begin_anew()
        train(optimizer, model, 1, 0.002)
    history = told(optimizer)
    optimizer.average()
    value = float(model.weight.sum().detach())
    optimizer.close()
    return history, value


@pytest.mark.parametrize(
    ("kind", "options"),
    [("sgd", {}), ("sgd", {"order": "atc"}), ("sgd", {"topology": "ring"}), ("adamw", {})],
    ids=str,
)
def test_all_ranks_move_at_the_same_step(
    new_world: Callable[..., World], kind: str, options: dict[str, Any]
) -> None:
    """Any sequence of moves, for each algorithm that takes `tune`, and one from the start between them."""
    outcomes = new_world(4, timeout=TIMEOUT).run_raw(train_with_moves, kind, options)
    answers = [each.value for each in survivors_of(outcomes, [])]
    histories = [[(e["topology"], e["local_steps"], e["codec"]) for e in each[0]] for each in answers]
    assert all(each == histories[0] for each in histories), histories
    assert len({setting for each in histories for setting in each}) > 3, histories
    assert all(each[1] == answers[0][1] for each in answers)
    assert "the ranks have changed" in [each["reason"] for each in answers[0][0]]


@on_ranks(2)
def test_wrong_bounds() -> None:
    start()
    model = model_of(4)
    adamw = torch.optim.AdamW(model.parameters())
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    cases: list[tuple[Any, Any, str, dict[str, Any]]] = [
        (ValueError, sgd, "local_steps must be at most max_local_steps=4 of tune, got 8", {"tune": fogdist.Tune(4), "local_steps": 8}),
        (ValueError, sgd, "compression must be None with tune", {"tune": True, "compression": Int8()}),
        (ValueError, sgd, "on_loss must be 'raise' with tune", {"tune": True, "on_loss": "continue"}),
        (ValueError, sgd, "patience must be None with tune", {"tune": True, "patience": 5}),
        (ValueError, adamw, "tune must have no codecs for DecentralizedAdamW", {"tune": fogdist.Tune(codecs=[Int8()])}),
        (ValueError, sgd, "topology must be a topology, a graph or None with tune", {"tune": True, "topology": algorithms.GlobalAverage()}),
        (TypeError, sgd, "tune must be a bool or a fogdist.Tune, got int", {"tune": 3}),
    ]  # fmt: skip
    for kind, optimizer, message, options in cases:
        with pytest.raises(kind, match=message):
            fogdist.DecentralizedOptimizer(optimizer, model, **options)
    with pytest.raises(ValueError, match="codecs must not hold TopK"):
        fogdist.Tune(codecs=[TopK(0.1)])
    with pytest.raises(TypeError, match="codecs must hold codecs"):
        fogdist.Tune(codecs=["Int8"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="max_local_steps must be at least 1, got 0"):
        fogdist.Tune(0)
