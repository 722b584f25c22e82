"""Which faults come when: chosen by hand, or at random from a seed."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from fogdist.testing.faults.groups import abort, lose_store
from fogdist.testing.faults.processes import deadlock_with_gil, kill, positive_seconds, segfault, stop

Kind: TypeAlias = Literal[
    "kill", "segfault", "stop", "deadlock", "abort", "lose_store", "cut", "slow", "lossy"
]
# After these the rank is gone.
_ENDS: tuple[Kind, ...] = ("kill", "segfault")
# These take a time.
_LASTS = ("stop", "deadlock", "cut", "slow", "lossy")
# What a process can do to another one, by its pid.
FROM_OUTSIDE: tuple[Kind, ...] = ("kill", "segfault", "stop")
# What needs the name of a network device.
_OF_LINKS = ("cut", "slow", "lossy")


@dataclass(frozen=True, order=True)
class Fault:
    """One fault of one rank.

    Args:
        when: The step (`Schedule.inject`), or seconds since the start (`Schedule.run`).
        rank: The rank that it happens to.
        kind: "kill", "segfault", "stop", "deadlock" (with Python's lock held), "abort" (of the default group) or
            "lose_store"; or "cut", "slow" or "lossy" for the link of the rank's host.
        seconds: How long a stop, a deadlock or a fault of a link lasts. 0 for those that last forever.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of its range.
    """

    when: float
    rank: int
    kind: Kind
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool):
            raise TypeError(f"rank must be an int, got {type(self.rank).__name__}")
        if self.rank < 0:
            raise ValueError(f"rank must not be negative, got {self.rank}")
        if not self.when >= 0:
            raise ValueError(f"when must not be negative, got {self.when!r}")
        check_kind(self.kind)
        if self.kind in _LASTS:
            if self.seconds != 0.0 or self.kind != "deadlock":
                positive_seconds(self.seconds)
        elif self.seconds != 0.0:
            raise ValueError(f"seconds must be 0 for {self.kind!r}, got {self.seconds!r}")

    @property
    def is_fatal(self) -> bool:
        """Whether the process of the rank ends."""
        return self.kind in _ENDS

    def inject(self, pid: int | None = None) -> None:
        """Lets the fault happen now; returns when it is over.

        Args:
            pid: The process of the rank; by default this one. "kill", "segfault" and "stop" can happen to any process,
                the others only to this one.

        Raises:
            ProcessLookupError: There is no such process.
            ValueError: The kind cannot happen to another process, or is that of a link, for which `cut_link`,
                `slow_link` and `lossy_link` need a device.
        """
        if self.kind in _OF_LINKS:
            raise ValueError(
                f"{self.kind!r} needs a network device: call fogdist.testing.faults.{self.kind}_link"
            )
        if pid is not None and self.kind not in FROM_OUTSIDE:
            raise ValueError(f"{self.kind!r} can only happen to the calling process, got pid {pid}")
        if self.kind == "kill":
            kill(pid)
        elif self.kind == "segfault":
            segfault(pid)
        elif self.kind == "stop":
            stop(pid, self.seconds)
        elif self.kind == "deadlock":
            deadlock_with_gil(self.seconds or None)
        elif self.kind == "abort":
            abort()
        else:
            lose_store()


class Schedule:
    """Faults in the order of their times.

    In the training script, every rank has the same schedule and names its step:

        schedule = faults.Schedule.random(seed=1, ranks=8, until=1000, every=(50, 200))
        for step, batch in enumerate(batches):
            schedule.inject(dist.get_rank(), step)
            ...

    Or another process injects them by the ranks' pids, with times in seconds:

        schedule.run(lambda fault: fault.inject(pids[fault.rank]))

    Args:
        faults: In any order.

    Attributes:
        faults: In the order of their times.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults: tuple[Fault, ...] = tuple(sorted(faults))
        self._waiting: dict[int, list[Fault]] = {}  # by rank, for `inject`
        for fault in self.faults:
            self._waiting.setdefault(fault.rank, []).append(fault)

    @classmethod
    def random(
        cls,
        seed: int,
        ranks: int | Sequence[int],
        *,
        until: float,
        every: tuple[float, float] = (0.5, 2.0),
        kinds: Iterable[Kind] | Mapping[Kind, float] = ("kill",),
        seconds: tuple[float, float] = (0.1, 1.0),
        least_living: int = 1,
        lost_by: Collection[Kind] = _ENDS,
        whole: bool = False,
        restarted: bool = False,
    ) -> Schedule:
        """Draws a schedule; the same arguments give the same one everywhere.

        Args:
            seed: Any int.
            ranks: The number of ranks, or those that faults may happen to.
            until: The end, in steps or seconds.
            every: The least and the greatest time from one fault to the next.
            kinds: What happens; a mapping has their relative frequencies.
            seconds: The least and the greatest duration of a fault that lasts.
            least_living: So many of `ranks` are not lost; when only they are left, only the other kinds happen.
            lost_by: The kinds after which a rank is lost, so that nothing more happens to it.
            whole: Whether times are whole numbers, for steps.
            restarted: Whether somebody starts lost ranks again, so a rank can be lost more than once, and at any time
                all of them may be running.

        Raises:
            TypeError: An argument has a wrong type.
            ValueError: A range is empty or negative; there are no ranks or no kinds.
        """
        if isinstance(ranks, int):
            ranks = range(ranks)
        if not ranks:
            raise ValueError(f"ranks must be a positive number or a sequence of ranks, got {ranks!r}")
        for argument, (least, most) in (("every", every), ("seconds", seconds)):
            positive_seconds(least, argument)
            if not positive_seconds(most, argument) >= least:
                raise ValueError(f"{argument} must be (least, greatest), got {(least, most)!r}")
        frequencies = dict(kinds) if isinstance(kinds, Mapping) else dict.fromkeys(kinds, 1.0)
        for kind, frequency in frequencies.items():
            check_kind(kind)
            positive_seconds(frequency, f"the frequency of {kind!r}")
        if not frequencies:
            raise ValueError("kinds must name at least one kind of fault, got none")
        draw = random.Random(seed)
        living = list(ranks)
        faults: list[Fault] = []
        when = draw.uniform(*every)
        while when < until:
            # Each fault takes the same number of draws, so that it does not depend on what became of others.
            place, duration, choice = draw.random(), draw.uniform(*seconds), draw.random()
            possible = [
                kind for kind in frequencies if kind not in lost_by or restarted or len(living) > least_living
            ]
            if possible and living:
                rank = living[int(place * len(living))]
                kind = _choose(possible, frequencies, choice)
                lasts = round(duration, 3) if kind in _LASTS else 0.0
                faults.append(Fault(round(when) if whole else round(when, 3), rank, kind, lasts))
                if kind in lost_by and not restarted:
                    living.remove(rank)
            when += draw.uniform(*every)
        return cls(faults)

    def inject(self, rank: int, step: int) -> list[Fault]:
        """Lets the faults happen to this process that are due, and returns them when they are over.

        Args:
            rank: The rank of this process.
            step: Its step. A fault of an earlier step that was not named happens now.
        """
        waiting = self._waiting.get(rank)
        due = []
        while waiting and waiting[0].when <= step:
            due.append(waiting.pop(0))
            due[-1].inject()
        return due

    def run(self, inject: Callable[[Fault], object], *, until: threading.Event | None = None) -> list[Fault]:
        """Calls a function for each fault at its time, counted in seconds from now; returns when all are over.

        Each call is made in a thread of its own, so a fault that lasts does not delay the next one.

        Args:
            inject: For example ``lambda fault: fault.inject(pids[fault.rank])``. A ProcessLookupError means that the
                rank is gone already: the fault is left out.
            until: When it is set, no more faults begin.

        Returns:
            The faults that happened.

        Raises:
            Exception: The first one of `inject`, after the faults that had begun are over.
        """
        happened: list[Fault] = []
        errors: list[BaseException] = []

        def call(fault: Fault) -> None:
            try:
                with contextlib.suppress(ProcessLookupError):
                    inject(fault)
                    happened.append(fault)
            except BaseException as error:
                errors.append(error)

        end = until if until is not None else threading.Event()
        threads: list[threading.Thread] = []
        begin = time.monotonic()
        for fault in self.faults:
            if end.wait(max(0.0, begin + fault.when - time.monotonic())) or errors:
                break
            threads.append(threading.Thread(target=call, args=(fault,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return sorted(happened)


def check_kind(kind: str) -> None:
    """Checks the name of a kind of fault."""
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(map(repr, get_args(Kind)))}, got {kind!r}")


def _choose(kinds: Sequence[Kind], frequencies: Mapping[Kind, float], choice: float) -> Kind:
    """The kind at a place between 0 and 1."""
    left = choice * sum(frequencies[kind] for kind in kinds)
    for kind in kinds[:-1]:
        left -= frequencies[kind]
        if left < 0.0:
            return kind
    return kinds[-1]
