"""`fog topology`: prints the cost of a topology and how fast its ranks reach consensus."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from fog_cli import UsageError, add_command

if TYPE_CHECKING:
    from fogdist.topology import Topology

_EXAMPLES = """\
examples:
  fog topology exp2 -n 16
  fog topology ring -n 8 --bytes 400M            for a model of 400 MB
  fog topology all -n 16                         a table that compares them

Static graphs: {static}.
Sequences of rounds: {sequences}.
docs/topologies.md says which to choose.
"""

# The names of fogdist.topology.named, repeated here because importing it imports torch and networkx. A test compares
# the two lists.
STATIC = (
    "exp", "exp2", "exp3", "exp4", "symexp", "ring", "ring-left", "ring-right", "mesh",
    "star", "full",
)  # fmt: skip
SEQUENCES = (
    "one-peer-exp2",
    "base-2",
    "base-3",
    "base-4",
    "random-matching",
)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def add(subparsers: Any) -> None:
    """Describes the command."""
    parser = add_command(
        subparsers,
        "topology",
        "show what a topology costs",
        "Shows the degree, the spectral gap, the rounds to agreement and the traffic of a topology.",
        _EXAMPLES.format(static=", ".join(STATIC), sequences=", ".join(SEQUENCES)),
    )
    parser.add_argument(
        "name",
        choices=(*STATIC, *SEQUENCES, "all"),
        metavar="NAME",
        help="a topology of the lists below, or all",
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="how many ranks")
    parser.add_argument(
        "--bytes",
        type=byte_count,
        default=byte_count("4M"),
        metavar="SIZE",
        help="size of what is averaged: 1000, 4K, 400M, 1G, 64Mi (default: 4M)",
    )


def byte_count(text: str) -> int:
    """Returns the number of bytes that a text such as "4K" or "64Mi" stands for.

    Raises:
        argparse.ArgumentTypeError: The text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?[iI]?)B?", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; allowed are sizes such as 1000, 4K, 400M, 1G and 64Mi"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def run(arguments: argparse.Namespace) -> int:
    """Prints the numbers."""
    from fogdist.topology import TopologyError, named, summary

    try:
        if arguments.name == "all":
            print(summary(arguments.ranks))
        else:
            print("\n".join(describe(named(arguments.name, arguments.ranks), arguments.bytes)))
    except TopologyError as error:
        raise UsageError(str(error)) from error
    return 0


def describe(topology: Topology, size: int) -> list[str]:
    """Returns lines of text with the cost of a topology for tensors of `size` bytes."""
    exact, near = topology.rounds_to_exact_consensus, topology.rounds_to(1e-6)
    mean = topology.bytes_per_step(1.0)
    period = {None: "never repeats", 1: "the same in each step"}.get(
        topology.period, f"repeats after {topology.period} steps"
    )
    rows = [
        ("ranks", str(topology.size)),
        ("period", period),
        ("degree", f"a rank sends to {topology.max_degree} at most, {mean:.2f} on average"),
        (
            "spectral gap",
            f"{topology.spectral_gap:.4f}"
            + ("" if topology.period in (None, 1) else ", of the product over a period"),
        ),
        ("exact average", "only approached" if exact is None else _after(exact)),
        ("average to 1e-6", "in more than 1000 steps" if near is None else _after(near)),
        ("messages a step", f"{mean * topology.size:.1f} in all, of {_shown(size)}"),
        (
            "bytes a step",
            f"{_shown(mean * size)} sent by a rank on average, {_shown(topology.max_degree * size)} at most",
        ),
    ]
    if near is not None:
        sent = sum(topology.bytes_per_step(size, t) for t in range(near))
        rows.append(("bytes to 1e-6", f"{_shown(sent)} sent by a rank on average"))
    return [topology.name, *(f"  {label:16} {text}" for label, text in rows)]


def _after(steps: int) -> str:
    return f"after {steps} step{'' if steps == 1 else 's'}"


def _shown(size: float) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.3g} B"
