"""`fog top`: shows the ranks of this host, live in a terminal, or as a page."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fog_cli import UsageError
from fog_cli.looks import COLUMNS, Job, Watch, cells, is_bad, title
from fog_cli.page import page

if TYPE_CHECKING:
    from rich.console import RenderableType

_EXAMPLES = """\
examples:
  fog top                    all processes of yours on this host that have a group of fog, until Ctrl-C
  fog top --once             the same, printed once
  fog top --html top.html    as a page
  fog top 4711 4712          these processes

It reads memory that the ranks write to in any case, so it disturbs none of them, and works on ranks that hang.
"""
_LONGEST = 3600.0


def add(subparsers: Any) -> None:
    """Describes the command."""
    parser = subparsers.add_parser(
        "top",
        help="show the ranks of this host: steps, waits, staleness, failures",
        description="Shows the ranks of this host: state, membership, steps, staleness, waits for each rank, failures.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "pids", nargs="*", type=int, metavar="PID", help="processes (default: all of yours on this host)"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between two looks (default: 1)"
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--once", action="store_true", help="print one table and end")
    forms.add_argument("--html", metavar="FILE", help="write one page and end")
    forms.add_argument("--json", action="store_true", help="print one JSON object and end")


def run(arguments: argparse.Namespace) -> int:
    """Shows the ranks."""
    if not 0.1 <= arguments.interval <= _LONGEST:
        raise UsageError(f"--interval: got {arguments.interval:g}; allowed are 0.1 to {_LONGEST:g} seconds")
    for pid in arguments.pids:
        if not 0 < pid < 1 << 31:
            raise UsageError(f"{pid}: there is no such process")
    once = arguments.once or not sys.stdout.isatty()
    if not (arguments.html or arguments.json):
        try:
            import rich.console  # noqa: F401
        except ImportError:
            raise UsageError(
                "the table needs the package rich: pip install rich, or the extra `top` of fogdist. "
                "--html and --json do without it"
            ) from None
    watch = _watch(arguments.pids)
    if not (once or arguments.html or arguments.json):
        return _live(watch, arguments.interval)
    jobs = watch.look()
    if jobs:
        time.sleep(arguments.interval)
        jobs = watch.look()
    if arguments.html:
        _write(
            arguments.html, page(jobs, socket.gethostname(), time.strftime("%F %T %Z"), arguments.interval)
        )
    elif arguments.json:
        print(json.dumps({"jobs": [dataclasses.asdict(job) for job in jobs]}))
    elif jobs:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 200).print(table(jobs))
    if not jobs:
        print("fog top: no process of yours on this host has a group of fog", file=sys.stderr)
    return 0 if jobs else 1


def _watch(pids: list[int]) -> Watch:
    from fogdist import flight_record

    if not pids:
        return Watch(flight_record.read_all, flight_record.blamed)
    try:
        found = [flight_record.read(pid) for pid in pids]
    except ValueError as error:
        raise UsageError(str(error)) from None

    def read() -> list[flight_record.Process]:
        nonlocal found
        living = []
        for process in found:
            try:
                living.append(flight_record.read(process.pid))
            except ValueError:  # it has ended
                continue
        found = living
        return living

    return Watch(read, flight_record.blamed)


def _write(path: str, text: str) -> None:
    """Writes a file as a whole, so that a reader never sees a part."""
    part = Path(f"{path}.part-{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"--html {path}: {error.strerror}") from error


def _live(watch: Watch, interval: float) -> int:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        try:
            while True:
                live.update(table(watch.look()), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:
            return 0


def table(jobs: list[Job]) -> RenderableType:
    """Returns what the terminal shows; needs rich."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for job in jobs:
        shown = Table(title=title(job), title_justify="left", box=box.SIMPLE_HEAD)
        for name in COLUMNS:
            right = name in ("rank", "process", "epoch", "steps", "steps/s", "last step", "age", "failed")
            shown.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in job.rows:
            style = "dim" if row.state == "ended" else "red" if is_bad(row) else ""
            shown.add_row(*(Text(text) for text in cells(row)), style=style)
        parts += [shown, *(Text(line, style="red") for line in job.late)]
    return Group(*parts) if parts else Text("No process of yours on this host has a group of fog.")
