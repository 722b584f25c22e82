"""`fog dump`: prints the operations that the ranks of this host have in flight, and the ranks that they wait for."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fog_cli import UsageError

_EXAMPLES = """\
examples:
  fog dump                   all processes of yours on this host that have a group of fog
  fog dump 4711 4712         these

It works on processes that hang or are stopped, and does not disturb them. Where a process's Python code is, py-spy says.
"""


def add(subparsers: Any) -> None:
    """Describes the command."""
    parser = subparsers.add_parser(
        "dump",
        help="show what ranks have in flight, and which ranks hold the others up",
        description="Shows what processes of this host have in flight, for how long, and for which ranks they wait.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "pids", nargs="*", type=int, metavar="PID", help="processes (default: all of yours on this host)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the report."""
    for pid in arguments.pids:
        if not 0 < pid < 1 << 31:
            raise UsageError(f"{pid}: there is no such process")
    from fogdist import flight_record

    try:
        found = [flight_record.read(pid) for pid in arguments.pids] or flight_record.read_all()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not found:
        print("fog dump: no process of yours on this host has a group of fog", file=sys.stderr)
        return 1
    print(flight_record.report(found))
    return 0
