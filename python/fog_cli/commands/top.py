"""`fog top`: shows the ranks of this host, live in a terminal, or once."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import Any

from fog_cli import UsageError, add_command
from fog_cli import table as columns
from fog_cli.commands.dump import NOTHING, add_pids, read_records
from fog_cli.samples import Job, Watch, cells

_EXAMPLES = """\
examples:
  fog top                       all processes of yours on this host that have a group of fog, until Ctrl-C
  fog top --once                the same, printed once
  fog top 4711 4712             these processes
  ssh HOST fog top --once       those of another host

It reads memory that the ranks write to in any case, so it disturbs none of them, and works on ranks that hang.
"""
_LONGEST = 3600.0
# Moves the cursor of a terminal to its first line, and clears what follows.
_CLEAR = "\033[H\033[J"


def add(subparsers: Any) -> None:
    """Describes the command."""
    parser = add_command(
        subparsers,
        "top",
        "show the ranks of this host: steps, waits, staleness, failures",
        "Shows the ranks of this host: state, membership, steps, staleness, waits for each rank, failures.",
        _EXAMPLES,
    )
    add_pids(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between two samples (default: 1)"
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--once", action="store_true", help="print one table and end")
    forms.add_argument("--json", action="store_true", help="print one JSON object and end")


def run(arguments: argparse.Namespace) -> int:
    """Shows the ranks."""
    if not 0.1 <= arguments.interval <= _LONGEST:
        raise UsageError(f"--interval: got {arguments.interval:g}; allowed are 0.1 to {_LONGEST:g} seconds")
    watch = _watch(arguments.pids)
    if not (arguments.once or arguments.json) and sys.stdout.isatty():
        return _live(watch, arguments.interval)
    jobs = watch.second_sample(arguments.interval)
    if arguments.json:
        print(json.dumps({"jobs": [job.as_json() for job in jobs]}))
    elif jobs:
        print(table(jobs))
    if not jobs:
        print(f"fog top: {NOTHING}", file=sys.stderr)
    return 0 if jobs else 1


def _watch(pids: list[int]) -> Watch:
    from fogdist.observe import flight_record

    found = read_records(pids)

    def read() -> list[flight_record.Process]:
        if not pids:
            return flight_record.read_all()
        living = []
        for process in found:
            with contextlib.suppress(ValueError):  # it has ended
                living.append(flight_record.read(process.pid))
        return living

    return Watch(read, flight_record.blamed)


def _live(watch: Watch, interval: float) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            print(_CLEAR + table(watch.sample()), flush=True)
            time.sleep(interval)
    return 0


def table(jobs: list[Job]) -> str:
    """Returns what the terminal shows."""
    parts = []
    for job in jobs:
        rows = [tuple(cells(row).values()) for row in job.rows]
        parts.append("\n".join([job.title, *columns([tuple(cells(job.rows[0])), *rows]), *job.late]))
    return "\n\n".join(parts) or NOTHING
