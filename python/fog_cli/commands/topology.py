"""`fog topology`: prints the costs of topologies and how fast their ranks reach consensus."""

from __future__ import annotations

import argparse

from fog_cli import UsageError

EXAMPLES = """\
examples:
  fog topology exp2 -n 16
  fog topology exp2 ring base-3 -n 16
  fog topology all -n 16

Names: ring, ring-right, mesh, star, symexp, exp2, full, one-peer-exp2, base-2, base-3, random-matching.
docs/topologies.md explains the columns, and says which to choose.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Describes the arguments."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="topologies of the list below, or all")
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="how many ranks")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table."""
    from fogdist.topology import TopologyError, named, summary

    chosen = None if "all" in arguments.names else arguments.names
    try:
        print(summary(arguments.ranks, chosen and [named(name, arguments.ranks) for name in chosen]))
    except TopologyError as error:
        raise UsageError(str(error)) from error
    return 0
