"""The hosts that ranks run on: parses `-H host:slots,...` and host files."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fog_cli import UsageError

# No name begins with a dash: ssh and others would take it for an option.
_NAME = r"\[[0-9A-Fa-f:.%\w]+\]|[\w.][\w.-]*"
_ENTRY = re.compile(rf"(?P<name>{_NAME})(?:(?::|\s+slots\s*=\s*)(?P<slots>\d+))?")
_FORMS = "allowed are 'host', 'host:slots' and 'host slots=n'"


@dataclass(frozen=True)
class Host:
    """A host and its number of slots, the most ranks that it runs."""

    name: str
    slots: int


def parse_hosts(option: str, entries: Iterable[str]) -> list[Host]:
    """Returns the hosts of entries such as "a:2". The slots of repeated hosts are added, as batch systems write one line a slot.

    Raises:
        UsageError: An entry cannot be parsed; the error names `option`.
    """
    slots: dict[str, int] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry.strip())
        count = int(match["slots"] or 1) if match else 0
        if match is None or count < 1:
            raise UsageError(f"{option}: got {entry.strip()!r}; {_FORMS}, with one slot at least")
        name = match["name"].strip("[]")
        slots[name] = slots.get(name, 0) + count
    return [Host(name, count) for name, count in slots.items()]


def read_hostfile(path: str) -> list[Host]:
    """Returns the hosts of a file with lines of the form "host slots=2", "host:2" or "host"; # begins a comment.

    Raises:
        UsageError: The file cannot be read, or has a line that cannot be parsed.
    """
    try:
        lines = [line.partition("#")[0] for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from error
    return parse_hosts(f"--hostfile {path}", filter(str.strip, lines))


def place(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """Returns the hosts that the ranks fill in order, each with its number of ranks.

    Raises:
        UsageError: The hosts have too few slots.
    """
    total = sum(host.slots for host in hosts)
    if total < ranks:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(f"-np: got {ranks}; the hosts have {total} slots: {listed}")
    placed = []
    for host in hosts:
        taken = min(host.slots, ranks)
        if taken:
            placed.append(Host(host.name, taken))
        ranks -= taken
    return placed


def is_local(name: str) -> bool:
    """Returns whether a name is a name of this machine."""
    own = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().partition(".")[0]}
    return name in own
