"""`fog top`: shows the ranks of this host, live in a terminal, or once."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from fog_cli import UsageError, add_command
from fog_cli.commands.dump import NOTHING, add_pids, read_records
from fog_cli.samples import Job, Watch, cells

if TYPE_CHECKING:
    from rich.console import RenderableType

_EXAMPLES = """\
examples:
  fog top                       all processes of yours on this host that have a group of fog, until Ctrl-C
  fog top --once                the same, printed once
  fog top 4711 4712             these processes
  ssh HOST fog top --once       those of another host

It reads memory that the ranks write to in any case, so it disturbs none of them, and works on ranks that hang.
"""
_LONGEST = 3600.0
# The columns of numbers, which go to the right.
_NUMBERS = ("rank", "process", "membership", "steps", "steps/s", "last step", "age", "failed")


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
    if not arguments.json:
        try:
            import rich.console
        except ImportError:
            raise UsageError(
                "the table needs the package rich: pip install rich, or the extra `top` of fogdist. "
                "--json does without it"
            ) from None
    watch = _watch(arguments.pids)
    if not (arguments.once or arguments.json) and sys.stdout.isatty():
        return _live(watch, arguments.interval)
    jobs = watch.second_sample(arguments.interval)
    if arguments.json:
        print(json.dumps({"jobs": [job.as_json() for job in jobs]}))
    elif jobs:
        rich.console.Console(width=None if sys.stdout.isatty() else 200).print(table(jobs))
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
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        try:
            while True:
                live.update(table(watch.sample()), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:
            return 0


def table(jobs: list[Job]) -> RenderableType:
    """Returns what the terminal shows; needs rich."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [] if jobs else [Text(NOTHING)]
    for job in jobs:
        shown = Table(title=job.title, title_justify="left", box=box.SIMPLE_HEAD)
        for name in cells(job.rows[0]):
            shown.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
        for row in job.rows:
            style = "dim" if row.state == "ended" else "red" if row.is_bad else ""
            shown.add_row(*map(Text, cells(row).values()), style=style)
        parts += [shown, *(Text(line, style="red") for line in job.late)]
    return Group(*parts)
