"""The carrier of an agreement round (`fogdist.elastic.protocol`): the messages of the engine, between the ranks of a group."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

from fog_pg import _extension
from fogdist.elastic.protocol import Message

# So many messages of one group wait for it; the oldest give way, as all are repeated.
_MOST = 4096


class Carrier:
    """Takes messages of a group to its ranks, of which each may be lost.

    The engine takes a text from process to process. It is an object of JSON, with a message for each group by its id. A process
    may be in agreement rounds of several groups, so what one reads for another one is kept.

    Args:
        group: The id of the group with which the ranks began, the same on all of them.
        ranks: Their numbers in the job; later ranks have the same number there.
    """

    _lock = threading.Lock()
    _arrived: ClassVar[dict[str, deque[tuple[int, Message]]]] = defaultdict(lambda: deque(maxlen=_MOST))
    _answers: ClassVar[WeakKeyDictionary[Carrier, Message]] = WeakKeyDictionary()

    def __init__(self, group: int, ranks: Sequence[int]) -> None:
        self._extension = _extension.load()
        self._group = f"{group:x}"
        self._numbers = dict(enumerate(ranks))
        self._ranks = {number: rank for rank, number in self._numbers.items()}

    def send(self, rank: int, message: Message) -> None:
        """Sends a message."""
        text = json.dumps({self._group: message}).encode()
        self._extension.send_membership(self._numbers.get(rank, rank), message["epoch"], text)

    def reaches(self, rank: int) -> bool:
        """Returns whether the process of a rank runs, and can be reached."""
        return bool(self._extension.send_membership(self._numbers.get(rank, rank), 0, b"{}"))

    def answer(self, message: Message) -> None:
        """Sets what the engine sends to each rank whose message is of this epoch or an earlier one."""
        with self._lock:
            self._answers[self] = message
            epoch = max(each["epoch"] for each in self._answers.values())
            answers = {carrier._group: each for carrier, each in self._answers.items()}
            self._extension.answer_membership(epoch, json.dumps(answers).encode())

    def receive(self, timeout: float = 0.0) -> list[tuple[int, Message]]:
        """Returns the messages that have come, with the ranks of their senders; waits for one."""
        if timeout:
            self._extension.wait_membership(timeout)
        with self._lock:
            for number, text in self._extension.take_membership():
                for group, message in json.loads(text).items():
                    self._arrived[group].append((number, message))
            arrived = self._arrived.pop(self._group, ())
        return [(self._ranks.get(number, number), message) for number, message in arrived]
