"""Ranks that die while others train: the others agree on who is left, and go on."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from fogdist import algorithms, joining, membership, topology
from fogdist.meeting import Decision, Join, Log, Minutes
from fogdist.membership import Membership
from harness import Outcome, World, error_of
from hosts import run_on_hosts
from torch import nn

from fog_pg import _extension, _joining

# Long enough that a rank that waits for a lost one until the timeout is seen: RUN_TIMEOUT of the harness is over by then.
TIMEOUT = 120.0
STEPS = 40


FEW_KINDS = ["wrapper/ring", "DecentralizedSGD/one-peer/awc", "LocalSGD"]
TWO_DEATHS = {"both": {1: 8.0, 2: 8.0}, "half": {1: 8.0, 2: 8.5}, "apart": {0: 8.0, 4: 20.0}}
# The hosts of the ranks, and who dies when. Rank 0 holds the Store.
PLACEMENTS = {
    "another host": ([0, 0, 1, 1], {3: 8.5}),
    "a host of its own": ([0, 0, 1], {2: 8.0}),
    "two hosts": ([0, 1, 1, 2, 2], {1: 8.0, 3: 8.5}),
}


def paired(kinds: Iterable[str], cases: Iterable[str]) -> list[Any]:
    """Returns all pairs; those that are not at one place of both lists are for ``make test-all``."""
    return [
        pytest.param(kind, case, marks=[] if place == other else [pytest.mark.long])
        for place, kind in enumerate(kinds)
        for other, case in enumerate(cases)
    ]


class Point(nn.Module):
    """One vector of parameters. With the rank's target in the loss, its optimum is the mean of the ranks' targets."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((300,), start))
        self.y = nn.Parameter(torch.full((5,), start))

    def forward(self, target: float) -> torch.Tensor:
        return ((self.x - target) ** 2).sum() / 2 + ((self.y - target) ** 2).sum() / 2


def topology_of(name: str, size: int) -> Any:
    if name in topology.TOPOLOGY_NAMES:
        return topology.by_name(name, size)
    return {
        "one-peer": topology.one_peer_exponential,
        "base": topology.base_graph,
        "matching": topology.random_matching,
    }[name](size)


def algorithm(kind: str, model: nn.Module, rate: float, size: int) -> Any:
    """Returns an optimizer of a kind, as "name", "name/topology" or "name/topology/order"."""
    name, _, rest = kind.partition("/")
    graph, _, order = rest.partition("/")
    options: dict[str, Any] = {"on_loss": "continue", "bucket_cap_mb": 0.0005}  # two buckets
    if graph:
        options["mixing"] = topology_of(graph, size)
    if order:
        options["order"] = order
    if name in ("LocalSGD", "DiLoCo", "SparseLoCo"):
        options["local_steps"] = 2
    if name == "GossipPGA":
        options["period"] = 3
    if name == "DecentralizedAdamW":
        return algorithms.DecentralizedAdamW(torch.optim.AdamW(model.parameters(), lr=rate), model, **options)
    return getattr(algorithms, name)(torch.optim.SGD(model.parameters(), lr=rate), model, **options)


def die_at(step: int, deaths: dict[int, float]) -> None:
    """Kills this rank if it is to die in this step: at once, or the later the larger the fraction, by up to 40 ms."""
    moment = deaths.get(dist.get_rank(), -1.0)
    if moment == step:
        os.kill(os.getpid(), signal.SIGKILL)
    if math.floor(moment) == step:
        threading.Timer(0.04 * (moment - step), os.kill, (os.getpid(), signal.SIGKILL)).start()


def train(kind: str, deaths: dict[int, float], rate: float = 0.0) -> tuple[Any, ...]:
    """Trains on each rank, some of which die in certain steps.

    Returns:
        The membership, the parameters, the steps made, and how long the longest step took.
    """
    fogdist.init()
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Point(float(rank))
    if kind.startswith("wrapper/"):
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate)
        model = fogdist.DecentralizedDataParallel(
            model,
            optimizer,
            topology_of(kind.split("/")[1], size),
            broadcast=False,
            on_loss="continue",
            bucket_cap_mb=0.0005,
        )
    else:
        optimizer = algorithm(kind, model, rate, size)
    longest = 0.0
    for step in range(STEPS):
        die_at(step, deaths)
        begin = time.monotonic()
        optimizer.zero_grad()
        model(float(rank)).backward()
        optimizer.step()
        longest = max(longest, time.monotonic() - begin)
        if deaths:
            time.sleep(0.005)
    values = [float(p.detach().min()) for p in model.parameters()] + [
        float(p.detach().max()) for p in model.parameters()
    ]
    p = getattr(optimizer, "p", None) if kind.startswith("PushSum") else None
    if kind.startswith("wrapper/"):
        model.global_average()
    return membership.current(), values, longest, p


def survivors_of(outcomes: list[Outcome], deaths: dict[int, float]) -> list[Outcome]:
    for outcome in outcomes:
        if outcome.rank in deaths:
            assert outcome.state == "died", str(outcome)
        else:
            assert outcome.state == "returned", "\n".join(map(str, outcomes))
    return [outcome for outcome in outcomes if outcome.rank not in deaths]


KINDS = [
    "wrapper/ring",
    "wrapper/one-peer",
    "wrapper/matching",
    "DecentralizedSGD/ring",
    "DecentralizedSGD/star/awc",
    "DecentralizedSGD/base/cta",
    "DecentralizedSGD",  # the group's topology
    "LocalSGD",
    "GossipPGA/ring",
    "PushSumSGD/ring-right",
    "GradientTracking/ring",
    "ExactDiffusion/ring",
    "DecentralizedAdamW/one-peer",
    "DiLoCo",
    "SparseLoCo/ring",
]


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_and_agrees(new_world: Callable[..., World], kind: str) -> None:
    """Parameters that only mix end in agreement of the living ranks, within what they began with."""
    size, deaths = 4, {KINDS.index(kind) % 4: 10.0 + 0.5 * (KINDS.index(kind) % 2)}
    outcomes = new_world(size, timeout=TIMEOUT).run_raw(train, kind, deaths)
    living = tuple(rank for rank in range(size) if rank not in deaths)
    ends = []
    for outcome in survivors_of(outcomes, deaths):
        members, values, longest, p = outcome.value
        assert members == Membership(1, living, frozenset(deaths)), str(members)
        assert longest < 5.0
        ends.append(values)
        if p is not None:
            assert 0.1 < p < 3.0
    # Elements may end at different values: SparseLoCo had mixed some of them with the lost rank, and others not.
    for each in zip(*ends, strict=True):
        assert max(each) - min(each) < 0.02, ends
        assert min(each) >= 0.0 and max(each) <= 3.0, ends


@pytest.mark.parametrize(
    "kind", ["wrapper/ring", "DecentralizedSGD/one-peer", "GradientTracking/ring", "LocalSGD"]
)
def test_training_ends_at_the_optimum_of_the_living(new_world: Callable[..., World], kind: str) -> None:
    deaths = {3: 5.0}
    outcomes = new_world(4, timeout=TIMEOUT).run_raw(train, kind, deaths, 0.2)
    values = [outcome.value[1] for outcome in survivors_of(outcomes, deaths)]
    # The mean of the targets 0, 1 and 2; rank 3's would make it 1.5.
    assert sum(map(sum, values)) / sum(map(len, values)) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("kind", "case"), paired(FEW_KINDS, TWO_DEATHS))
def test_two_ranks_die(new_world: Callable[..., World], kind: str, case: str) -> None:
    deaths = TWO_DEATHS[case]
    outcomes = new_world(5, timeout=TIMEOUT).run_raw(train, kind, deaths)
    seen = {outcome.value[0] for outcome in survivors_of(outcomes, deaths)}
    assert len(seen) == 1
    (members,) = seen
    assert (
        members.epoch in (1, 2)
        and members.lost == set(deaths)
        and set(members.living) == set(range(5)) - set(deaths)
    )


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 60))]
)
def test_random_deaths(new_world: Callable[..., World], seed: int) -> None:
    draw = random.Random(seed)
    size, kind = draw.randint(3, 6), draw.choice(KINDS)
    victims = draw.sample(range(size), draw.randint(1, size - 1))
    deaths = {victim: round(draw.uniform(0.0, STEPS - 10), 2) for victim in victims}
    if draw.random() < 0.5:  # all within one step
        deaths = {victim: int(deaths[victims[0]]) + round(draw.random(), 2) for victim in victims}
    outcomes = new_world(size, timeout=TIMEOUT).run_raw(train, kind, deaths)
    seen = {outcome.value[0] for outcome in survivors_of(outcomes, deaths)}
    assert len(seen) == 1 and seen.pop().lost == set(deaths), (kind, deaths)


def test_one_rank_is_left(new_world: Callable[..., World]) -> None:
    deaths = {0: 5.0, 1: 12.0}
    outcomes = new_world(3, timeout=TIMEOUT).run_raw(train, "wrapper/ring", deaths)
    (left,) = survivors_of(outcomes, deaths)
    assert left.value[0].living == (2,)


def lose_in_a_group_that_raises(victim: int) -> str:
    fogdist.init()
    model = Point(1.0)
    optimizer = algorithms.DecentralizedSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(STEPS):
        die_at(step, {victim: 3.0})
        try:
            optimizer.step()
        except dist.DistBackendError as error:
            return str(error)
    return ""


def test_a_loss_raises_by_default(new_world: Callable[..., World]) -> None:
    outcomes = new_world(3, timeout=TIMEOUT).run_raw(lose_in_a_group_that_raises, 1)
    assert all("rank 1 " in outcome.value for outcome in survivors_of(outcomes, {1: 3.0}))


def train_at_own_pace(graph: str, deaths: dict[int, float]) -> tuple[Membership, list[float], float]:
    """As `train`, in mode "async"."""
    fogdist.init()
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Point(float(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = fogdist.DecentralizedDataParallel(
        model, optimizer, topology_of(graph, size), "async", broadcast=False, on_loss="continue"
    )
    longest = 0.0
    for step in range(3 * STEPS):
        die_at(step, deaths)
        begin = time.monotonic()
        optimizer.zero_grad()
        wrapped(float(rank)).backward()
        optimizer.step()
        longest = max(longest, time.monotonic() - begin)
        time.sleep(0.005)
    spread = [float(model.x.detach().min()), float(model.x.detach().max())]
    wrapped.global_average()
    return membership.current(), [*spread, float(model.x.detach().mean())], longest


@pytest.mark.parametrize(
    ("graph", "deaths", "epochs"),
    [
        ("ring", {1: 10.0}, {1}),  # a line is left, until the average of all
        ("ring", {1: 10.0, 3: 20.5}, {1, 2}),  # and then 2 alone, apart from 4 and 0
        ("star", {0: 10.5}, {1}),
    ],
)
def test_asynchronous_ranks_go_on(
    new_world: Callable[..., World], graph: str, deaths: dict[int, float], epochs: set[int]
) -> None:
    outcomes = new_world(5, timeout=TIMEOUT).run_raw(train_at_own_pace, graph, deaths)
    ends, means = [], set()
    for outcome in survivors_of(outcomes, deaths):
        members, (least, most, mean), longest = outcome.value
        assert members.epoch in epochs and members.lost == frozenset(deaths)
        assert longest < 5.0
        ends += [least, most]
        means.add(mean)
    assert max(ends) - min(ends) < 0.1, ends
    assert len(means) == 1


def close_while_others_meet(
    graph: str, victim: int, closer: int, closes_later: bool
) -> tuple[Membership, float, float]:
    """A rank comes to the end of its training while the others meet after a loss, or the others meet while it ends it.

    Args:
        graph: The topology: without the victim it falls apart.
        victim: The rank that is lost.
        closer: The rank that ends its training before the others.
        closes_later: Whether it does so only once it knows of the loss; otherwise it waits for the others at the loss.
    """
    fogdist.init()
    size, rank = dist.get_world_size(), dist.get_rank()
    model = Point(float(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapper = fogdist.DecentralizedDataParallel(
        model, optimizer, topology_of(graph, size), "async", broadcast=False, on_loss="continue"
    )
    backend = fogdist.context.current().backend
    for _ in range(10):
        optimizer.step()
    fogdist.barrier()
    if rank == victim:
        time.sleep(0.0 if closes_later else 0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != closer or closes_later:
        while victim not in backend.lost_ranks():
            time.sleep(0.01)
    begin = time.monotonic()
    if rank != closer:
        for _ in range(60):
            optimizer.step()
            time.sleep(0.002)
    wrapper.close()
    seconds = time.monotonic() - begin
    mean = fogdist.allreduce(torch.ones(1), group=fogdist.reconfigure())
    return membership.current(), seconds, float(mean)


@pytest.mark.parametrize("closes_later", [True, False])
@pytest.mark.parametrize(("graph", "victim"), [("star", 0), ("ring", 1)])
def test_a_rank_closes_while_others_meet(
    new_world: Callable[..., World], graph: str, victim: int, closes_later: bool
) -> None:
    outcomes = new_world(4, timeout=20.0).run_raw(close_while_others_meet, graph, victim, 3, closes_later)
    living = tuple(rank for rank in range(4) if rank != victim)
    for outcome in survivors_of(outcomes, {victim: 0.0}):
        members, seconds, mean = outcome.value
        assert members.living == living, members
        assert seconds < 10.0 and mean == 1.0


@pytest.mark.parametrize(("kind", "case"), paired(FEW_KINDS, PLACEMENTS))
def test_ranks_of_several_hosts_go_on(tmp_path: Path, kind: str, case: str) -> None:
    placement, deaths = PLACEMENTS[case]
    found = run_on_hosts(
        tmp_path, placement, "test_membership", [("train", [kind, deaths])], killed=[*deaths]
    )
    seen = {values[0][0] for rank, values in enumerate(found) if rank not in deaths}
    assert len(seen) == 1 and seen.pop().lost == set(deaths)


# --- collectives --------------------------------------------------------------------------------------------


def reconfigure_after(victims: list[int]) -> list[Any]:
    """Sums up before and after losses of the victims, one after the other; returns what this rank sees."""
    fogdist.init()
    group: Any = None
    seen: list[Any] = [fogdist.reconfigure() is dist.group.WORLD]
    for victim in victims:
        fogdist.barrier(group=group)
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(1000)
        raised = ""
        while not raised:
            raised = error_of(lambda: dist.all_reduce(x, group=group))
        old, group = group, fogdist.reconfigure(group)
        sums = torch.full((1000,), float(dist.get_rank()))
        dist.all_reduce(sums, group=group)
        mean = fogdist.neighbor_allreduce(torch.ones(3), group=group)
        refused = error_of(lambda: dist.all_reduce(x, group=old))
        seen.append(
            (
                "rank" in raised,
                float(sums[0]),
                dist.get_process_group_ranks(group),
                fogdist.rank(group=group) == dist.get_rank(group),
                membership.current(old).living,
                float(mean[0]),
                "takes no more work" in refused,
                fogdist.reconfigure(group) is group,
            )
        )
    return seen


def test_reconfigure_gives_a_smaller_group(new_world: Callable[..., World]) -> None:
    outcomes = new_world(4, timeout=TIMEOUT).run_raw(reconfigure_after, [1, 3])
    for outcome in survivors_of(outcomes, {1: 0.0, 3: 0.0}):
        same, first, second = outcome.value
        assert same
        assert first == (True, 5.0, [0, 2, 3], True, (0, 2, 3), 1.0, True, True)
        # The second time the old group is the smaller one, in its own numbers.
        assert second == (True, 2.0, [0, 2], True, (0, 1), 1.0, True, True)


def reconfigure_after_a_disagreement() -> tuple[str, str, str]:
    fogdist.init()
    x = torch.ones(2 + dist.get_rank())
    raised = error_of(lambda: dist.all_reduce(x))
    return raised, error_of(fogdist.reconfigure), error_of(lambda: dist.all_reduce(x))


def test_a_failure_without_a_loss_stays(new_world: Callable[..., World]) -> None:
    for outcome in new_world(3, timeout=TIMEOUT).run_raw(reconfigure_after_a_disagreement):
        assert outcome.state == "returned", str(outcome)
        raised, refused, later = outcome.value
        # Which of the three notices first is chance.
        assert "ranks disagree" in raised and "ranks disagree" in refused and "takes no more work" in later


def reconfigure_alone(timeout: float) -> tuple[str, float]:
    """All ranks but rank 1 come to the meeting; it has not noticed, and goes on with other work."""
    fogdist.init()
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    fogdist.barrier(group=group)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        time.sleep(2 * timeout)
        return "", 0.0
    begin = time.monotonic()
    error_of(lambda: dist.barrier(group))
    return error_of(lambda: fogdist.reconfigure(group)), time.monotonic() - begin


def test_a_rank_that_does_not_come_is_named(new_world: Callable[..., World]) -> None:
    outcomes = new_world(3, timeout=TIMEOUT).run_raw(reconfigure_alone, 2.0)
    first, _ = survivors_of(outcomes, {2: 0.0})
    raised, seconds = first.value
    assert "the ranks [1] of the group did not come within 2 s" in raised, raised
    assert 2.0 <= seconds < 10.0


def leave_early(leaver: int) -> tuple[Membership, float]:
    """One rank ends in good order while the others train on."""
    fogdist.init()
    model = Point(float(dist.get_rank()))
    optimizer = algorithm("DecentralizedSGD/ring", model, 0.0, dist.get_world_size())
    for step in range(STEPS):
        if step == 10 and dist.get_rank() == leaver:
            fogdist.shutdown()
            dist.destroy_process_group()
            return Membership(0, (), frozenset()), 0.0
        optimizer.step()
    return membership.current(), float(model.x.detach().mean())


def test_a_rank_that_leaves_is_done_without(new_world: Callable[..., World]) -> None:
    outcomes = new_world(3, timeout=TIMEOUT).run_raw(leave_early, 1)
    assert all(outcome.state == "returned" for outcome in outcomes), "\n".join(map(str, outcomes))
    assert outcomes[0].value == outcomes[2].value
    assert outcomes[0].value[0] == Membership(1, (0, 2), frozenset({1}))


# --- processes that join ------------------------------------------------------------------------------------

OWN_PACE = ["wrapper/async", "WinPut", "PullGet", "WindowPushSum/async", "AsynchronousGossip"]
OWN_PACE.append("WindowPushSum/patience")
IN_STEP = ["ChocoSGD", "LEAD", "DecentralizedSGD/patience", "wrapper", "WindowPushSum", "wrapper/patience"]
IN_STEP += ["DeepSqueeze", "DecentralizedSGD", "DecentralizedSGD/awc", "DecentralizedSGD/cta", "LocalSGD"]
IN_STEP += ["AdaptThenCombine", "DecentralizedAdamW", "GossipPGA", "PushSumSGD", "DiLoCo", "GASLoC", "NoLoCo"]
# Those of which each way that a process comes in has one, and the others.
JOINABLE = [*IN_STEP[:4], "AsynchronousGossip"]
JOINABLE += [kind for kind in (*IN_STEP, *OWN_PACE) if kind not in JOINABLE]


def joinable(kind: str, model: nn.Module) -> tuple[Any, Any, Callable[[], int]]:
    """Returns what is called, the optimizer, and a function that counts its rounds."""
    name, _, order = kind.partition("/")
    options: dict[str, Any] = {"patience": {"patience": 5.0}, "async": {"mode": "async"}}.get(order, {})
    base: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if name == "wrapper":
        wrapper = fogdist.DecentralizedDataParallel(
            model, base, broadcast=False, on_loss="continue", **options
        )
        return wrapper, base, lambda: wrapper.round
    if name in ("ChocoSGD", "LEAD", "DeepSqueeze"):
        options = {"compression": fogdist.compression.Int8(), "gamma": 0.5}
    if order in ("awc", "cta"):
        options = {"order": order}
    if name.endswith("LoCo") or name in ("LocalSGD", "GASLoC"):
        options["local_steps"] = 1
    if name == "DecentralizedAdamW":
        base = torch.optim.AdamW(model.parameters(), lr=0.0)
    made = getattr(algorithms, name)(base, model, on_loss="continue", **(options if order != "async" else {}))
    if order == "async":
        made.force_barrier = False
    return model, made, lambda: made.steps


def join_before_the_first_exchange(kind: str) -> tuple[Membership, float, float]:
    """Rank 2 gets the state of before the first exchange, and comes in after it and after the ranks have settled."""
    rank = int(os.environ["RANK"])
    signs = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", FOG_MAX_RANKS="3", FOG_JOIN=str(int(rank == 2)))
    if rank == 2:
        signs.wait(["made 0", "made 1"])
    dist.init_process_group("fog", timeout=timedelta(seconds=TIMEOUT))
    fogdist.init(fogdist.RingGraph)
    model = Point(float(rank))
    called, optimizer, count = joinable(kind, model)
    settle = getattr(optimizer, "settle", lambda: None)

    def step() -> None:
        optimizer.zero_grad()
        called(1.0).backward()
        optimizer.step()

    if rank < 2:
        signs.set(f"made {rank}", "")
        store = _joining.store_of_first(fogdist.context.current().backend)
        assert store is not None
        store.wait(["fog/join/1/request"])
        while not _extension.load().announced():  # it sets the key before it draws attention
            time.sleep(0.01)
        step()
        settle()
        store.wait(["fog/join/1/ready"])
    if kind in OWN_PACE:
        while membership.current().epoch == 0:
            step()
        for _ in range(10):
            step()
            time.sleep(0.005)
    while kind not in OWN_PACE and count() < 12:
        step()
    settle()
    fogdist.barrier(group=fogdist.reconfigure())
    return membership.current(), float(model.x.detach().min()), float(model.x.detach().max())


@pytest.mark.parametrize(
    "kind", [*JOINABLE[:5], *(pytest.param(kind, marks=pytest.mark.long) for kind in JOINABLE[5:])]
)
def test_a_copied_state_does_not_decide_what_a_process_does_with_others(
    new_world: Callable[..., World], kind: str
) -> None:
    """It is of before the first exchange: windows, replicas and numbers of exchanges are others when it comes in."""
    world = new_world(3, initialize=False, finalizing=0, environment={"FOG_CONFIRM": "0"})
    ends = world.run(join_before_the_first_exchange, kind)
    assert {members for members, _, _ in ends} == {Membership(1, (0, 1, 2), frozenset())}
    least, most = min(least for _, least, _ in ends), max(most for _, _, most in ends)
    # Random pairs with momentum, as GASLoC and NoLoCo mix, come together later than that.
    assert kind in ("GASLoC", "NoLoCo") or (least >= 0.0 and most <= 1.0 and most - least < 0.1), ends


def test_a_process_begins_where_the_rank_is_that_lets_it_in() -> None:
    """Not where that one began its last round: it may have settled since, which is no part of a round."""
    told: list[dict[str, Any]] = []
    members = SimpleNamespace(enter=lambda seat: told.append(seat.report()))
    steps = iter(range(10))
    seat = membership.Seat(members, "a", SimpleNamespace(counts=lambda: {"steps": next(steps)}))  # type: ignore[arg-type]
    for _ in range(2):
        seat.enter()
        for _ in range(3):  # a round of two exchanges, and one by `settle`
            seat.completed = seat.take() + 1
    assert told == [report(0, 0, 0, 0), report(3, 3, 3, 1)]


class Extension:
    """The extension of a rank without connections; newcomers are on another host."""

    def __getattr__(self, name: str) -> Any:
        values = {"job_secret": "a secret of this test", "announced": 0, "own_entry": "1", "announce": True}
        values["read_entry"] = {"is_visible": False, "addresses": []}
        return lambda *_: values[name]


@pytest.mark.parametrize("end", ["died", "failed"])
def test_a_process_that_could_not_join_leaves_no_ticket(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """It has asked another rank and died, or it has failed and lives on."""
    monkeypatch.setattr(joining._extension, "load", Extension)
    monkeypatch.setattr(joining, "_EMPTY_TIMEOUT", 0.0)
    store, group = dist.HashStore(), 7
    joining.Door(store, group).publish_nonce()
    newcomer = joining.Newcomer(_joining.World(store, group, 4, {}, {}, 4), 2, 10.0)
    newcomer._ticket = store.add("fog/join/count", 1)
    newcomer._request()
    if end == "failed":
        newcomer.leave()
    door = joining.Door(store, group)  # of the rank that answers next
    for _ in range(2):
        door.look(0, lambda _: "", dict, [0])
    assert store.check(["fog/join/first"]) and not store.check(["fog/join/1/request"])
    assert store.get("fog/join/first") == b"2"


def test_all_joinable_algorithms_are_joined() -> None:
    made = {each.partition("/")[0] for each in JOINABLE}
    every = {name: getattr(algorithms, name) for name in algorithms.__all__}
    assert made >= {name for name, each in every.items() if getattr(each, "can_be_joined", False)}


# --- the Store ----------------------------------------------------------------------------------------------

_kept: dict[str, Any] = {}


def start_with_store(port: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group(
        "fog", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )
    fogdist.init()
    model = Point(float(rank))
    _kept["optimizer"] = algorithm("DecentralizedSGD/ring", model, 0.0, size)
    _kept["optimizer"].step()


def go_on(victim: int) -> str:
    for _ in range(5):
        _kept["optimizer"].step()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: [_kept["optimizer"].step() for _ in range(STEPS)])


def test_without_the_store_ranks_train_on_until_one_is_lost(new_world: Callable[..., World]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = new_world(3, initialize=False, timeout=TIMEOUT)
    world.run(start_with_store, store.port)
    del store
    outcomes = world.run_raw(go_on, 0)
    for outcome in survivors_of(outcomes, {0: 0.0}):
        assert "the group's Store does not answer" in outcome.value, outcome.value
        assert "rank 0 " in outcome.value, outcome.value


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_meetings_in_every_store(kind: str, tmp_path: Any) -> None:
    """Many threads write to a meeting and decide: none of their words is lost, and one decision holds."""
    stores = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), -1),
        "hash": dist.HashStore,
    }
    store = dist.PrefixStore("group", stores[kind]())
    decisions: list[Any] = []

    def take_part(rank: int) -> None:
        log = Log(store, "meeting")
        log.append({"came": rank, "seats": {"a": rank}})
        log.append({"gone": 100 + rank % 2, "by": rank})
        minutes = log.read()
        assert rank in minutes.came and 100 + rank % 2 in minutes.gone
        decisions.append(log.decide(Decision({rank: {"a": {"completed": rank}}}, {})))

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = Log(store, "meeting")
    minutes = log.read()
    assert minutes.came == {rank: {"a": rank} for rank in range(8)} and minutes.gone == {100, 101}
    assert log.is_decided() and len(decisions) == 8
    assert all(decision == decisions[0] for decision in decisions)


class FakeBackend:
    """The backend of a rank in a meeting without processes; it knows from the beginning who is lost."""

    id = 7

    def __init__(self, lost: list[int], timeout: float) -> None:
        self._lost = lost
        self.options = SimpleNamespace(_timeout=timedelta(seconds=timeout))
        self.watched: set[int] = set()

    def lost_ranks(self) -> list[int]:
        return self._lost

    def left_ranks(self) -> list[int]:
        return []

    def watch(self, ranks: list[int]) -> None:
        self.watched.update(ranks)


def meet_in(
    monkeypatch: pytest.MonkeyPatch,
    store: dist.Store,
    rank: int,
    size: int,
    lost: list[int],
    timeout: float = 30.0,
) -> Any:
    """Returns what a rank of a group agrees on with the others, or the text of its error."""
    monkeypatch.setattr(membership.distributed_c10d, "_get_process_group_store", lambda group: store)
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    whole = SimpleNamespace(
        rank=rank, size=size, group=group, backend=FakeBackend(lost, timeout), is_joining=False
    )
    monkeypatch.setattr(membership.contexts, "current", lambda group: whole)
    members = membership.Members(group, size)
    seat = members.seat("a")
    seat.completed = 10 + rank
    try:
        decision = members._agreed(whole, dist.DistBackendError("the first error"), ())
        return (
            {} if decision is None else {r: seats["a"]["completed"] for r, seats in decision.living.items()}
        )
    except dist.DistBackendError as error:
        return str(error)


def test_a_rank_that_was_declared_lost_raises_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half of a group takes the other one for lost; the half that decides first is the group."""
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        first = [pool.submit(meet_in, monkeypatch, store, rank, 4, [2, 3]) for rank in (0, 1)]
        assert [each.result() for each in first] == [{0: 10, 1: 11}] * 2
        second = [pool.submit(meet_in, monkeypatch, store, rank, 4, [0, 1]) for rank in (2, 3)]
        assert [each.result() for each in second] == [
            f"this rank {rank} was declared lost in epoch 1, and takes no part any more" for rank in (2, 3)
        ]


def test_ranks_wait_for_each_other_and_learn_of_losses_from_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(meet_in, monkeypatch, store, rank, 4, []) for rank in (0, 1)]
        time.sleep(0.2)
        assert not any(each.done() for each in early)
        last = pool.submit(meet_in, monkeypatch, store, 3, 4, [2])
        decisions = [each.result() for each in (*early, last)]
    assert decisions == [{0: 10, 1: 11, 3: 13}] * 3


def test_if_all_come_nobody_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        assert [
            each.result()
            for each in [pool.submit(meet_in, monkeypatch, store, rank, 3, []) for rank in range(3)]
        ] == [{}] * 3


def report(completed: int, taken: int, first: int, steps: int) -> dict[str, Any]:
    return {"completed": completed, "taken": taken, "first": first, "counts": {"steps": steps}}


def test_who_joins_begins_where_the_farthest_rank_is() -> None:
    """Within a round of three exchanges, it begins the round and gives up what a rank has completed."""
    join = Join(1, "entry", "nonce")
    came = {0: {"a": report(6, 6, 6, 2)}, 1: {"a": report(7, 9, 6, 2)}, 3: {"a": report(5, 6, 3, 1)}}
    decision = Minutes(came, {2}, {2: join}, {"a"}).decision([0, 1, 2, 3])
    assert decision is not None and decision.members == (0, 1, 2, 3) and decision.joins == {2: join}
    assert decision.numbers == {"a": 7}
    assert decision.report_of("a") == came[1]["a"] and decision.report_of("b") is None
    assert Decision.from_json(json.loads(json.dumps(decision.to_json(5)))) == decision


@pytest.mark.parametrize("gone", [set(), {3}])
def test_nobody_joins_while_a_rank_is_in_an_exchange_of_another_object(gone: set[int]) -> None:
    """It would wait there for a process that begins with the first object. The ranks go on, as a new epoch."""
    came = {rank: {"a": report(6, 6, 6, 2), "b": report(5, 5 + (rank == 1), 5, 2)} for rank in (0, 1, 3)}
    decision = Minutes(came, gone, {2: Join(1, "entry", "nonce")}, {"a"}).decision([0, 1, 3])
    assert decision is not None and decision.joins == {} and decision.members == tuple({0, 1, 3} - gone)
    assert Minutes(came, set(), {}, set()).decision([0, 1, 3]) is None


# --- arguments ----------------------------------------------------------------------------------------------


def bad_arguments() -> None:
    fogdist.init()
    model = Point(0.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="on_loss must be one of 'raise', 'continue', got 'stop'"):
        algorithms.DecentralizedSGD(sgd, model, on_loss="stop")
    with pytest.raises(ValueError, match="on_loss must be one of 'raise', 'continue', got 'stop'"):
        fogdist.DecentralizedDataParallel(model, sgd, on_loss="stop")
    with pytest.raises(ValueError, match="on_loss"):
        options = {"on_loss": "continue"} if dist.get_rank() else {}
        algorithms.DecentralizedSGD(sgd, model, **options)
    optimizer = algorithms.DecentralizedSGD(sgd, model, on_loss="continue")
    optimizer.self_weight = 0.5
    with pytest.raises(ValueError, match="self_weight must stay None"):
        optimizer.step()
    optimizer.self_weight = None
    optimizer.step()
    assert membership.current() == Membership(0, (0, 1), frozenset())
    with pytest.raises(TypeError, match="group must be a torch.distributed.ProcessGroup"):
        fogdist.reconfigure("all")


def test_bad_arguments(new_world: Callable[..., World]) -> None:
    new_world(2).run(bad_arguments)
