"""Who is a member: the protocol of ranks that are lost and of processes that join, without input and output.

A `Member` is a rank of a group, a `Joiner` a process that wants to become one. Their driver calls a method for each event:
a message, a loss that the system has reported, a call of the program, the time. Then it does what the actions say that
the method returns, in their order. Nothing here waits, sends or reads a clock: real processes (`fogdist.elastic.membership`)
and the histories of tests drive the same code.

The ranks of an epoch decide on the next one by Paxos, in an agreement round: each is a proposer and an acceptor. Messages
may be lost, repeated, delayed and reordered. A message is a dict of values of JSON with the `epoch` that is decided, and
either what its sender knows (`_View`), or what is `decided`; None if nothing changes. A rank that knows a decision is asked
by each message of that epoch or an earlier one; its carrier answers with the last decision, whatever the program does.

A *quorum* is a majority of the ranks of the epoch, in which those that have ended count too; of two halves, the one with
the lowest rank that did not join with the epoch. Or it is all ranks that have not ended, if each of them knows that
the others have. An end is what the system has reported. A rank that is *silent* may go on where nobody hears it, and never
counts as ended in the epoch. From a rank that has ended no message counts any more, as it may be older than its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# What a rank tells of its objects, by name (`Participant.report`).
Objects = dict[str, dict[str, Any]]
Message = dict[str, Any]

# A ballot: its number, and the rank that proposes in it.
Ballot = tuple[int, int]
_NO_BALLOT = (0, -1)

# Messages are repeated after this time, in seconds. A rank proposes when nothing was decided for a multiple of the second.
_REPEAT = 0.25
_TURN = 0.5
# Where messages go in one direction only, ranks notice it one by one: while they tell different things, the first proposal
# waits so long for the last of them.
_SETTLE = 2.0
# A round to let a process in that has to be postponed is repeated after 2, 4, 8 ... exchanges, and at most so many.
_MOST_PAUSES = 64


@dataclass(frozen=True)
class Membership:
    """The ranks of a group that take part, by their numbers in the group that they began with.

    Attributes:
        epoch: How many times the ranks have agreed on a loss, or on a process that joins.
        living: The ranks that take part, ascending.
        lost: The others: they were lost, or have left. A process that joins takes the number of one of them, or a new one.
    """

    epoch: int
    living: tuple[int, ...]
    lost: frozenset[int]


@dataclass(frozen=True)
class Request:
    """What a joiner tells.

    Attributes:
        ticket: Its ticket.
        rank: The rank that it takes.
        entry: How to connect with it.
        objects: The names of its objects, ascending.
        at: The name of the object at whose next exchange it comes in.
        nonce: The joiner's random number, for proofs that the ranks know the job's secret.
        challenge: The random number of the rank that answered when the joiner asked.
    """

    ticket: int
    rank: int
    entry: str
    objects: tuple[str, ...]
    at: str
    nonce: str
    challenge: str

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Request:
        """Returns the request with these fields, as JSON has them."""
        return cls(**{**values, "objects": tuple(values["objects"])})


@dataclass(frozen=True)
class Decision:
    """What an agreement round has decided.

    Attributes:
        living: What each rank that is left has told of its objects.
        joins: The processes that join, by rank.
        silent: The ranks that are left out although nobody has reported their end, ascending.
    """

    living: dict[int, Objects]
    joins: dict[int, Request]
    silent: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the next epoch, ascending."""
        return tuple(sorted({*self.living, *self.joins}))

    @property
    def numbers(self) -> dict[str, int]:
        """The number of the exchange at which all go on, by object."""
        numbers: dict[str, int] = {}
        for objects in self.living.values():
            for name, report in objects.items():
                numbers[name] = max(report["completed"], numbers.get(name, 0))
        return numbers

    def report_of(self, name: str) -> dict[str, Any] | None:
        """Returns what a rank that is at this exchange has told of an object; None if no rank has it."""
        reports = [objects[name] for objects in self.living.values() if name in objects]
        return max(reports, key=lambda report: (report["completed"], report["first"]), default=None)

    def to_values(self) -> dict[str, Any]:
        """Returns it as values of JSON."""
        joins = {rank: asdict(join) for rank, join in self.joins.items()}
        return {"living": self.living, "joins": joins, "silent": self.silent}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Decision:
        """Returns what `to_values` has described."""
        return cls(
            {int(rank): objects for rank, objects in values["living"].items()},
            {int(rank): Request.from_values(join) for rank, join in values["joins"].items()},
            tuple(values["silent"]),
        )


# --- what a driver is told to do ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Give a message for a rank to the carrier."""

    to: int
    message: Message


@dataclass(frozen=True)
class Watch:
    """Find out whether these ranks have ended, up to the next event."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """Let in those that join, and make the group of an epoch the present one; then call `Member.formed`."""

    epoch: int
    decision: Decision

    @property
    def name(self) -> str:
        """The name of the group, the same on all its ranks and that of no other epoch."""
        return f"epoch {self.epoch}"


@dataclass(frozen=True)
class Fail:
    """Raise an error in the call of the program; without a reason that for which it has come."""

    reason: str | None


@dataclass(frozen=True)
class Poll:
    """Read what joiners ask: call `Member.asked` for each, and then `Member.polled`."""


@dataclass(frozen=True)
class LeaveToAnother:
    """Drop what was prepared for joiners, because another rank answers them."""


@dataclass(frozen=True)
class Give:
    """Copy the state of this rank for a joiner."""

    request: Request


@dataclass(frozen=True)
class Refuse:
    """Tell a joiner why it cannot join."""

    ticket: int
    reason: str


@dataclass(frozen=True)
class Meet:
    """End all exchanges of the group, and call `Member.agree` with these requests."""

    joins: tuple[Request, ...]


@dataclass(frozen=True)
class TakeTicket:
    """Leave the ticket, if there is one, and take a new one."""


@dataclass(frozen=True)
class Ask:
    """Draw the attention of all ranks, and tell the one that answers what this process asks, unless it has been told."""


Action = Send | Watch | Form | Fail | Poll | LeaveToAnother | Give | Refuse | Meet | TakeTicket | Ask


# --- a rank ---------------------------------------------------------------------------------------------------


@dataclass
class _View:
    """What a rank has told in a round; it only grows.

    Attributes:
        objects: What it tells of its objects.
        joins: Processes that are ready to join, by rank.
        ended: The ranks that have ended: nothing of theirs counts any more.
        silent: The ranks that it does not hear, and that may go on.
        heard: The ranks from which it has a message of this round.
        promised: It takes part in no earlier ballot.
        accepted: The last ballot whose value it has accepted.
        value: This value.
    """

    objects: Objects = field(default_factory=dict)
    joins: dict[int, Request] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    heard: set[int] = field(default_factory=set)
    promised: Ballot = _NO_BALLOT
    accepted: Ballot = _NO_BALLOT
    value: Any = None

    def to_values(self) -> dict[str, Any]:
        """Returns it as values of JSON."""
        values: dict[str, Any] = {name: sorted(getattr(self, name)) for name in ("ended", "silent", "heard")}
        values |= {"objects": self.objects, "joins": [asdict(join) for join in self.joins.values()]}
        return values | {"promised": self.promised, "accepted": self.accepted, "value": self.value}

    def merge(self, values: Mapping[str, Any]) -> None:
        """Adds what a message tells, which may be older than what is known."""
        for name in ("ended", "silent", "heard"):
            getattr(self, name).update(values[name])
        self.objects = values["objects"]
        for join in map(Request.from_values, values["joins"]):
            self.joins[join.rank] = join
        self.promised = max(self.promised, _ballot(values["promised"]))
        if _ballot(values["accepted"]) > self.accepted:
            self.accepted, self.value = _ballot(values["accepted"]), values["value"]


def _ballot(values: Sequence[int]) -> Ballot:
    number, rank = values
    return number, rank


class Member:
    """A rank of a group, through all losses and joins.

    Args:
        rank: Its number.
        size: With how many ranks the group began.
        timeout: For how long the ranks wait for each other, in seconds.
        doubt: How long a rank may be gone before that is known, in seconds.

    Attributes:
        membership: The last that the ranks agreed on.
        state: "settled", "in a round", "decided" (the next group is not there yet) or "out" (declared lost).
        waits: Whether the next exchange must poll for joiners, although nothing has happened.
    """

    def __init__(self, rank: int, size: int, timeout: float, doubt: float) -> None:
        self.rank = rank
        self.membership = Membership(0, tuple(range(size)), frozenset())
        self.state = "settled"
        self.waits = False
        self._size, self._timeout, self._doubt = size, timeout, doubt
        # The lowest rank of the epoch that did not join with it: its half of the ranks is a quorum.
        self._first = 0
        # What each rank has told for the next epoch; an acceptor must not forget it within the epoch.
        self._own = _View()
        self._views = {rank: self._own}
        self._mutual = set[int]()  # ranks of this host that take this one for lost, as it does them
        self._later: dict[int, Message] = {}  # of the ranks that are in a later round already
        self._has_no_change = False  # that is the decision of this epoch
        self._failure, self._deadline, self._has_called = "", 0.0, False
        # When this rank looked at the time last, repeats its messages, and proposes: None before all have come.
        self._looked = self._repeat = 0.0
        self._turn: float | None = None
        # Who is silent, and whether ranks tell different things, as of the turn; and who was when the ballot began.
        self._left_out: tuple[set[int], bool] = set(), False
        self._without = set[int]()
        self._stood_still = False
        # Joiners that are ready, of several for one rank the first, and when those that may be too early were first seen.
        self._ready: dict[int, Request] = {}
        self._early: dict[int, float] = {}
        self._closed_until = float("-inf")
        # Rounds in a row that let nobody in, and exchanges before the next one.
        self._postponed = self._pauses = 0

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks of this epoch that are not known to be gone, ascending."""
        gone = self._own.ended | self._own.silent
        return tuple(rank for rank in self.membership.living if rank not in gone)

    def lost(self, ended: Collection[int], silent: Collection[int] = ()) -> list[Action]:
        """The system has reported that ranks of this epoch are lost; it may tell the same again.

        Args:
            ended: Those that have ended, or have left.
            silent: Those that may go on: nothing comes from them.
        """
        before = self.living
        self._own.silent.update(set(silent) - self._own.ended)
        self._own.ended.update(set(ended) - self._own.silent)
        if self.state != "in a round" or self.living == before:
            return []
        return self._tell(self.living) + self._advance()

    def expelled(self, by: int, is_mutual: bool) -> list[Fail]:
        """Another rank of this host counts this one as lost, which is as good as its end: it relies on that.

        So this is also called before the group of a decision is made: this rank may have stood still since it has decided.

        Args:
            by: That rank.
            is_mutual: Whether this rank itself counts that one as lost, whose process may go on. Of the two, the lower one
                does. That others have told it is not enough: the other rank does not know that.
        """
        if is_mutual:
            self._mutual.add(by)
        if self.state not in ("in a round", "decided") or (by in self._mutual and self.rank < by):
            return []
        self.state = "out"
        return [Fail(f"this rank {self.rank} was declared lost by rank {by}, and takes no part any more")]

    def agree(
        self, now: float, objects: Objects, failure: str, joins: Sequence[Request] = ()
    ) -> list[Action]:
        """The program comes to an agreement round, after its group has failed or to let processes in.

        Args:
            now: The time.
            objects: What this rank tells of its objects.
            failure: Why it comes.
            joins: Processes that are ready to join.
        """
        if self._has_no_change:  # each time that the ranks come to this round
            return [Fail(None)]
        self.state = "in a round"
        own = self._own
        own.objects, own.joins = objects, {join.rank: join for join in joins}
        self._failure, self._deadline = failure, now + self._timeout
        self._has_called, self._turn, self._stood_still = bool(joins), None, False
        self._looked, self._repeat = now, now + _REPEAT
        later, self._later = self._later, {}
        actions = self._tell(self.living)
        for sender, message in later.items():
            actions += self.receive(sender, message)
        return actions

    def receive(self, sender: int, message: Message) -> list[Action]:
        """A message has come. The carrier has answered those of earlier epochs."""
        own, epoch = self._own, self.membership.epoch + 1
        if "decided" in message and message["epoch"] > epoch and self.state == "in a round":
            return self._is_out(message["epoch"])
        if message["epoch"] > epoch or (self.state != "in a round" and message["epoch"] == epoch):
            self._later[sender] = message  # one of each rank, as they are repeated
            return []
        if self.state != "in a round" or sender in own.ended or sender not in self.membership.living:
            return []
        if message["epoch"] < epoch or "asks" in message:
            return []
        if "decided" in message:
            return self._decided(message["decided"])
        view = self._views.setdefault(sender, _View())
        view.merge(message)
        own.ended |= view.ended - own.silent - {self.rank}
        own.heard.add(sender)
        before = own.promised, own.accepted
        if view.accepted >= own.promised and view.accepted > own.accepted:
            own.promised, own.accepted, own.value = view.accepted, view.accepted, view.value
        own.promised = max(own.promised, view.promised)
        actions = []
        if (own.promised, own.accepted) != before:
            self._wait_for_turn(self._looked)
            actions += self._tell([own.promised[1]])
        elif self.rank not in message["heard"] or view.promised < own.promised:
            actions += self._tell([sender])
        return actions + self._advance()

    def tick(self, now: float) -> list[Action]:
        """Time has passed, and all messages that were there have come."""
        if self.state != "in a round":
            return []
        own, members = self._own, self.membership.living
        if now > self._looked + self._doubt:  # the others may have gone on without this rank
            self._stood_still = True
        self._looked = now
        silent = self._silent()
        missing = [rank for rank in members if rank not in self._views.keys() | own.ended | silent]
        if self._is_cut_off():
            reach = self._reach()
            if self._is_majority(reach):  # through others, of which none hears enough either
                reach = {*self.living}
            return self._fail(
                f"this rank {self.rank} does not hear the ranks {sorted({*members} - reach - own.ended)}, which may go on "
                f"without it: with it there are {len(reach)} of {len(members)} ranks, too few to go on; after: {self._failure}"
            )
        if now >= self._deadline:
            return self._fail(
                f"the ranks {missing} of the group did not come within {self._timeout:g} s to agree on who is left, "
                f"after: {self._failure}"
                if missing
                else f"the ranks of the group did not agree within {self._timeout:g} s on who is left: of "
                f"{len(members)} ranks, this rank {self.rank} hears {sorted(own.heard)}; after: {self._failure}"
            )
        left_out = silent, self._is_disputed(silent)
        if missing:
            self._turn = None
        elif self._turn is None or left_out != self._left_out:
            self._left_out = left_out
            self._turn = now + _TURN * self._place() + (_SETTLE if left_out[1] else 0.0)
        actions: list[Action] = [Watch(tuple(rank for rank in self.living if rank != self.rank))]
        if self._turn is not None and now >= self._turn and self._may_decide(own):
            number = max(view.promised[0] for view in self._views.values()) + 1
            own.promised, self._without = (number, self.rank), silent
            self._wait_for_turn(now)
            actions += self._tell(self.living)
            actions += self._advance()
        elif now >= self._repeat:
            actions += self._tell(self.living)
        if now >= self._repeat:
            self._repeat = now + _REPEAT
        return actions

    def _tell(self, ranks: Collection[int]) -> list[Action]:
        """Tells ranks what this one knows."""
        message = {"epoch": self.membership.epoch + 1, **self._own.to_values()}
        return [Send(rank, message) for rank in ranks if rank != self.rank]

    def _fail(self, reason: str) -> list[Action]:
        self.state = "settled"
        return [Fail(reason)]

    def _came(self) -> dict[int, _View]:
        """Returns what the ranks have told that have come, and have not ended."""
        return {rank: view for rank, view in self._views.items() if rank not in self._own.ended}

    def _silent(self) -> set[int]:
        """Returns the ranks to leave out because ranks that stay do not hear them: first those that most do not hear."""
        views, silent = self._came(), set[int]()
        while True:
            silences = [
                rank for teller, view in views.items() if teller not in silent for rank in view.silent
            ]
            counts = {rank: silences.count(rank) for rank in {*silences} - silent - self._own.ended}
            if not counts:
                return silent
            silent.add(max(counts, key=lambda rank: (counts[rank], rank)))

    def _is_disputed(self, silent: set[int]) -> bool:
        """Returns whether ranks have come that are to be left out, or ranks that stay do not hear others than these."""
        views = self._came()
        return not silent.isdisjoint(views) or any(
            (view.silent | view.ended) - self._own.ended != silent
            for rank, view in views.items()
            if rank not in silent
        )

    def _reach(self) -> set[int]:
        """Returns the ranks that can agree with this one: it hears them, or one does that it hears."""
        own, views = self._own, self._came()
        gone = [view.silent | view.ended for rank, view in views.items() if rank not in own.silent]
        return set(self.membership.living).difference(own.ended, gone[0].intersection(*gone))

    def _is_cut_off(self) -> bool:
        """Returns whether there is no quorum, whatever comes: all that this rank hears have come."""
        if self._is_majority(self.living) or any(rank not in self._views for rank in self.living):
            return False
        heard = [view for rank, view in self._came().items() if rank not in self._own.silent]
        if not any(map(self._may_decide, heard)):  # nobody proposes; who decides hears this rank
            return True
        # Who may propose does not know of all ends yet, or has seen end what this rank takes for silent; or this one stood
        # still.
        reach = self._reach()
        may_all = reach | self._own.ended >= {*self.membership.living}
        return not self._is_majority(reach) and (not may_all or (self._stood_still and len(reach) == 1))

    def _may_decide(self, view: _View) -> bool:
        """Returns whether those that a rank hears, which has told this, are a quorum; no other ballot is ever accepted."""
        return self._is_majority({*self.membership.living} - view.silent - view.ended) or not view.silent

    def _is_majority(self, ranks: Collection[int]) -> bool:
        twice, size = 2 * len(ranks), len(self.membership.living)
        return twice > size or (twice == size and self._first in ranks)

    def _is_quorum(self, ranks: Collection[int]) -> bool:
        """Returns whether these ranks, which have told the same, decide."""
        if self._is_majority(ranks):
            return True
        ended = {each for each in self._own.ended if all(each in self._views[rank].ended for rank in ranks)}
        return not self._stood_still and {*ranks} | ended >= {*self.membership.living}

    def _place(self) -> int:
        """Returns which rank this one is of those that may propose; the first does so at once."""
        stay = sorted(self._came().keys() - self._silent())
        return stay.index(self.rank) if self.rank in stay else len(self.membership.living)

    def _wait_for_turn(self, now: float) -> None:
        """Leaves a proposer time, more after each ballot, before this rank proposes."""
        if self._turn is not None:
            self._turn = now + _TURN * self._own.promised[0] * (1 + self._place())

    def _advance(self) -> list[Action]:
        """Goes on with the ballot in which this rank proposes, and learns what is decided."""
        own, ballot, actions = self._own, self._own.promised, list[Action]()
        views = self._came()
        if ballot[1] == self.rank and own.accepted != ballot:
            promised = {rank: view for rank, view in views.items() if view.promised == ballot}
            last = max(promised.values(), key=lambda view: view.accepted)
            # Ranks may have come, or have told more, since the ballot began: the next one is for what they tell now.
            may_propose = last.accepted > _NO_BALLOT or self._silent() == self._without
            if may_propose and self._is_quorum(promised.keys()):
                own.value = last.value if last.accepted > _NO_BALLOT else self._proposal()
                own.accepted = ballot
                actions += self._tell(self.living)
        accepted = {rank for rank, view in views.items() if view.accepted == own.accepted > _NO_BALLOT}
        if self._is_quorum(accepted):
            actions += self._decided(own.value)
        return actions

    def _proposal(self) -> Any:
        silent = self._silent()
        views = {rank: view for rank, view in sorted(self._came().items()) if rank not in silent}
        joins = {join.rank: join for view in views.values() for join in view.joins.values()}
        objects = {rank: view.objects for rank, view in views.items()}
        decision = decide(self.membership.living, objects, tuple(sorted(silent)), joins)
        return None if decision is None else decision.to_values()

    def _decided(self, values: Mapping[str, Any] | None) -> list[Action]:
        epoch = self.membership.epoch + 1
        told = {"epoch": epoch, "decided": values}
        actions: list[Action] = [Send(rank, told) for rank in self.living if rank != self.rank]
        if values is None:
            self.state, self._has_no_change = "settled", True
            return [*actions, Fail(None)]
        decision = Decision.from_values(values)
        if self.rank not in decision.living:
            return actions + self._is_out(epoch)
        if decision.joins:
            self._postponed = 0
        elif self._has_called:  # the ranks were in exchanges of different objects
            self.waits = True
            self._postponed += 1
            self._pauses = min(2**self._postponed, _MOST_PAUSES)
        self.state = "decided"
        return [*actions, Form(epoch, decision)]

    def _is_out(self, epoch: int) -> list[Action]:
        self.state = "out"
        return [Fail(f"this rank {self.rank} was declared lost in epoch {epoch}, and takes no part any more")]

    def formed(self, now: float, form: Form) -> None:
        """The group of a decision is the present one."""
        living, before = form.decision.members, self.membership
        # The last rank may be gone that has had a new number.
        numbers = frozenset((*range(max(self._size, living[-1] + 1)), *before.living, *before.lost))
        self.membership = Membership(form.epoch, living, numbers.difference(living))
        self.state, self._first = "settled", min(form.decision.living)
        self._own = _View()
        self._views = {self.rank: self._own}
        self._mutual.clear()
        if form.decision.silent:
            # By then they have noticed that too. Nobody else must join before: if the ranks of this epoch ended, they might
            # go on with what is left of the last one.
            self._closed_until = now + self._doubt

    # --- processes that join ---

    def exchange(self, now: float) -> list[Action]:
        """The program begins an exchange, and something has happened since the last one.

        The lowest rank answers joiners. Ranks that go at their own pace may not have agreed since a rank was lost, so that
        one does not count.
        """
        lowest = self.living[0]
        if lowest != self.rank:
            self.waits = False
            return [Watch((lowest,)), LeaveToAnother()]  # if it is lost, this rank may be the next to answer
        if now < self._closed_until:
            self.waits = True
            return []
        if self._pauses:
            self._pauses -= 1
            return []
        self.waits = False
        self._ready.clear()
        return [Poll()]

    def asked(
        self, now: float, request: Request, obstacle: str, *, runs: bool, is_ready: bool, is_answered: bool
    ) -> list[Action]:
        """A joiner asks this rank.

        Args:
            now: The time.
            request: What it tells.
            obstacle: Why it cannot join whoever is a member; "" if it can.
            runs: Whether the last process with its number is seen to run.
            is_ready: Whether it has loaded the state.
            is_answered: Whether it was given one.
        """
        ticket, rank = request.ticket, request.rank
        still_runs = Refuse(
            ticket, f"rank {rank} still runs; a process takes the number of a rank that is gone"
        )
        if obstacle:
            return [Refuse(ticket, obstacle)]
        if runs:
            return [still_runs]
        if rank in self.living:
            # It may have ended just now. Of a rank of another host, this shows when nothing comes from there.
            if rank == self.rank or now > self._early.setdefault(ticket, now) + self._doubt:
                return [still_runs]
            self.waits = True
            return [Watch((rank,))]
        if is_ready:
            self._ready.setdefault(rank, request)
        elif not is_answered:
            return [Watch(self.living[1:]), Give(request)]  # it must reach all of them
        return []

    def polled(self, at: str) -> list[Action]:
        """All that joiners ask is known, at an exchange of the object `at`."""
        joins = tuple(request for request in self._ready.values() if request.at == at)
        if len(joins) < len(self._ready):
            self.waits = True
        return [Meet(joins)] if joins else []


def decide(
    before: Sequence[int],
    living: dict[int, Objects],
    silent: tuple[int, ...],
    joins: Mapping[int, Request],
) -> Decision | None:
    """Returns what a rank proposes; None if nothing changes.

    Args:
        before: The ranks of the present epoch.
        living: What each rank that is left has told of its objects.
        silent: The ranks that are left out without an end.
        joins: The processes that are ready to join, by rank.
    """
    if len(living) == len(before) and not joins:
        return None
    # A rank within an exchange of another participant would wait there for the process that joins.
    busy = {
        name
        for objects in living.values()
        for name, report in objects.items()
        if report["taken"] > report["completed"]
    }
    free = {rank: join for rank, join in joins.items() if rank not in living}
    can_join = not silent and busy <= {join.at for join in free.values()}
    return Decision(living, free if can_join else {}, silent)


# --- a process that joins -------------------------------------------------------------------------------------


class Joiner:
    """A process that joins a job.

    Args:
        rank: Its rank there.
        timeout: For how long it waits for an answer, in seconds.
        reach: For how long it tries to reach all ranks, in seconds.

    Attributes:
        state: "asking", "ready" to take part (it waits for the decision), "admitted" (it waits until all ranks that are left
            know the decision), "in", or "out".
    """

    def __init__(self, rank: int, timeout: float, reach: float) -> None:
        self.state = "asking"
        self._rank, self._timeout, self._reach = rank, timeout, reach
        self._begin = self._asked = self._repeat = 0.0
        self._unreached_since = float("inf")
        # The decision by which it joins, the ranks that may not know it yet, and those that have said that they do.
        self._epoch, self._decision = 0, Decision({}, {})
        self._unsure, self._sure = set[int](), set[int]()

    def start(self, now: float) -> list[Action]:
        """The program comes to its first exchange."""
        self._begin = self._asked = now
        return [TakeTicket(), Ask()]

    def sampled(self, now: float, *, is_anyone_left: bool, is_forgotten: bool) -> list[Action]:
        """Some time has passed, while it waits for an answer or its admission.

        Args:
            now: The time.
            is_anyone_left: Whether a rank of the job runs, as far as that is known.
            is_forgotten: Whether its ticket is over, without a word to it.
        """
        if not is_anyone_left:
            return self._fail("no rank of the job is left")
        if is_forgotten:
            return self._fail(
                "the rank that answers has taken it for ended, because the connection between them broke"
            )
        if now >= self._asked + self._timeout:
            self.state = "out"
            return [
                Fail(
                    f"this process, which wants to join the job as rank {self._rank}, had no answer within "
                    f"{self._timeout:g} s: ranks answer when they begin an exchange"
                )
            ]
        return [Ask()]  # another rank may have become the one that answers

    def refused(self, reason: str) -> list[Action]:
        """A rank has refused it."""
        self.state = "out"
        return [Fail(f"this process, which wants to join the job as rank {self._rank}, is refused: {reason}")]

    def loaded(self, now: float, has_state: bool, unreached: str, failure: str) -> list[Action]:
        """It has tried to load the state and to reach all ranks.

        Args:
            now: The time.
            has_state: Whether the state has come.
            unreached: Which ranks have not heard it, "" if all have.
            failure: Why no state has come at last.
        """
        if has_state and not unreached:
            self.state, self._asked = "ready", now
            return []
        self._unreached_since = min(self._unreached_since, now) if unreached else float("inf")
        if unreached and now >= self._unreached_since + self._reach:
            return self._fail(f"it does not reach {unreached} over TCP")
        if not unreached and now >= self._begin + self._timeout:
            return self._fail(f"no state came within {self._timeout:g} s; {failure}")
        # Ranks may be lost meanwhile, so those that have not answered are asked for anew.
        self._asked = now
        return [TakeTicket(), Ask()]

    def admitted(self, now: float, epoch: int, decision: Decision) -> list[Action]:
        """A rank has told it the decision with which it joins.

        A majority of the ranks has made that, and may have ended since. If it was not known to the others, these have decided
        anew. So each rank that is left must say that it knows this decision, and there must be one.
        """
        self.state, self._epoch, self._decision = "admitted", epoch, decision
        self._unsure = set(decision.living)
        self._asked = self._repeat = now
        return self.tick(now)

    def receive(self, sender: int, message: Message) -> list[Action]:
        """A message has come."""
        if self.state != "admitted" or "decided" not in message or message["epoch"] < self._epoch:
            return []
        if message["epoch"] > self._epoch or Decision.from_values(message["decided"]) != self._decision:
            return self._fail("the others have gone on without it")
        if sender in self._unsure:
            self._unsure.discard(sender)
            self._sure.add(sender)
        return []

    def lost(self, ended: Collection[int]) -> list[Action]:
        """The system has reported that ranks have ended."""
        self._unsure -= set(ended)
        self._sure -= set(ended)
        return []

    def tick(self, now: float) -> list[Action]:
        """Time has passed, and all messages that were there have come."""
        if self.state != "admitted":
            return []
        if not self._unsure:
            if not self._sure:
                return self._fail("all ranks that let it in have ended")
            self.state = "in"
            return []
        if now >= self._asked + self._reach:
            return self._fail(f"it does not hear the ranks {sorted(self._unsure)}")
        if now < self._repeat:
            return []
        self._repeat = now + _REPEAT
        return [Send(rank, {"epoch": self._epoch, "asks": True}) for rank in sorted(self._unsure)]

    def _fail(self, reason: str) -> list[Action]:
        self.state = "out"
        return [Fail(f"this process cannot join the job as rank {self._rank}: {reason}")]
