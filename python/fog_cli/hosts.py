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


def parse_hosts(text: str) -> list[Host]:
    """Returns the hosts of an argument of `-H` such as "a:2,b:2".

    Raises:
        UsageError: An entry cannot be parsed.
    """
    return _collect((f"-H: entry {number}", entry) for number, entry in enumerate(text.split(","), 1))


def read_hostfile(path: str) -> list[Host]:
    """Returns the hosts of a file with lines of the form "host slots=2", "host:2" or "host"; # begins a comment.

    Raises:
        UsageError: The file cannot be read, has no host, or has a line that cannot be parsed.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from error
    entries = [
        (f"--hostfile {path}: line {number}", line.partition("#")[0]) for number, line in enumerate(lines, 1)
    ]
    hosts = _collect((where, line) for where, line in entries if line.strip())
    if not hosts:
        raise UsageError(f"--hostfile {path}: it names no host; {_FORMS}")
    return hosts


def _collect(entries: Iterable[tuple[str, str]]) -> list[Host]:
    """Returns the hosts of entries. The slots of repeated hosts are added, as batch systems write one line per slot."""
    slots: dict[str, int] = {}
    for where, entry in entries:
        match = _ENTRY.fullmatch(entry.strip())
        count = int(match["slots"] or 1) if match else 0
        if match is None or count < 1:
            raise UsageError(f"{where}: got {entry.strip()!r}; {_FORMS}, with one slot at least")
        name = match["name"].strip("[]")
        slots[name] = slots.get(name, 0) + count
    return [Host(name, count) for name, count in slots.items()]


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
