"""Histories of losses and joins, of machines without processes: no promise is broken, and mutants of the protocol break one."""

from __future__ import annotations

import itertools
import sys
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import histories
import pytest
from fogdist.elastic import protocol
from harness import ALL
from histories import History, World, command, first_failure, shrunk, violation_of, violation_of_round

HISTORIES = 2_000
ROUNDS = 10_000
# `make test-all` runs as many as fit into this time.
SECONDS = 600.0
# Within so many histories or rounds, each mutant breaks a promise; a few of them do so late, in these histories.
MUTANT_HISTORIES = 1_000
LATE_SEEDS = (298, 461, 532, 605, 912)
MUTANT_ROUNDS = 3_000

# Each is a defect: its name, a text of `protocol`, and what stands there instead. The first three are of earlier versions.
MUTANTS: list[tuple[str, str, str]] = [
    (
        "two epochs with the same ranks have one name",
        'return f"epoch {self.epoch}"',
        'return f"ranks {self.decision.members}"',
    ),
    (
        "nobody answers joiners after the loss of the lowest rank",
        "lowest = self.living[0]",
        "lowest = self.membership.living[0]",
    ),
    (
        "a joiner that must be refused takes the number of a rank that is well",
        "if rank in self.living:\n            # It may",
        "if rank in self._own.ended:\n            # It may",
    ),
    ("half of the ranks decides", "(twice == size and self._first in ranks)", "twice == size"),
    ("no half of the ranks decides", "(twice == size and self._first in ranks)", "False"),
    (
        "all that are left do not decide",
        "return not self._stood_still and {*ranks} | ended >= {*self.membership.living}",
        "return False",
    ),
    (
        "a silent rank counts as ended",
        "self._own.silent.update(set(silent) - self._own.ended)",
        "self._own.ended.update(silent)",
    ),
    (
        "both of two ranks that do not hear each other are left out",
        "for teller, view in views.items() if teller not in silent for",
        "for teller, view in views.items() for",
    ),
    (
        "ranks that notice silence one by one are not waited for",
        "(_SETTLE if left_out[1] else 0.0)",
        "0.0",
    ),
    ("processes join before silent ranks have noticed", "self._closed_until = now + self._doubt", "pass"),
    (
        "a ballot has two values",
        "(number, self.rank), silent",
        "(number, 0), silent",
    ),
    (
        "an acceptor forgets what it has promised",
        "self._own = _View()\n        self._views = {self.rank: self._own}\n        self._mutual",
        "self._views = {self.rank: self._own}\n        self._mutual",
    ),
    ("one rank that is missing is not waited for", "        if missing:", "        if len(missing) > 1:"),
    (
        "a rank that is lost is missing for ever",
        "self._views.keys() | own.ended | silent]",
        "self._views.keys()]",
    ),
    ("nobody watches the others", "[Watch(tuple(rank for rank in self.living if rank != self.rank))]", "[]"),
    ("the round has no end", "if now >= self._deadline:", "if now < 0:"),
    ("too few ranks wait for ever", "if self._is_cut_off():", "if 0:"),
    ("messages are not repeated", "elif now >= self._repeat:", "elif 0:"),
    ("one rank only proposes", "_TURN * self._place()", "1e9 * self._place()"),
    (
        "a rank that this host's others count as lost goes on",
        'self.state = "out"\n        return [Fail(f"this rank {self.rank} was declared lost by',
        'return []\n        return [Fail(f"this rank {self.rank} was declared lost by',
    ),
    ("ranks may be in exchanges of other objects", 'if report["taken"] > report["completed"]', "if 0"),
    (
        "all go on where the last rank is",
        'max(report["completed"], numbers',
        'min(report["completed"], numbers',
    ),
    (
        "a loss without a joiner changes nothing",
        "if len(living) == len(before) and not joins:",
        "if not joins:",
    ),
    (
        "an epoch is skipped on some ranks",
        "epoch = self.membership.epoch + 1\n        told",
        "epoch = self.membership.epoch + 1 + bool(self._own.ended)\n        told",
    ),
    ("a joiner waits for those that have ended", "self._unsure -= set(ended)", "pass"),
    (
        "a joiner waits for ever to be known",
        'if now >= self._asked + self._reach:\n            return self._fail(f"it does not',
        'if 0:\n            return self._fail(f"it does not',
    ),
    (
        "a joiner asks once whether it is known",
        "self._repeat = now + _REPEAT\n        return [Send(rank, {",
        "self._repeat = now + 1e9\n        return [Send(rank, {",
    ),
    ("joiners of before are ready for ever", "self._ready.clear()", "pass"),
    ("the last process of a number may still run", "if runs:", "if 0:"),
    ("an obstacle does not count", "if obstacle:", "if 0:"),
    (
        "a number that is in use is never refused",
        "self._early.setdefault(ticket, now) + self._doubt",
        "float('inf')",
    ),
    (
        "a loss that is not known yet is a reason to refuse",
        "setdefault(ticket, now) + self._doubt",
        "setdefault(ticket, now) - 1",
    ),
    ("the rank whose number is wanted is not watched", "return [Watch((rank,))]", "return []"),
    ("a joiner that is ready is not let in", "if is_ready:", "if 0:"),
    ("a joiner is let in before it is ready", "if is_ready:", "if is_answered:"),
    ("a joiner comes in at any object", "if request.at == at)", ")"),
    ("a joiner does not see that nobody is left", "if not is_anyone_left:", "if 0:"),
    ("a joiner asks once", "return [Ask()]  # another", "return []  # another"),
    (
        "a joiner goes on although it does not reach a rank",
        "if has_state and not unreached:",
        "if has_state:",
    ),
    ("a joiner without a state goes on", "if has_state and not unreached:", "if not unreached:"),
    (
        "a joiner asks again with its old ticket",
        "return [TakeTicket(), Ask()]\n\n    def admitted",
        "return [Ask()]\n\n    def admitted",
    ),
    ("processes join while silent ranks are left out", "can_join = not silent and", "can_join ="),
    (
        "the lowest rank is not watched",
        "return [Watch((lowest,)), LeaveToAnother()]",
        "return [LeaveToAnother()]",
    ),
    ("exchanges before the next round do not count", "self._pauses -= 1", "pass"),
    ("a joiner does not see that it is forgotten", "if is_forgotten:", "if 0:"),
]


# As above, but rounds find them: messages come in an order that histories have seldom.
ROUND_MUTANTS: list[tuple[str, str, str]] = [
    (
        "a majority of those that have not ended decides",
        "twice, size = 2 * len(ranks), len(self.membership.living)",
        "twice, size = 2 * len(ranks), len({*self.membership.living} - self._own.ended)",
    ),
    (
        "a value is accepted in an earlier ballot than the promised one",
        "if view.accepted >= own.promised and view.accepted > own.accepted:",
        "if view.accepted > own.accepted:",
    ),
    (
        "a proposer forgets what was accepted",
        "own.value = last.value if last.accepted > _NO_BALLOT else self._proposal()",
        "own.value = self._proposal()",
    ),
    (
        "a proposer takes what was accepted first",
        "last = max(promised.values(), key=lambda view: view.accepted)",
        "last = next(iter(promised.values()))",
    ),
    (
        "a proposer needs no promise",
        "if may_propose and self._is_quorum(promised.keys()):",
        "if may_propose and promised:",
    ),
    ("a proposal is a decision", "if self._is_quorum(accepted):", "if accepted:"),
]


# Defects that few histories find: as above, with such a history.
RARE_MUTANTS: list[tuple[str, str, str, str]] = [
    (
        "a joiner takes another decision for its own",
        'or Decision.from_values(message["decided"]) != self._decision',
        "",
        "25932:2:own:1:0.667/join/2/0:0.977/join/2/0:2.669/kill/0/0",
    ),
    (
        "a joiner that has waited for an answer has no time to reach all ranks",
        "min(self._unreached_since, now) if",
        "self._begin if",
        "0:7:patience:0:1.209/kill/0/0:1.228/join/0/0:6.83/kill/1/0:11.679/split/6/4.5",
    ),
    (
        "a rank that hears too few holds up the others",
        "now >= self._turn and self._may_decide(own):",
        "now >= self._turn:",
        "0:5:in-step:0:0/part/2/3:0.1/part/4/0:0.2/part/4/1:5/kill/0/0:5.1/kill/1/0",
    ),
    (
        "a rank that was declared lost while it stood still makes the group that it had decided on",
        'if self.state not in ("in a round", "decided") or',
        'if self.state != "in a round" or',
        "1000790141:2:in-step:1:0.218/join/2/0:2.681/join/2/0:4.117/join/2/0:4.133/pause/0/7:4.224/join/2/1",
    ),
    (
        "a rank that has missed a decision waits for it",
        'if "decided" in message and message["epoch"] > epoch and',
        "if 0 and",
        "579:5:patience:0:0/part/1/2:4.55/pause/2/3.9:6.97/kill/4/0",
    ),
    (
        "a joiner is in although nobody has said that it knows that",
        "if not self._sure:",
        "if 0:",
        "24:3:in-step:1:0.3/join/3/0:0.35/join/4/0:1.38/pause/2/1:1.67/fall/2/0:1.7/fall/0/5:1.8/kill/1/7",
    ),
]


def mutant_of(old: str, new: str) -> Any:
    """Returns the module of the protocol with another text."""
    path = Path(protocol.__file__)
    source = path.read_text()
    assert source.count(old) == 1, f"{old!r} is in {path.name} {source.count(old)} times"
    module = types.ModuleType("fogdist.elastic.mutant")
    sys.modules[module.__name__] = module  # where dataclasses look
    exec(compile(source.replace(old, new), str(path), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(
    ("old", "new"), [mutant[1:] for mutant in MUTANTS], ids=[mutant[0] for mutant in MUTANTS]
)
def test_mutants_are_found(old: str, new: str) -> None:
    assert first_failure((*LATE_SEEDS, *range(MUTANT_HISTORIES)), mutant_of(old, new)) is not None


@pytest.mark.parametrize(
    ("old", "new"), [mutant[1:] for mutant in ROUND_MUTANTS], ids=[mutant[0] for mutant in ROUND_MUTANTS]
)
def test_mutants_are_found_by_rounds(old: str, new: str) -> None:
    mutant = mutant_of(old, new)
    assert any(violation_of_round(seed, mutant) for seed in range(MUTANT_ROUNDS))


@pytest.mark.parametrize(
    ("old", "new", "history"),
    [mutant[1:] for mutant in RARE_MUTANTS],
    ids=[mutant[0] for mutant in RARE_MUTANTS],
)
def test_rare_mutants_are_found(old: str, new: str, history: str) -> None:
    assert violation_of(History.of_text(history), mutant_of(old, new))
    assert not violation_of(History.of_text(history))


# What machines do: the machine, its state, the event, the next state, and whether there are actions.
TRANSITIONS = """
    Member: settled -agree-> in a round !
    Member: settled -asked-> settled
    Member: settled -asked-> settled !
    Member: settled -exchange-> settled
    Member: settled -exchange-> settled !
    Member: settled -formed-> settled
    Member: settled -lost-> settled
    Member: settled -polled-> settled
    Member: settled -polled-> settled !
    Member: in a round -lost-> in a round
    Member: in a round -lost-> in a round !
    Member: in a round -expelled-> out !
    Member: in a round -receive-> in a round
    Member: in a round -receive-> in a round !
    Member: in a round -receive-> decided !
    Member: in a round -receive decided-> decided !
    Member: in a round -receive decided-> out !
    Member: in a round -tick-> in a round !
    Member: in a round -tick-> decided !
    Member: in a round -tick-> settled !
    Member: decided -formed-> settled
    Joiner: asking -start-> asking !
    Joiner: asking -sampled-> asking !
    Joiner: asking -sampled-> out !
    Joiner: asking -refused-> out !
    Joiner: asking -loaded-> asking !
    Joiner: asking -loaded-> ready
    Joiner: asking -loaded-> out !
    Joiner: ready -sampled-> ready !
    Joiner: ready -sampled-> out !
    Joiner: ready -refused-> out !
    Joiner: ready -admitted-> admitted !
    Joiner: admitted -receive decided-> admitted
    Joiner: admitted -lost-> admitted
    Joiner: admitted -tick-> admitted !
    Joiner: admitted -tick-> in
    Joiner: admitted -tick-> out !
"""


def test_no_history_breaks_a_promise() -> None:
    """And together they make all transitions of the machines."""
    coverage: Counter[Any] = Counter()
    end = time.monotonic() + SECONDS if ALL else float("inf")
    seeds = itertools.takewhile(
        lambda _: time.monotonic() < end, itertools.count() if ALL else range(HISTORIES)
    )
    failure = first_failure(seeds, coverage=coverage)
    if failure is not None:
        small = shrunk(failure)
        pytest.fail(f"{violation_of(failure)}; {command(small)}: {violation_of(small)}")
    made = {
        f"{machine}: {before} -{event}-> {after}{' !' if kinds else ''}"
        for machine, before, event, after, kinds in coverage
    }
    assert {line.strip() for line in TRANSITIONS.strip().splitlines()} - made == set()


def test_no_round_has_two_decisions() -> None:
    failures = ((seed, violation_of_round(seed)) for seed in range(ROUNDS))
    assert next((failure for failure in failures if failure[1]), None) is None


def test_a_failure_is_shrunk_and_replayed() -> None:
    """Of a mutant that lets the farthest rank go back: one fault is enough, and the command has all of it."""
    mutant = mutant_of('max(report["completed"], numbers', 'min(report["completed"], numbers')
    failure = first_failure(range(100), mutant)
    assert failure is not None
    small = shrunk(failure, mutant)
    assert len(small.faults) == 1 and "goes back" in violation_of(small, mutant)
    text = command(small).partition("--replay ")[2].rstrip('"')
    assert History.of_text(text) == small
    lines: list[str] = []
    with pytest.raises(histories.Violation, match="goes back"):
        World(small, mutant, report=lines.append).run()
    assert any("agree" in line for line in lines)
