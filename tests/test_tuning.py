"""``tune=``: a running job measures its links and compute, and all ranks move to another setting together."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fogdist
import pytest
import torch
from fogdist import algorithms, topology
from fogdist.compression import BFloat16, Int8, TopK
from fogdist.tuning import decision
from fogdist.tuning.network import Exchanged, Links, Transfer, sites_of, transfers_of
from fogdist.tuning.tuner import TunedMixing, Tuner, start_of
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


def tuned_here(elements: int, steps: int, slow: int | None = None, compute: float = COMPUTE) -> list[Any]:
    """Trains on each rank with ``tune=True``; one rank may need twice the time."""
    fogdist.init()
    model = model_of(elements)
    optimizer = fogdist.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model, tune=True)
    seconds = compute * (2 if fogdist.rank() == slow else 1)
    taken = train(optimizer, model, steps, seconds)
    history = told(optimizer)
    rates = [list(each.rates) for each in optimizer.tuning.history]
    optimizer.close()
    fogdist.shutdown()
    return [taken, history, rates]


# --- sites, from transfers --------------------------------------------------------------------------------------


class Emulated:
    """Ranks of two or more sites, one a host, whose exchanges end when both of their transfers have, as fog's do.

    Args:
        site_of: The site of each rank.
        trunk: Bytes per second of each line between two sites, each way, which the transfers of a round share.
        seed: Of how late ranks begin.
    """

    link, late = 125e6, 0.3  # of a host; the most seconds by which a rank is late

    def __init__(self, site_of: list[int], trunk: float, seed: int = 0) -> None:
        self.site_of, self.trunk = site_of, trunk
        self.links = Links(range(len(site_of)), 2)
        self.rounds = 0
        self._begun = [0.0] * len(site_of)
        self._random = random.Random(seed)

    def exchange(self, graph: topology.Topology, size: float) -> dict[int, Exchanged]:
        """Makes a round; returns what its ranks measure."""
        W, sites, begun = graph.matrix(self.rounds), self.site_of, self._begun
        self.rounds += 1
        ranks = range(len(sites))
        pairs = [(i, j) for i in ranks for j in ranks if i != j and W[i, j]]
        lines = [(sites[i], sites[j]) for i, j in pairs]
        came = {
            (i, j): max(begun[i], begun[j])
            + size / (self.link if sites[i] == sites[j] else self.trunk / lines.count((sites[i], sites[j])))
            for i, j in pairs
        }
        ended = [
            max([at for pair, at in came.items() if rank in pair], default=begun[rank]) for rank in ranks
        ]
        told = {
            j: Exchanged(i, size, ended[j] - max(begun[i], begun[j]), ended[j] - begun[j]) for i, j in pairs
        }
        self._begun = [
            max(end, begin + COMPUTE) + self.late * self._random.random()
            for begin, end in zip(begun, ended, strict=True)
        ]
        return told

    def tell(self, graph: topology.Topology, size: float) -> Any:
        """Makes the rounds of a report; returns the network that it shows."""
        self.links.learn([self.exchange(graph, size) for _ in range(2)])
        return self.links.network(COMPUTE / 2, 4e9)


HALVES, TURNS = [0, 0, 0, 0, 1, 1, 1, 1], [0, 1] * 4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("site_of", "graph", "reports"),
    [
        (HALVES, None, 4),
        (TURNS, None, 4),
        ([0, 0, 1, 1], None, 3),
        ([0, 0, 0, 1, 1, 1, 1, 1], None, 4),
        ([0, 0, 0, 0, 0, 1, 1, 1, 1, 1], None, 9),
        (HALVES, "one-peer-exp2", 9),
    ],
    ids=str,
)
def test_sites_are_found(site_of: list[int], graph: str | None, reports: int, seed: int) -> None:
    """Late ranks, and ranks that send over the line between sites, are not taken for slow links, at no time."""
    emulated = Emulated(site_of, 12.5e6, seed)
    start = start_of(graph and topology.named(graph, len(site_of)), len(site_of)).topology
    found = [emulated.tell(start, 3.8e6) for _ in range(reports)]
    assert all(network is None or network.site_of == site_of for network in found)
    assert found[-1] is not None
    assert all(11e6 < rate < 14e6 for rate in found[-1].trunks.values())
    assert all(3e7 < rate <= 126e6 for rate in found[-1].host_rates)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("graph", ["base-2", "one-peer-exp2"])
@pytest.mark.parametrize("link", [12.5e6, 125e6])
def test_equal_links_are_one_site(graph: str, link: float, seed: int) -> None:
    emulated = Emulated([0] * 8, 0.0, seed)
    emulated.link = link
    found = [emulated.tell(topology.named(graph, 8), 3.8e6) for _ in range(10)]
    assert found[-1] is not None
    assert all(network is None or network.site_of == [0] * 8 for network in found)


def test_sites_stay_while_their_line_is_what_it_was() -> None:
    emulated = Emulated(HALVES, 12.5e6)
    for _ in range(4):
        emulated.tell(topology.named("base-2", 8), 3.8e6)
    # One small message at a time takes less than half of the compute, as all others do.
    few = topology.by_sites(HALVES, every=1)
    for trunk in (12.5e6, 1.25e6, 12.5e6):
        emulated.trunk = trunk
        for _ in range(4):
            found = emulated.tell(few, 2e5)
            assert found.site_of == HALVES
        assert all(0.5 * trunk < rate < 1.1 * trunk for rate in found.trunks.values())
    emulated.trunk = 125e6
    assert [emulated.tell(few, 2e5) for _ in range(4)][-1].site_of == [0] * 8


def test_a_transfer_is_sure_only_if_its_receiver_sent_in_time() -> None:
    # Rank 1 receives from 0 and sends to 2: its exchange of 2 s ends when 2 has the message.
    def of(second: Exchanged, first: float = 5.0) -> Transfer:
        told = {0: Exchanged(3, 1.0, first, first), 1: Exchanged(0, 1.0, 1.5, 2.0), 2: second}
        return next(each for each in transfers_of(0, told, range(4)) if each.target == 1)

    assert not of(Exchanged(1, 1.0, 1.9, 2.5)).sure  # it ended with that
    assert not of(Exchanged(1, 1.0, 1.0, 1.1)).sure  # rank 2 may have come late
    assert of(Exchanged(1, 1.0, 1.0, 1.5)) == Transfer(0, 0, 1, 1.0, 1.5, True)
    # The sender's exchange was shorter.
    assert of(Exchanged(1, 1.0, 1.0, 1.1), first=0.5).seconds == 0.5


def test_a_picture_is_clear_only_if_transfers_between_sites_count() -> None:
    fast = [Transfer(0, 0, 1, 100.0, 1.0), Transfer(0, 2, 3, 100.0, 1.0)]
    assert sites_of(4, [*fast, Transfer(0, 1, 2, 100.0, 9.0, sure=False)]) is None
    assert sites_of(4, [*fast, Transfer(0, 1, 2, 100.0, 9.0)]) == [0, 0, 1, 1]
    assert sites_of(4, [*fast, Transfer(0, 1, 2, 100.0, 1.5, sure=False)]) == [0] * 4


# --- on hosts ---------------------------------------------------------------------------------------------------


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


def test_two_sites(tmp_path: Path) -> None:
    """2 MB take 40 ms within a site; the two of a round that cross take 1.6 s each, and no rank may be taken for a site."""
    calls = [("tuned_here", [500_000, 16, None, 0.2])]
    found = run_on_hosts(tmp_path, range(4), "test_tuning", calls, rate="400mbit", between="20mbit")
    history = found[0][0][1]
    assert history[1]["sites"] == (0, 0, 1, 1) and history[1]["step"] <= 12, history


@on_ranks(4)
def test_fast_links_need_no_change_of_what_is_sent() -> None:
    """On one host nothing is compressed; the recursion stays that of decentralized SGD."""
    rank, size = start()
    ours, theirs = model_of(64), model_of(64)
    plain = topology.named("base-2", size)
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


def another_setting(groups: Any, now: Any, compute: float) -> Any:
    """In place of `decision.moved`: moves each time, so that all settings come."""
    found = [each for group in groups for each in group]
    codes = [(each.way.code, each.local_steps, each.codec and each.codec.code) for each in found]
    return found[((codes.index(now) if now in codes else 0) + 7) % len(found)]


def move_each_time() -> None:
    # Transfers between ranks are transfers between machines then.
    os.environ["FOG_NODES_PER_MACHINE"] = "1"
    decision.moved = another_setting  # type: ignore[assignment]


def train_with_moves(kind: str, options: dict[str, Any], dies_after: float = math.inf) -> tuple[Any, float]:
    """Moves to another setting whenever ranks have told each other. Returns the history and the parameter.

    Args:
        kind: Of the optimizer.
        options: More arguments.
        dies_after: So many seconds after the first steps, rank 2 is killed.
    """
    move_each_time()
    fogdist.init()
    model = model_of(1000)
    optimizers = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    made = optimizers[kind](model.parameters(), 1e-3 * fogdist.rank())
    bounds = fogdist.Tune(max_local_steps=2, codecs=() if kind == "adamw" else [Int8(), BFloat16()])
    optimizer: Any = fogdist.DecentralizedOptimizer(made, model, tune=bounds, **options)
    train(optimizer, model, 5, 0.002)
    if fogdist.rank() == 2 and dies_after < math.inf:
        threading.Timer(dies_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    train(optimizer, model, 35 if dies_after == math.inf else 75, 0.002)
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
    """Any sequence of moves, for each algorithm that takes `tune`."""
    outcomes = new_world(4, timeout=TIMEOUT).run_raw(train_with_moves, kind, options)
    answers = [each.value for each in survivors_of(outcomes, [])]
    histories = [[(e["topology"], e["local_steps"], e["codec"]) for e in each[0]] for each in answers]
    assert all(each == histories[0] for each in histories), histories
    assert len({setting for each in histories for setting in each}) > 3, histories
    assert all(each[1] == answers[0][1] for each in answers)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_is_lost(new_world: Callable[..., World], seed: int) -> None:
    """At any moment, also where some ranks have had the report of a move and others not: all that are left go on alike."""
    draw = random.Random(seed)
    kind, options = draw.choice(
        [("sgd", {}), ("sgd", {"order": "atc"}), ("sgd", {"topology": "ring"}), ("adamw", {})]
    )
    arguments = kind, {**options, "on_loss": "continue"}, draw.uniform(0.01, 0.1)
    outcomes = new_world(4, timeout=TIMEOUT).run_raw(train_with_moves, *arguments)
    answers = [each.value for each in survivors_of(outcomes, [2])]
    assert all(each[1] == answers[0][1] for each in answers)
    histories = [
        [(each["topology"], each["local_steps"], each["codec"]) for each in history[place:]]
        for history, _ in answers
        for place, change in enumerate(history)
        if change["reason"] == "the ranks have changed"
    ]
    assert len(histories) == 3 and all(each == histories[0] for each in histories), histories
    assert len(histories[0]) > 3, histories


def test_a_move_that_only_some_ranks_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss all have the local steps and the codec of the rank that has moved most, whatever they had."""
    algorithm = Mock(
        steps=8, rounds=3, local_steps=1, on_loss="continue", takes_compression=True, _bucket_bytes=None
    )
    algorithm.algorithm_name, algorithm.context.size, algorithm.context.machine_of = (
        "DecentralizedSGD",
        3,
        [0, 1, 2],
    )
    tuner = Tuner(
        algorithm, TunedMixing(start_of(None, 4)), fogdist.Tune(codecs=[BFloat16(), Int8()]), hides=1.0
    )
    assert tuner.schedule() == {"moves": 0, "tuned local steps": 1, "tuned codec": -1}
    told = [
        {"rounds": 3, "moves": moves, "tuned local steps": local_steps, "tuned codec": codec}
        for moves, local_steps, codec in [(1, 2, 0), (2, 4, 1), (1, 2, 0)]
    ]
    tuner.members_changed(told)
    assert tuner.schedule() == {"moves": 3, "tuned local steps": 4, "tuned codec": 1}
    assert algorithm.local_steps == 4 and tuner.setting.reason == "the ranks have changed"
    # Others have been at the beginning of round 3 already, where a report begins.
    tuner.joined()
    assert not algorithm.context.backend.allreduce_named.called
    algorithm.rounds = 5
    algorithm.context.rank = 0
    tuner.joined()
    assert algorithm.context.backend.allreduce_named.called


@on_ranks(2)
def test_wrong_bounds() -> None:
    start()
    model = model_of(4)
    adamw = torch.optim.AdamW(model.parameters())
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    cases: list[tuple[Any, Any, str, dict[str, Any]]] = [
        (ValueError, sgd, "local_steps must be at most max_local_steps=4 of tune, got 8", {"tune": fogdist.Tune(4), "local_steps": 8}),
        (ValueError, sgd, "compression must be None with tune", {"tune": True, "compression": Int8()}),
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
