"""The messages of an agreement round (`fogdist.elastic.protocol`), in a Store."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from fogdist.elastic.protocol import Message


class Log:
    """The log of an agreement round in a Store: what the ranks have told, in one order for all.

    Args:
        store: Any Store of torch; those that can append are faster.
        key: The round's.
    """

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store: Any = store  # torch's stubs lack some of its methods
        self._key = key
        self._read = 0

    def append(self, message: Message) -> None:
        """Adds a message."""
        line = json.dumps(message) + "\n"
        if self._store.has_extended_api():
            self._store.append(self._key, line)
            return
        while True:
            before = self._text()
            after = before + line
            if self._store.compare_set(self._key, before, after).decode() == after:
                return

    def read(self) -> list[Message]:
        """Returns the messages since the last call."""
        lines = self._text().splitlines()[self._read :]
        self._read += len(lines)
        return [json.loads(line) for line in lines]

    def _text(self) -> str:
        return self._store.get(self._key).decode() if self._store.check([self._key]) else ""
