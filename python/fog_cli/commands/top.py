"""`fog top`: shows the ranks of this host or of several ones, live in a terminal, or as a page."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fog_cli import UsageError
from fog_cli.commands.run import add_hosts, check_ssh_port, given_hosts
from fog_cli.looks import COLUMNS, Job, Watch, cells, is_bad, nothing_on, title
from fog_cli.page import page
from fog_cli.remote_looks import RemoteWatch

if TYPE_CHECKING:
    from rich.console import RenderableType

_EXAMPLES = """\
examples:
  fog top                    all processes of yours on this host that have a group of fog, until Ctrl-C
  fog top --once             the same, printed once
  fog top --html top.html    as a page
  fog top 4711 4712          these processes
  fog top -H a,b             those of the hosts a and b, which ssh reaches without a password

It reads memory that the ranks write to in any case, so it disturbs none of them, and works on ranks that hang.
"""
_LONGEST = 3600.0


def add(subparsers: Any) -> None:
    """Describes the command."""
    parser = subparsers.add_parser(
        "top",
        help="show the ranks of this host, or of several: steps, waits, staleness, failures",
        description="Shows the ranks of this host, or of several: state, membership, steps, staleness, waits for each rank, failures.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "pids", nargs="*", type=int, metavar="PID", help="processes (default: all of yours on this host)"
    )
    add_hosts(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between two looks (default: 1)"
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--once", action="store_true", help="print one table and end")
    forms.add_argument("--html", metavar="FILE", help="write one page and end")
    forms.add_argument("--json", action="store_true", help="print one JSON object and end")
    forms.add_argument(
        "--stream", action="store_true", help="print a line of JSON for each look, until nobody reads"
    )


def run(arguments: argparse.Namespace) -> int:
    """Shows the ranks."""
    if not 0.1 <= arguments.interval <= _LONGEST:
        raise UsageError(f"--interval: got {arguments.interval:g}; allowed are 0.1 to {_LONGEST:g} seconds")
    for pid in arguments.pids:
        if not 0 < pid < 1 << 31:
            raise UsageError(f"{pid}: there is no such process")
    check_ssh_port(arguments.ssh_port)
    hosts = [host.name for host in given_hosts(arguments) or ()]
    if hosts and arguments.pids:
        raise UsageError(f"PID: got {arguments.pids[0]}; with -H all of yours are shown")
    if hosts and arguments.stream:
        raise UsageError("--stream: it is of one host, and -H reads it")
    once = arguments.once or not sys.stdout.isatty()
    if not (arguments.html or arguments.json or arguments.stream):
        try:
            import rich.console  # noqa: F401
        except ImportError:
            raise UsageError(
                "the table needs the package rich: pip install rich, or the extra `top` of fogdist. "
                "--html and --json do without it"
            ) from None
    if not hosts:
        return _show(_watch(arguments.pids), arguments, once)
    try:
        watch = RemoteWatch(hosts, arguments.interval, arguments.ssh_port, os.environ)
    except OSError as error:
        raise UsageError(f"-H: {error.filename} cannot be started: {error.strerror}") from error
    with contextlib.closing(watch):
        return _show(watch, arguments, once)


def _show(watch: Watch | RemoteWatch, arguments: argparse.Namespace, once: bool) -> int:
    if arguments.stream:
        return _stream(watch, arguments.interval)
    if not (once or arguments.html or arguments.json):
        return _live(watch, arguments.interval)
    jobs = watch.second_look(arguments.interval)
    trouble = watch.trouble()
    if arguments.html:
        when = time.strftime("%F %T %Z")
        text = page(jobs, watch.title or socket.gethostname(), when, arguments.interval, watch.where, trouble)
        _write(arguments.html, text)
    elif arguments.json:
        print(json.dumps({"jobs": [dataclasses.asdict(job) for job in jobs]}))
    elif jobs:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 200).print(table(jobs, watch.where))
    for line in trouble:
        print(f"fog top: {line}", file=sys.stderr)
    if not jobs:
        print(f"fog top: {nothing_on(watch.where)}", file=sys.stderr)
    return 0 if jobs and not trouble else 1


def _stream(watch: Watch | RemoteWatch, interval: float) -> int:
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        while True:
            jobs = watch.second_look(interval)
            print(json.dumps({"jobs": [dataclasses.asdict(job) for job in jobs]}), flush=True)
            if not jobs:
                time.sleep(interval)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in it goes nowhere
    return 0


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
    target = Path(path)
    part = None
    try:
        # In a folder that others can write to, a name that can be guessed may be a link of theirs.
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=target.name, delete=False) as file:
            part = Path(file.name)
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)
        part.replace(target)
    except OSError as error:
        if part is not None:
            part.unlink(missing_ok=True)
        raise UsageError(f"--html {path}: {error.strerror}") from error


def _live(watch: Watch | RemoteWatch, interval: float) -> int:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        try:
            while True:
                live.update(table(watch.look(), watch.where, watch.trouble()), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:
            return 0


def table(jobs: list[Job], where: str = "this host", trouble: Sequence[str] = ()) -> RenderableType:
    """Returns what the terminal shows; needs rich. The arguments are those of `fog_cli.page.page`."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(line, style="red") for line in trouble]
    if not jobs:
        parts.append(Text(nothing_on(where)))
    for job in jobs:
        shown = Table(title=title(job, where), title_justify="left", box=box.SIMPLE_HEAD)
        for name in COLUMNS:
            right = name in (
                "rank",
                "process",
                "membership",
                "steps",
                "steps/s",
                "last step",
                "age",
                "failed",
            )
            shown.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in job.rows:
            style = "dim" if row.state == "ended" else "red" if is_bad(row) else ""
            shown.add_row(*(Text(text) for text in cells(row)), style=style)
        parts += [shown, *(Text(line, style="red") for line in job.late)]
    return Group(*parts)
