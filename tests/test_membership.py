"""Who is a member: agreement rounds after a loss, smaller groups, processes that join; `test_on_loss` has the training meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from fogdist import algorithms, topology
from fogdist.compression import Int8
from fogdist.elastic import membership
from fogdist.elastic.membership import Membership
from fogdist.elastic.protocol import (
    Action,
    Decision,
    Fail,
    Form,
    Joiner,
    Member,
    Message,
    Poll,
    Request,
    Send,
    decide,
)
from harness import Outcome, World, error_of
from hosts import run_on_hosts
from torch import nn

from fog_pg import _extension, _joining

# Long enough that a rank that waits for a lost one until the timeout is seen: RUN_TIMEOUT of the harness is over by then.
TIMEOUT = 120.0
STEPS = 40


class Vector(nn.Module):
    """Parameters in several buckets, all elements alike; the loss pulls them to a target."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((40,), start, dtype=torch.float64))
        self.y = nn.Parameter(torch.full((300,), start, dtype=torch.float64))

    def forward(self, target: float) -> torch.Tensor:
        return ((self.x - target) ** 2).sum() / 2 + ((self.y - target) ** 2).sum() / 2

    def value(self) -> float:
        """Returns the value of all elements, which are the same."""
        everything = torch.cat([each.detach() for each in self.parameters()])
        assert float(everything.max() - everything.min()) < 1e-9, everything
        return float(everything[0])

    def both(self, is_whole: bool = True) -> list[float]:
        """Returns the values of the two buckets; ranks at their own pace may mix them differently.

        Args:
            is_whole: Whether all elements of a bucket are the same; not if neighbors read it while it changes, which
                `AsynchronousGossip` lets them do, nor if only some elements are sent.
        """
        if is_whole:
            assert all(float(each.detach().max() - each.detach().min()) < 1e-9 for each in self.parameters())
        return [float(each.detach().mean()) for each in self.parameters()]


def topology_of(name: str, size: int) -> Any:
    if name in topology.TOPOLOGY_NAMES:
        return topology.by_name(name, size)
    return {
        "one-peer": topology.one_peer_exponential,
        "base": topology.base_graph,
        "matching": topology.random_matching,
    }[name](size)


OF_NAMES: dict[str, dict[str, Any]] = {
    **{name: {"local_steps": 2} for name in ("LocalSGD", "DiLoCo", "SparseLoCo", "GASLoC")},
    "ChocoSGD": {"compression": Int8(), "gamma": 0.5},
}
OF_WORDS: dict[str, dict[str, Any]] = {
    "patience": {"patience": 5.0},
    "awc": {"order": "awc"},
    "cta": {"order": "cta"},
    "async": {"mode": "async"},
    "streaming": {"local_steps": 4, "fragments": 2, "delay": 2},
}


def make(kind: str, model: nn.Module, rate: float = 0.0, **given: Any) -> tuple[Any, Any]:
    """Returns what is called and the optimizer, of a kind as "name/word/...": words are options, or a topology."""
    name, *words = kind.split("/")
    options: dict[str, Any] = {"on_loss": "continue", "bucket_cap_mb": 0.0005}  # two buckets
    options |= OF_NAMES.get(name, {})
    for word in words:
        graph = {} if word in OF_WORDS else {"topology": topology_of(word, dist.get_world_size())}
        options |= OF_WORDS.get(word, graph)
    options |= given
    of_adam = name == "DecentralizedAdamW"
    base = (torch.optim.AdamW if of_adam else torch.optim.SGD)(model.parameters(), lr=rate)
    if name == "wrapper":
        graph = options.pop("topology", None)
        return fogdist.DecentralizedDataParallel(model, base, graph, broadcast=False, **options), base
    return model, getattr(algorithms, name)(base, model, broadcast=False, **options)


def survivors_of(outcomes: list[Outcome], deaths: Collection[int]) -> list[Outcome]:
    for outcome in outcomes:
        if outcome.rank in deaths:
            assert outcome.state == "died", str(outcome)
        else:
            assert outcome.state == "returned", "\n".join(map(str, outcomes))
    return [outcome for outcome in outcomes if outcome.rank not in deaths]


# --- collectives --------------------------------------------------------------------------------------------


def reconfigure_after(victims: list[int]) -> list[Any]:
    """Sums up before and after losses of the victims, one after the other; returns what this rank sees."""
    fogdist.init()
    group: Any = None
    seen: list[Any] = [fogdist.reconfigure() is dist.group.WORLD]
    for victim in victims:
        dist.barrier(group)
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
    x = torch.ones(2 + dist.get_rank())
    raised = error_of(lambda: dist.all_reduce(x))
    return raised, error_of(fogdist.reconfigure), error_of(lambda: dist.all_reduce(x))


def test_a_failure_without_a_loss_stays(new_world: Callable[..., World]) -> None:
    world = new_world(3, timeout=TIMEOUT)
    # All have begun before the failure, of which a rank may hear while it still waits for others in its first operation.
    world.run(fogdist.init)
    for outcome in world.run_raw(reconfigure_after_a_disagreement):
        assert outcome.state == "returned", str(outcome)
        raised, refused, later = outcome.value
        # Which of the three notices first is chance.
        assert "ranks disagree" in raised and "ranks disagree" in refused and "takes no more work" in later


def reconfigure_alone(timeout: float) -> str:
    """All ranks but rank 1 come to the agreement round; it has not noticed, and goes on with other work."""
    fogdist.init()
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    dist.barrier(group)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        time.sleep(2 * timeout)
        return ""
    error_of(lambda: dist.barrier(group))
    return error_of(lambda: fogdist.reconfigure(group))


def test_a_rank_that_does_not_come_is_named(new_world: Callable[..., World]) -> None:
    outcomes = new_world(3, timeout=TIMEOUT).run_raw(reconfigure_alone, 2.0)
    first, _ = survivors_of(outcomes, {2: 0.0})
    assert "the ranks [1] of the group did not come within 2 s" in first.value, first.value


def leave_early(leaver: int) -> tuple[Membership, float]:
    """One rank ends in good order while the others train on."""
    fogdist.init()
    model = Vector(float(dist.get_rank()))
    _, optimizer = make("DecentralizedSGD/ring", model)
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

OWN_PACE = ["wrapper/async", "AsynchronousGossip"]
IN_STEP = ["ChocoSGD", "DecentralizedSGD/patience", "wrapper", "wrapper/patience"]
IN_STEP += ["DecentralizedSGD", "DecentralizedSGD/awc", "DecentralizedSGD/cta", "LocalSGD"]
IN_STEP += ["DecentralizedAdamW", "PushSumSGD", "DiLoCo", "GASLoC"]
# Those of which each way that a process comes in has one, and the others.
JOINABLE = [*IN_STEP[:3], "AsynchronousGossip"]
JOINABLE += [kind for kind in (*IN_STEP, *OWN_PACE) if kind not in JOINABLE]


def joinable(kind: str, model: nn.Module) -> tuple[Any, Any, Callable[[], int]]:
    """Returns what is called, the optimizer, and a function that counts its rounds."""
    name = kind.partition("/")[0]
    given = {"local_steps": 1} if name in ("LocalSGD", "DiLoCo", "GASLoC") else {}
    called, optimizer = make(kind, model, **given)
    return called, optimizer, (lambda: called.round) if name == "wrapper" else (lambda: optimizer.steps)


def join_before_the_first_exchange(kind: str) -> tuple[Membership, float, float]:
    """Rank 2 gets the state of before the first exchange, and comes in after it and after the ranks have settled."""
    rank = int(os.environ["RANK"])
    signs = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", FOG_MAX_RANKS="3", FOG_JOIN=str(int(rank == 2)))
    if rank == 2:
        signs.wait(["made 0", "made 1"])
    dist.init_process_group("fog", timeout=timedelta(seconds=TIMEOUT))
    fogdist.init(fogdist.topology.ring)
    model = Vector(float(rank))
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
    while membership.current().epoch == 0:  # ranks in step see it in the same one
        step()
    end = count() + 12
    while count() < end:
        step()
        time.sleep(0.005 if kind in OWN_PACE else 0.0)
    settle()
    # A rank counts the rounds that it was left out of as well, so it may be at its end before others.
    if kind == "wrapper/patience":
        called.close()
    dist.barrier(group=fogdist.reconfigure())
    return membership.current(), float(model.x.detach().min()), float(model.x.detach().max())


@pytest.mark.parametrize(
    "kind", [*JOINABLE[:4], *(pytest.param(kind, marks=pytest.mark.long) for kind in JOINABLE[4:])]
)
def test_a_copied_state_does_not_decide_what_a_process_does_with_others(
    new_world: Callable[..., World], kind: str
) -> None:
    """It is of before the first exchange: windows, replicas and numbers of exchanges are others when it comes in."""
    world = new_world(3, initialize=False, finalizing=0, environment={"_FOG_CONFIRM": "0"})
    ends = world.run(join_before_the_first_exchange, kind)
    assert {members for members, _, _ in ends} == {Membership(1, (0, 1, 2), frozenset())}
    least, most = min(least for _, least, _ in ends), max(most for _, _, most in ends)
    # Random pairs with momentum, as GASLoC mixes, come together later than that.
    assert kind == "GASLoC" or (least >= 0.0 and most <= 1.0 and most - least < 0.1), ends


def test_a_process_begins_where_the_rank_is_that_lets_it_in() -> None:
    """Not where that one began its last round: it may have settled since, which is no part of a round."""
    told: list[dict[str, Any]] = []
    members = SimpleNamespace(enter=lambda participant: told.append(participant.report()))
    steps = iter(range(10))
    participant = membership.Participant(members, "a", SimpleNamespace(counts=lambda: {"steps": next(steps)}))  # type: ignore[arg-type]
    for _ in range(2):
        participant.enter()
        for _ in range(3):  # a round of two exchanges, and one by `settle`
            participant.completed = participant.take() + 1
    assert told == [report(0, 0, 0, 0), report(3, 3, 3, 1)]


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
    _, _kept["optimizer"] = make("DecentralizedSGD/ring", Vector(float(rank)))
    _kept["optimizer"].step()


def go_on(victim: int) -> str:
    for _ in range(5):
        _kept["optimizer"].step()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: [_kept["optimizer"].step() for _ in range(STEPS)])


def test_without_the_store_ranks_go_on_after_a_loss(new_world: Callable[..., World]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = new_world(3, initialize=False, timeout=TIMEOUT)
    world.run(start_with_store, store.port)
    del store
    outcomes = world.run_raw(go_on, 0)
    for outcome in survivors_of(outcomes, {0: 0.0}):
        assert outcome.value == "", outcome.value


# --- who decides --------------------------------------------------------------------------------------------


def fall_silent(stopped: int) -> str:
    """The rank of one host stops until the other one has seen that; returns the error of each."""
    optimizer = make("DecentralizedSGD/ring", Vector(float(dist.get_rank())))[1]
    optimizer.step()
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)  # the other rank continues it
        return error_of(optimizer.step)
    error = error_of(lambda: [optimizer.step() for _ in range(STEPS)])
    os.kill(pids[stopped], signal.SIGCONT)
    return error


@pytest.mark.parametrize("stopped", [0, 1])
def test_of_two_hosts_the_one_with_rank_0_goes_on_if_the_other_one_is_silent(
    tmp_path: Path, stopped: int
) -> None:
    settings = {"FOG_LOST_AFTER": "2", "FOG_BETWEEN_HOSTS": "tcp"}
    calls = [("join_fogdist", []), ("fall_silent", [stopped])]
    found = run_on_hosts(tmp_path, [0, 1], "test_membership", calls, timeout=TIMEOUT, environment=settings)
    first, second = (results[-1] for results in found)
    assert first == "", first  # also after it was stopped itself
    assert "does not hear the ranks [0]" in second and "too few to go on" in second, second


def hear_of_a_failure() -> str:
    """Rank 0 counts rank 1 as lost, which still runs and is told so; rank 2 hears both. Returns the error of each."""
    backend, x = fogdist.context.current().backend, torch.ones(1)
    pids: list[int] = [0, 0, 0]
    dist.all_gather_object(pids, os.getpid())
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        error = error_of(lambda: dist.recv(x, 1))
    elif dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 continues it
        error = error_of(lambda: [dist.send(x, 0) for _ in range(10**6)])
    else:
        backend.lost_after = 1.0
        error_of(lambda: dist.recv(x, 1, group=pair))
        assert backend.lost_ranks() == [1]
        os.kill(pids[1], signal.SIGCONT)
        error = error_of(lambda: dist.recv(x, 2))
    backend.abort()  # as all ranks do that come to an agreement round
    time.sleep(5.0)  # nobody's end is the reason
    return error


def test_who_comes_to_an_agreement_round_tells_all_that_hear_it(tmp_path: Path) -> None:
    """Also if the reason was told to it alone, or if another rank has told it, whom not all believe."""
    calls = [("join_fogdist", []), ("hear_of_a_failure", [])]
    environment = {"FOG_BETWEEN_HOSTS": "tcp"}
    found = run_on_hosts(tmp_path, [0, 1, 2], "test_membership", calls, timeout=30.0, environment=environment)
    errors = [results[-1] for results in found]
    assert "rank 2 reports" in errors[0] and "counts this rank as lost" in errors[1], errors
    assert "rank 1 reports" in errors[2], errors


def join_fogdist() -> None:
    fogdist.init()


class FakeCarrier:
    """Takes messages between threads of this process, through JSON."""

    arrived: dict[int, list[tuple[int, str]]]

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def send(self, rank: int, message: dict[str, Any]) -> None:
        self.arrived[rank].append((self._rank, json.dumps(message)))

    def receive(self, timeout: float) -> list[tuple[int, dict[str, Any]]]:
        time.sleep(timeout)
        messages, self.arrived[self._rank] = self.arrived[self._rank], []
        return [(sender, json.loads(message)) for sender, message in messages]


def told(actions: Sequence[Action], to: int) -> list[Message]:
    """Returns the messages for a rank."""
    return [each.message for each in actions if isinstance(each, Send) and each.to == to]


def test_a_rank_that_is_late_is_waited_for_although_one_that_has_ended_did_not_hear_it() -> None:
    """Nothing reaches rank 3: it says that it does not hear ranks 1 and 2, and stops. Rank 1 knows that it has ended."""
    first, second, third = (Member(rank, 4, 30.0, 6.0) for rank in range(3))
    first.agree(0.0, {}, "")
    deaf = Member(3, 4, 30.0, 6.0)
    deaf.lost([], [1, 2])
    for message in told(deaf.agree(0.0, {}, ""), 0):
        first.receive(3, message)
    first.tick(0.0)  # rank 0 does not tell the same: it waits
    assert told(first.tick(2.0), 1)[-1]["promised"] == (1, 0)
    second.lost([3])
    mail = [(1, 0, message) for message in told(second.agree(3.5, {}, ""), 0)]
    mail += [(0, 1, message) for message in told(first.tick(3.5), 1)]
    members, now = {0: first, 1: second}, 3.5
    formed: dict[int, Form] = {}

    def settle() -> None:
        while mail:
            sender, rank, message = mail.pop(0)
            take(rank, members[rank].receive(sender, message))

    def take(rank: int, actions: Sequence[Action]) -> None:
        mail.extend((rank, to, message) for to in members for message in told(actions, to))
        for each in actions:
            if isinstance(each, Form):
                formed[rank] = each

    settle()
    assert not formed
    members[2] = third
    take(2, third.agree(now, {}, ""))
    while not formed and now < 20.0:
        settle()
        now += 0.5
        for rank, member in members.items():
            take(rank, member.tick(now))
    settle()
    assert {rank: each.decision.members for rank, each in formed.items()} == dict.fromkeys(
        range(3), (0, 1, 2)
    )


def members_of(
    silent: dict[int, list[int]], ended: Sequence[int] = (), stands_still: float = 0.0
) -> dict[int, tuple[int, ...]]:
    """Returns the members of the epoch that ranks decide on, by rank; none for a rank that raises.

    Args:
        silent: Whom each of the ranks does not hear.
        ended: Who has ended, as these ranks notice after some time.
        stands_still: For how long they do nothing, before that.
    """
    members = {rank: Member(rank, 1 + max(silent), 30.0, 6.0) for rank in silent}
    formed: dict[int, tuple[int, ...]] = {}
    mail: list[tuple[int, int, Message]] = []

    def take(rank: int, actions: Sequence[Action]) -> None:
        hears = silent.keys() - silent[rank]
        mail.extend((rank, to, message) for to in hears for message in told(actions, to))
        for each in actions:
            if isinstance(each, (Form, Fail)):
                formed[rank] = each.decision.members if isinstance(each, Form) else ()

    for rank, member in members.items():
        member.lost([], silent[rank])
        take(rank, member.agree(0.0, {}, ""))
    for number in range(100):
        for rank, member in members.items():
            take(rank, member.tick(0.1 * number + stands_still))
            take(rank, member.lost(ended))
        while mail:
            sender, to, message = mail.pop(0)
            take(to, members[to].receive(sender, message))
    return formed


def test_ballots_of_a_rank_that_hears_too_few_do_not_hold_up_the_others() -> None:
    """Ranks 0 and 1 are cut off, and 2 and 3 do not hear each other: rank 4 only has promises of three of five."""
    assert members_of({2: [0, 1, 3], 3: [0, 1, 2], 4: [0, 1]}) == {2: (2, 4), 3: (), 4: (2, 4)}


@pytest.mark.parametrize(
    "hears",
    [
        {rank: {(rank + step) % 7 for step in (1, 6)} for rank in range(7)},
        {0: {1}, 1: {0}, 2: {3, 4}, 3: {2, 5}, 4: {2, 5}, 5: {3, 4}},
    ],
)
def test_ranks_of_which_none_hears_a_quorum_raise_at_once(hears: dict[int, set[int]]) -> None:
    """Through others, each would reach a majority."""
    silent = {rank: sorted(hears.keys() - others - {rank}) for rank, others in hears.items()}
    assert members_of(silent) == dict.fromkeys(hears, ())


@pytest.mark.parametrize(("stands_still", "expected"), [(0.0, {3: (3, 4), 4: (3, 4)}), (7.0, {})])
def test_ranks_that_have_stood_still_do_not_go_on_because_all_others_have_ended(
    stands_still: float, expected: dict[int, tuple[int, ...]]
) -> None:
    """These may have let a process in meanwhile."""
    assert members_of({3: [], 4: []}, [0, 1, 2], stands_still) == expected


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_rank_outside_of_a_decision_is_out(epoch: int) -> None:
    """Also if it has missed one: it does not know the ranks of the later one."""
    member = Member(2, 3, 30.0, 6.0)
    member.agree(0.0, {}, "")
    decided = Decision({0: {}, 1: {}}, {}, (2,)).to_values()
    actions = member.receive(0, json.loads(json.dumps({"epoch": epoch, "decided": decided})))
    assert [each.reason for each in actions if isinstance(each, Fail)] == [
        f"this rank 2 was declared lost in epoch {epoch}, and takes no part any more"
    ]
    assert member.state == "out" and not any(isinstance(each, Form) for each in actions)


def test_ranks_stop_at_once_if_one_has_seen_end_what_the_other_takes_for_silent() -> None:
    """Rank 2 may propose, as it hears all that have not ended; but rank 1 never counts rank 0 as ended, so nobody decides."""
    members = {rank: Member(rank, 5, 30.0, 6.0) for rank in (1, 2)}
    members[1].lost([3, 4], [0])
    members[2].lost([0, 3, 4])
    (second,) = told(members[2].agree(0.0, {}, ""), 1)
    members[1].agree(0.0, {}, "")
    for message in told(members[1].receive(2, second), 2):
        members[2].receive(1, message)
    (fail,) = members[1].tick(0.1)
    assert isinstance(fail, Fail) and "does not hear the ranks [0]" in str(fail.reason)
    assert members[2].state == "in a round"  # it goes on alone if the system reports that rank 1 has ended
    members[2].lost([1])
    assert any(isinstance(each, Form) for each in members[2].tick(0.2))


def test_a_ballot_that_began_before_ranks_told_of_silence_decides_nothing() -> None:
    """It left nobody out. What is told since then may be half of it, so the next ballot waits for its turn."""
    proposer, others = Member(0, 4, 30.0, 6.0), [Member(rank, 4, 30.0, 6.0) for rank in range(1, 4)]
    proposer.agree(0.0, {}, "", [JOIN])
    for other in others:
        for message in told(other.agree(0.0, {}, ""), 0):
            proposer.receive(other.rank, message)
    ballot = told(proposer.tick(0.01), 1)[-1]
    assert ballot["promised"] == (1, 0)
    promises = [(other.rank, told(other.receive(0, ballot), 0)[-1]) for other in others]
    others[1].lost([], [3])
    half = {**promises[1][1], "silent": [3]}
    assert not any(isinstance(each, Form) for each in proposer.receive(2, half))
    proposer.tick(0.02)
    actions = proposer.receive(*promises[0])
    assert told(actions, 1) == [] or told(actions, 1)[-1]["value"] is None
    assert told(proposer.tick(2.5), 1)[-1]["promised"][0] > 1


def test_what_ranks_have_said_that_have_ended_does_not_count() -> None:
    """A majority decides and ends before the others hear of that. These decide anew, and then the first decision comes."""
    members = {rank: Member(rank, 5, 30.0, 13.0) for rank in range(5)}

    def told(rank: int, actions: Any, others: set[int]) -> list[tuple[int, int, Any]]:
        return [
            (rank, each.to, each.message) for each in actions if hasattr(each, "to") and each.to in others
        ]

    def exchange(ranks: set[int], mail: list[tuple[int, int, Any]]) -> dict[int, Any]:
        formed: dict[int, Any] = {}
        while mail:
            sender, rank, message = mail.pop(0)
            actions = members[rank].receive(sender, message)
            mail += told(rank, actions, ranks)
            for each in actions:
                if isinstance(each, Form):
                    formed[rank] = each
        return formed

    mail = [
        each for rank in members for each in told(rank, members[rank].agree(0.0, {}, "", [JOIN]), {*range(5)})
    ]
    exchange({*range(5)}, mail)
    first = exchange({0, 1, 2}, told(0, members[0].tick(0.1), {0, 1, 2}))
    assert first.keys() == {0, 1, 2}
    late = {"epoch": 1, "decided": first[0].decision.to_values()}
    for rank in (3, 4):
        members[rank].lost([0, 1, 2])
        assert members[rank].receive(0, late) == []
    members[3].tick(0.2)
    second = exchange({3, 4}, told(3, members[3].tick(5.0), {3, 4}))
    assert {rank: form.decision.members for rank, form in second.items()} == {3: (2, 3, 4), 4: (2, 3, 4)}


@pytest.mark.parametrize(
    ("knows", "says", "ended", "state", "reason"),
    [
        ([1], [], [0], "in", ""),
        ([0], [], [], "admitted", ""),  # rank 1 may have decided otherwise
        ([], [], [0, 1], "out", "all ranks that let it in have ended"),
        ([0], [], [0, 1], "out", "all ranks that let it in have ended"),  # rank 1 may have let in others
        ([], [1], [0], "out", "the others have gone on without it"),
    ],
)
def test_a_joiner_is_in_with_a_rank_that_knows_its_decision(
    knows: list[int], says: list[int], ended: list[int], state: str, reason: str
) -> None:
    """Whoever has let it in may have ended before the others heard of that: `knows` are told, `says` have decided anew."""
    joiner, decision = Joiner(2, 30.0, 11.0), Decision({0: {}, 1: {}}, {2: JOIN})
    joiner.admitted(0.0, 1, decision)
    actions: list[Action] = []
    for ranks, decided in ((knows, decision), (says, Decision({1: {}}, {}))):
        for rank in ranks:
            message = json.dumps({"epoch": 1, "decided": decided.to_values()})
            actions += joiner.receive(rank, json.loads(message))
    joiner.lost(ended)
    actions += joiner.tick(0.1)
    assert joiner.state == state
    assert [each.reason for each in actions if isinstance(each, Fail)] == [
        f"this process cannot join the job as rank 2: {reason}" for _ in range(bool(reason))
    ]


def test_a_joiner_that_has_waited_for_an_answer_has_time_to_reach_all_ranks() -> None:
    """The ranks agreed on a loss meanwhile, for longer than it may take to reach them."""
    joiner = Joiner(2, 30.0, 11.0)
    joiner.start(0.0)
    for now, unreached in (
        (14.0, "rank 1"),
        (24.9, "rank 1"),
        (24.95, ""),
        (25.0, "rank 1"),
        (35.9, "rank 0"),
    ):
        assert not any(isinstance(each, Fail) for each in joiner.loaded(now, bool(unreached), unreached, ""))
    (fail,) = joiner.loaded(36.0, True, "rank 0", "")
    assert isinstance(fail, Fail) and "does not reach rank 0" in str(fail.reason)
    joiner = Joiner(2, 30.0, 11.0)
    joiner.start(0.0)
    assert not any(isinstance(each, Fail) for each in joiner.loaded(14.0, True, "rank 1", ""))
    assert any(isinstance(each, Fail) for each in joiner.loaded(25.0, True, "rank 1", ""))


class FakeBackend:
    """The backend of a rank in an agreement round without processes; it knows from the beginning who is lost, or silent."""

    id = 7
    failure = ""

    def __init__(self, lost: list[int], silent: list[int], timeout: float) -> None:
        self._lost, self._silent = lost, silent
        self.options = SimpleNamespace(_timeout=timedelta(seconds=timeout))
        self.hosts = list(range(8))
        self.watched: set[int] = set()

    def lost_ranks(self) -> list[int]:
        return self._lost + self._silent

    def silent_ranks(self) -> list[int]:
        return self._silent

    def left_ranks(self) -> list[int]:
        return []

    def expelling_ranks(self) -> list[int]:
        return []

    def watch(self, ranks: list[int]) -> None:
        self.watched.update(ranks)


def members_of_fake(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, lost: list[int], silent: list[int]
) -> membership.Members:
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    backend = FakeBackend(lost, silent, 30.0)
    whole = SimpleNamespace(rank=rank, size=size, group=group, backend=backend, is_joining=False)
    monkeypatch.setattr(membership.contexts, "current", lambda group: whole)
    members = membership.Members(group, size)
    members.group_of_test = group  # which it keeps alive
    members._context, members._carrier = whole, FakeCarrier(rank)
    return members


def test_a_process_that_cannot_come_in_yet_is_asked_for_again_later() -> None:
    """The ranks were in exchanges of different objects. Each round costs all of them, so the next one is exchanges away."""
    member = Member(0, 2, 30.0, 0.0)
    for epoch, pauses in ((1, 2), (2, 4)):
        member.agree(0.0, {}, "a process joins", [JOIN])
        decision = Decision({0: {}, 1: {}}, {})
        *_, form = member.receive(1, {"epoch": epoch, "decided": decision.to_values()})
        assert isinstance(form, Form)
        member.formed(0.0, form)
        for _ in range(pauses):
            assert member.waits and member.exchange(0.0) == []
        assert member.waits and member.exchange(0.0) == [Poll()]
        assert not member.waits


def test_nobody_joins_until_silent_ranks_have_noticed_that_they_are_left_out() -> None:
    member = Member(0, 3, 30.0, 13.0)
    member.agree(0.0, {}, "a loss")
    decision = Decision({0: {}, 1: {}}, {}, (2,))
    *_, form = member.receive(1, {"epoch": 1, "decided": decision.to_values()})
    assert isinstance(form, Form)
    member.formed(10.0, form)
    assert member.exchange(22.0) == [] and member.waits
    assert member.exchange(23.0) == [Poll()]


def agree_in(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, lost: list[int], silent: list[int]
) -> Any:
    """Returns what a rank of a group agrees on with the others, or the text of its error."""
    members = members_of_fake(monkeypatch, rank, size, lost, silent)
    participant = members.participant("a")
    participant.completed = 10 + rank
    try:
        decision = members._agreed(dist.DistBackendError("the first error"), ()).decision
    except dist.DistBackendError as error:
        return str(error)
    return {r: objects["a"]["completed"] for r, objects in decision.living.items()}


def test_a_rank_that_stood_still_after_a_decision_looks_whether_it_was_declared_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others of its host may have decided without it meanwhile, as after its end."""
    members = members_of_fake(monkeypatch, 0, 3, [2], [])
    backend = members.context.backend
    monkeypatch.setattr(backend, "hosts", [0, 0, 0])
    monkeypatch.setattr(backend, "expelling_ranks", lambda: [1] * (members._protocol.state == "decided"))
    told = {"epoch": 1, "decided": Decision({0: {}, 1: {}}, {}).to_values()}
    FakeCarrier.arrived = {0: [(1, json.dumps(told))], 1: []}
    with pytest.raises(dist.DistBackendError, match="rank 0 was declared lost by rank 1"):
        members._agreed(dist.DistBackendError("the first error"), ())


def test_of_two_halves_that_do_not_hear_each_other_the_one_with_the_lowest_rank_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCarrier.arrived = {rank: [] for rank in range(4)}
    with ThreadPoolExecutor() as pool:
        last = [pool.submit(agree_in, monkeypatch, rank, 4, [], [0, 1]) for rank in (2, 3)]
        time.sleep(0.2)  # `contexts.current` is that of the last thread
        first = [pool.submit(agree_in, monkeypatch, rank, 4, [], [2, 3]) for rank in (0, 1)]
        assert [each.result() for each in first] == [{0: 10, 1: 11}] * 2
        for rank, each in zip((2, 3), last, strict=True):
            assert each.result().startswith(
                f"this rank {rank} does not hear the ranks [0, 1], which may go on without it: with it there are 2 of 4 ranks, "
                "too few to go on; after: the first error"
            )


def test_ranks_wait_for_each_other_and_learn_of_losses_from_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCarrier.arrived = {rank: [] for rank in range(4)}
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(agree_in, monkeypatch, rank, 4, [], []) for rank in (0, 1)]
        time.sleep(0.2)
        assert not any(each.done() for each in early)
        last = pool.submit(agree_in, monkeypatch, 3, 4, [2], [])
        decisions = [each.result() for each in (*early, last)]
    assert decisions == [{0: 10, 1: 11, 3: 13}] * 3


def report(completed: int, taken: int, first: int, steps: int) -> dict[str, Any]:
    return {"completed": completed, "taken": taken, "first": first, "counts": {"steps": steps}}


JOIN = Request(1, 2, "entry", ("a",), "a", "nonce", "")


def test_who_joins_begins_where_the_farthest_rank_is() -> None:
    """Within a round of three exchanges, it begins the round and gives up what a rank has completed."""
    came = {0: {"a": report(6, 6, 6, 2)}, 1: {"a": report(7, 9, 6, 2)}, 3: {"a": report(5, 6, 3, 1)}}
    decision = decide([0, 1, 2, 3], came, (), {2: JOIN})
    assert decision is not None and decision.members == (0, 1, 2, 3) and decision.joins == {2: JOIN}
    assert decision.numbers == {"a": 7}
    assert decision.report_of("a") == came[1]["a"] and decision.report_of("b") is None
    again = decide([0, 1, 2, 3], came, (), {2: JOIN, 3: JOIN})  # 3 has come, so nobody takes its number
    assert again == decision
    assert Decision.from_values(json.loads(json.dumps(decision.to_values()))) == decision


@pytest.mark.parametrize("gone", [set(), {3}])
def test_nobody_joins_while_a_rank_is_in_an_exchange_of_another_object(gone: set[int]) -> None:
    """It would wait there for a process that begins with the first object. The ranks go on, as a new epoch."""
    came = {rank: {"a": report(6, 6, 6, 2), "b": report(5, 5 + (rank == 1), 5, 2)} for rank in (0, 1, 3)}
    left = {rank: objects for rank, objects in came.items() if rank not in gone}
    decision = decide([0, 1, 3], left, (), {2: JOIN})
    assert decision is not None and decision.joins == {} and decision.members == tuple({0, 1, 3} - gone)
    assert decide([0, 1, 3], came, (), {}) is None


# --- arguments ----------------------------------------------------------------------------------------------


def refuse() -> None:
    fogdist.init()
    model = Vector(0.0)
    for kind in ("DecentralizedSGD", "wrapper", "AsynchronousGossip"):
        with pytest.raises(ValueError, match="on_loss must be one of 'raise', 'continue', got 'stop'"):
            make(kind, model, on_loss="stop")
    with pytest.raises(ValueError, match="on_loss"):
        make("DecentralizedSGD", model, on_loss="continue" if dist.get_rank() else "raise")
    with pytest.raises(ValueError, match=r"on_loss must be 'raise' with topology=Machines\(\)"):
        make("DecentralizedSGD", model, topology=algorithms.Machines())
    _, optimizer = make("DecentralizedSGD", model)
    optimizer.self_weight = 0.5
    with pytest.raises(ValueError, match="self_weight must stay None"):
        optimizer.step()
    optimizer.self_weight = None
    optimizer.step()
    assert membership.current() == Membership(0, (0, 1), frozenset())
    with pytest.raises(TypeError, match="group must be a torch.distributed.ProcessGroup"):
        fogdist.reconfigure("all")


def test_what_it_refuses(new_world: Callable[..., World]) -> None:
    new_world(2).run(refuse)


def test_all_that_are_left_decide_only_if_each_has_said_that_the_others_have_ended() -> None:
    """Rank 4 has not: the word of ranks 0 to 2, that they have decided otherwise, may be on its way to it."""
    members = {rank: Member(rank, 5, 30.0, 13.0) for rank in range(5)}

    def answers(sender: int, actions: Sequence[Action], ranks: Sequence[int]) -> list[Action]:
        """Takes what a rank tells these ranks, and takes back what they answer; returns what follows."""
        return [
            each
            for rank in ranks
            for message in told(actions, rank)
            for answer in told(members[rank].receive(sender, message), sender)
            for each in members[sender].receive(rank, answer)
        ]

    def is_decided(actions: Sequence[Action]) -> bool:
        return any(isinstance(each, Form) for each in actions)

    for rank, member in members.items():
        answers(rank, member.agree(0.0, {}, "", [JOIN]), [each for each in members if each != rank])
    members[3].tick(0.0)
    proposal = answers(3, members[3].tick(1.6), [2, 4])
    assert any(message["accepted"] == (1, 3) for message in told(proposal, 4))
    # Its proposal comes to rank 4 only, and then the others end.
    assert not is_decided(answers(3, proposal, [4]))
    end = members[3].lost([0, 1, 2])
    assert not is_decided(end)
    assert is_decided(answers(3, end, [4]))
