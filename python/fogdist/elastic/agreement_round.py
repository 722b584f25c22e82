"""An agreement round in the Store: what ranks tell each other after a loss or before a join, and what they decide."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from fogdist.elastic.tickets import Request


@dataclass(frozen=True)
class Decision:
    """What an agreement round has decided.

    Attributes:
        living: What each rank that is left has told of its objects (`Participant.report`).
        joins: The processes that join, by rank.
    """

    living: dict[int, dict[str, dict[str, Any]]]
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

    def to_json(self, epoch: int) -> dict[str, Any]:
        """Returns it as values of JSON."""
        joins = {rank: asdict(join) for rank, join in self.joins.items()}
        return {"epoch": epoch, "living": self.living, "joins": joins}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Decision:
        """Returns what `to_json` has described."""
        return cls(
            {int(rank): objects for rank, objects in values["living"].items()},
            {int(rank): Request.from_values(join) for rank, join in values["joins"].items()},
        )


@dataclass
class Record:
    """What ranks have told in an agreement round.

    Attributes:
        came: What each rank that has come has told of its objects.
        gone: The ranks that are gone.
        joins: The processes that are ready to join, by rank.
    """

    came: dict[int, dict[str, dict[str, Any]]]
    gone: set[int]
    joins: dict[int, Request]

    def decision(self, before: Sequence[int]) -> Decision | None:
        """Returns the decision, as far as this is known; None if nothing changes.

        Args:
            before: The ranks of the present epoch.
        """
        living = {rank: objects for rank, objects in self.came.items() if rank not in self.gone}
        if len(living) == len(before) and not self.joins:
            return None
        # A rank within an exchange of another participant would wait there for the process that joins.
        busy = {
            name
            for objects in living.values()
            for name, report in objects.items()
            if report["taken"] > report["completed"]
        }
        return Decision(living, self.joins if busy <= {join.at for join in self.joins.values()} else {})


class Log:
    """The log of an agreement round in a Store: what the ranks have told, in their order, and the decision.

    Args:
        store: Any Store of torch; those that can append are faster.
        key: The round's.
    """

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store: Any = store  # torch's stubs lack some of its methods
        self._told, self._decision = f"{key}/told", f"{key}/decision"

    def append(self, entry: dict[str, object]) -> None:
        """Adds an entry, which must differ from all others."""
        line = json.dumps(entry) + "\n"
        if self._store.has_extended_api():
            self._store.append(self._told, line)
            return
        while True:
            before = self._text()
            after = before + line
            if self._store.compare_set(self._told, before, after).decode() == after:
                return

    def read(self) -> Record:
        """Returns what the ranks have told."""
        record = Record({}, set(), {})
        for line in self._text().splitlines():
            entry = json.loads(line)
            if "came" in entry:
                record.came[entry["came"]] = entry["objects"]
            elif "joins" in entry:
                request = Request.from_values(entry["joins"])
                record.joins[request.rank] = request
            else:
                record.gone.add(entry["gone"])
        return record

    def is_decided(self) -> bool:
        """Returns whether a rank has decided."""
        return bool(self._store.check([self._decision]))

    def decide(self, decision: Decision | None) -> Decision | None:
        """Decides, unless another rank has decided already; returns the decision."""
        text = "{}" if decision is None else json.dumps(decision.to_json(0))
        decided = json.loads(self._store.compare_set(self._decision, "", text))
        return Decision.from_json(decided) if decided else None

    def _text(self) -> str:
        return self._store.get(self._told).decode() if self._store.check([self._told]) else ""
