"""The command line `fog`. Each subcommand is a module of `fog_cli.commands`; shared code is in this package.

It is a package of its own because importing any module of fogdist imports torch, which takes seconds, and because
`fog doctor` must run where torch or fog cannot be imported. torch, fog_pg and fogdist are imported in functions only, and
in the programs that commands start (`fog_cli.programs`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["COMMANDS", "UsageError", "add_command", "main", "parser", "table"]

COMMANDS = ("run", "doctor", "topology", "bench", "advise", "timeline", "dump", "top")
"""The subcommands, in the order of `fog --help`: module NAME of `fog_cli.commands` has `add` and `run`."""


class UsageError(Exception):
    """The command line is invalid or cannot be carried out: `main` prints the error and returns 2."""


def add_command(
    subparsers: Any, name: str, summary: str, description: str, epilog: str, **options: Any
) -> argparse.ArgumentParser:
    """Adds a subcommand and returns its parser.

    Args:
        subparsers: Of `parser`.
        name: The name of the command.
        summary: What `fog --help` says of it.
        description: The first lines of its help.
        epilog: The last lines, with examples; printed as they are.
        options: Further arguments of argparse.
    """
    raw = argparse.RawDescriptionHelpFormatter
    made: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=description, epilog=epilog, formatter_class=raw, **options
    )
    return made


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
    for name in COMMANDS:
        importlib.import_module(f"fog_cli.commands.{name}").add(subparsers)
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
