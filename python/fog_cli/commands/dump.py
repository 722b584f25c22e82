"""`fog dump`: prints the operations that the ranks of this host have in flight, and the ranks that they wait for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fog_cli import UsageError

if TYPE_CHECKING:
    from fogdist.observe.flight_record import Process

EXAMPLES = """\
examples:
  fog dump                   all processes of yours on this host that have a group of fog
  fog dump 4711 4712         these

It works on processes that hang or are stopped, and does not disturb them. Where a process's Python code is, py-spy says.
"""
NOTHING = "no process of yours on this host has a group of fog"


def add(parser: argparse.ArgumentParser) -> None:
    """Describes the processes to show; `fog top` has them, too."""
    parser.add_argument(
        "pids", nargs="*", type=int, metavar="PID", help="processes (default: all of yours on this host)"
    )


def read_records(pids: Sequence[int]) -> list[Process]:
    """Returns the records of processes, or of all that have one; raises UsageError if one of the processes has none."""
    from fogdist.observe import flight_record

    for pid in pids:
        if not 0 < pid < 1 << 31:
            raise UsageError(f"{pid}: there is no such process")
    try:
        return [flight_record.read(pid) for pid in pids] or flight_record.read_all()
    except ValueError as error:
        raise UsageError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    """Prints the report."""
    from fogdist.observe import flight_record

    found = read_records(arguments.pids)
    if not found:
        print(f"fog dump: {NOTHING}", file=sys.stderr)
        return 1
    print(flight_record.report(found))
    return 0
