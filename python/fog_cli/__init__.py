"""The command line `fog`. Each subcommand is a module of `fog_cli.commands`; shared code is in this package.

It is a package of its own because importing any module of fogdist imports torch, which takes seconds, and because
`fog doctor` must run where torch or fog cannot be imported. torch, fog_pg and fogdist are imported in functions only, and
in the programs that commands start (`fog_cli.programs`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import math
import re
import sys
from collections.abc import Callable, Sequence

__all__ = ["COMMANDS", "UsageError", "count", "main", "number", "parser", "table"]

COMMANDS = {
    "run": "start a script on several ranks, on this host or on several",
    "doctor": "find out what works on this machine, and what to do about the rest",
    "topology": "show what topologies cost",
    "bench": "time fog beside Gloo on this machine",
    "advise": "measure links, compute and codecs, and recommend how to average",
    "timeline": "merge the timelines that ranks record with FOG_TIMELINE=PREFIX",
    "dump": "show what the ranks of this host have in flight, and which ranks hold the others up",
    "top": "show the ranks of this host: steps, waits, staleness, failures",
}
"""The subcommands with their summaries, in the order of `fog --help`.

Module NAME of `fog_cli.commands` has `EXAMPLES`, the end of its help; `add`, which defines its arguments; and `run`.
"""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


class UsageError(Exception):
    """The command line is invalid or cannot be carried out: `main` prints the error and returns 2."""


def number(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Returns what argparse takes as `type`: it accepts finite numbers of a kind in a range."""

    def parse(text: str) -> float:
        value = math.nan
        with contextlib.suppress(ValueError):
            value = kind(text)
        if not least <= value <= most or value == math.inf:
            allowed = f"numbers from {least} on" if most == math.inf else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed are {allowed}")
        return value

    return parse


def count(text: str) -> int:
    """Returns the number that "4K", "25.6M", "7B" or "64Mi" stands for; a `type` of argparse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGbB]?|[kKmMgG]i)", text)
    found = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed are 1000, 4K, 25.6M, 7B, 64Mi and the like")
    return found


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with the cells of each row below each other, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    ]


def version() -> str:
    """The installed version of fogdist."""
    try:
        return importlib.metadata.version("fogdist")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    top = argparse.ArgumentParser(
        prog="fog",
        description="Decentralized training for PyTorch: start ranks, check this machine, look at topologies.",
        epilog="`fog COMMAND --help` has the options and examples of a command.",
    )
    top.add_argument("--version", action="version", version=f"fog {version()}")
    subparsers = top.add_subparsers(dest="command_name", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = importlib.import_module(f"fog_cli.commands.{name}")
        made = subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add(made)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        arguments: The words after `fog`; by default those of this process.

    Returns:
        The exit status: 2 for an invalid command line, otherwise the status that the subcommand returns.
    """
    parsed = parser().parse_args(arguments)
    command = importlib.import_module(f"fog_cli.commands.{parsed.command_name}")
    try:
        status: int = command.run(parsed)
    except UsageError as error:
        print(f"fog {parsed.command_name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fog {parsed.command_name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output closed the pipe, as `head` does
        sys.stderr.close()
        return 141
    return status
