"""Who is a member: the protocol of ranks that are lost and of processes that join, without input and output.

A `Member` is a rank of a group, a `Joiner` a process that wants to become one. Their driver calls a method for each event:
a message, a loss that the system has reported, a call of the program, the time. Then it does what the actions say that
the method returns, in their order. Nothing here waits, sends or reads a clock: real processes (`fogdist.elastic.membership`)
and the histories of tests drive the same code.

Members exchange messages in agreement rounds, one for each epoch. A message is a dict of values of JSON:

- `came`: a rank takes part; what it tells of its `objects`.
- `gone`: a rank is lost or has left, and `by` whom that is told.
- `joins`: the request of a process that is ready to join.
- `decided`: the decision that its sender proposes; None if nothing changes.

The carrier delivers all messages of a round to each rank that takes part, in one order. So the first proposal in that
order is the decision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# What a rank tells of its objects, by name (`Participant.report`).
Objects = dict[str, dict[str, Any]]
Message = dict[str, Any]

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
    """

    living: dict[int, Objects]
    joins: dict[int, Request]

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
        return {"living": self.living, "joins": {rank: asdict(join) for rank, join in self.joins.items()}}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Decision:
        """Returns what `to_values` has described."""
        return cls(
            {int(rank): objects for rank, objects in values["living"].items()},
            {int(rank): Request.from_values(join) for rank, join in values["joins"].items()},
        )


# --- what a driver is told to do ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Give a message to the carrier of the present round."""

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
        # The ranks of the epoch that are known to be gone: to this rank, and to those that have told it in the round.
        self._gone: set[int] = set()
        self._told: set[int] = set()
        self._came: dict[int, Objects] = {}
        self._joins: dict[int, Request] = {}
        self._failure, self._deadline, self._has_proposed, self._has_called = "", 0.0, False, False
        # Joiners that are ready, of several for one rank the first, and when those that may be too early were first seen.
        self._ready: dict[int, Request] = {}
        self._early: dict[int, float] = {}
        # Rounds in a row that let nobody in, and exchanges before the next one.
        self._postponed = self._pauses = 0

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks of this epoch that are not known to be gone, ascending."""
        return tuple(rank for rank in self.membership.living if rank not in self._gone)

    def lost(self, ranks: Collection[int]) -> list[Action]:
        """The system has reported that ranks of this epoch are lost, or have left; it may tell the same again."""
        new = sorted(set(ranks) - self._gone)
        self._gone.update(new)
        return [Send({"gone": rank, "by": self.rank}) for rank in new] if self.state == "in a round" else []

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
        self.state = "in a round"
        self._came, self._told, self._joins = {}, set(), {}
        self._failure, self._deadline = failure, now + self._timeout
        self._has_proposed, self._has_called = False, bool(joins)
        # That it has come is the last that it tells: others may decide from then on.
        messages: list[Message] = [{"gone": rank, "by": self.rank} for rank in sorted(self._gone)]
        messages += [{"joins": asdict(join)} for join in joins]
        return [Send(message) for message in (*messages, {"came": self.rank, "objects": objects})]

    def receive(self, message: Message) -> list[Action]:
        """A message of the present round has come."""
        if self.state != "in a round":
            return []
        if "decided" in message:
            return self._decided(message["decided"])
        if "came" in message:
            self._came[message["came"]] = message["objects"]
        elif "joins" in message:
            request = Request.from_values(message["joins"])
            self._joins[request.rank] = request
        # Of two ranks that take each other for lost, the first to tell it goes on.
        elif message["by"] not in self._told:
            self._told.add(message["gone"])
        return []

    def tick(self, now: float) -> list[Action]:
        """Time has passed, and all messages that were there have come."""
        if self.state != "in a round" or self._has_proposed:
            return []
        known = self._came.keys() | self._told
        missing = tuple(rank for rank in self.membership.living if rank not in known)
        if not missing:
            self._has_proposed = True
            decision = decide(self.membership.living, self._came, self._told, self._joins)
            return [Send({"decided": None if decision is None else decision.to_values()})]
        if now >= self._deadline:
            self.state = "settled"
            return [
                Fail(
                    f"the ranks {list(missing)} of the group did not come within {self._timeout:g} s to agree on who is "
                    f"left, after: {self._failure}"
                )
            ]
        return [Watch(missing)]

    def _decided(self, values: Mapping[str, Any] | None) -> list[Action]:
        if values is None:  # each time that the ranks come to this round
            self.state = "settled"
            return [Fail(None)]
        decision, epoch = Decision.from_values(values), self.membership.epoch + 1
        if self.rank not in decision.living:
            self.state = "out"
            return [
                Fail(f"this rank {self.rank} was declared lost in epoch {epoch}, and takes no part any more")
            ]
        if decision.joins:
            self._postponed = 0
        elif self._has_called:  # the ranks were in exchanges of different objects
            self.waits = True
            self._postponed += 1
            self._pauses = min(2**self._postponed, _MOST_PAUSES)
        self.state = "decided"
        return [Form(epoch, decision)]

    def formed(self, form: Form) -> None:
        """The group of a decision is the present one."""
        living, before = form.decision.members, self.membership
        # The last rank may be gone that has had a new number.
        numbers = frozenset((*range(max(self._size, living[-1] + 1)), *before.living, *before.lost))
        self.membership = Membership(form.epoch, living, numbers.difference(living))
        self.state = "settled"
        self._gone.clear()

    # --- processes that join ---

    def exchange(self) -> list[Action]:
        """The program begins an exchange, and something has happened since the last one.

        The lowest rank answers joiners. Ranks that go at their own pace may not have agreed since a rank was lost, so that
        one does not count.
        """
        lowest = self.living[0]
        if lowest != self.rank:
            self.waits = False
            return [Watch((lowest,)), LeaveToAnother()]  # if it is lost, this rank may be the next to answer
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
            if now > self._early.setdefault(ticket, now) + self._doubt:
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
    came: Mapping[int, Objects],
    gone: set[int],
    joins: Mapping[int, Request],
) -> Decision | None:
    """Returns what a round decides, as far as this is known; None if nothing changes.

    Args:
        before: The ranks of the present epoch.
        came: What each rank that has come has told of its objects.
        gone: The ranks that are gone.
        joins: The processes that are ready to join, by rank.
    """
    living = {rank: objects for rank, objects in came.items() if rank not in gone}
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
    return Decision(living, free if busy <= {join.at for join in free.values()} else {})


# --- a process that joins -------------------------------------------------------------------------------------


class Joiner:
    """A process that joins a job.

    Args:
        rank: Its rank there.
        timeout: For how long it waits for an answer, in seconds.
        reach: For how long it tries to reach all ranks, in seconds.

    Attributes:
        state: "asking", "ready" to take part (it waits for the decision), or "out".
    """

    def __init__(self, rank: int, timeout: float, reach: float) -> None:
        self.state = "asking"
        self._rank, self._timeout, self._reach = rank, timeout, reach
        self._begin = self._asked = 0.0

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
        if unreached and now >= self._begin + self._reach:
            return self._fail(f"it does not reach {unreached} over TCP")
        if now >= self._begin + self._timeout:
            return self._fail(f"no state came within {self._timeout:g} s; {failure}")
        # Ranks may be lost meanwhile, so those that have not answered are asked for anew.
        self._asked = now
        return [TakeTicket(), Ask()]

    def _fail(self, reason: str) -> list[Action]:
        self.state = "out"
        return [Fail(f"this process cannot join the job as rank {self._rank}: {reason}")]
