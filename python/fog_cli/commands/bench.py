"""`fog bench`: a small table of this machine."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from fog_cli import UsageError, add_command
from fog_cli import table as columns
from fog_cli.commands.run import check_ranks
from fog_cli.spawn import run_program

_EXAMPLES = """\
examples:
  fog bench                       2 ranks; 4 KB, 1 MB and 16 MB
  fog bench -np 4 --bytes 100M

The times are medians of the slowest rank, over 7 repetitions on this machine only; the ratio is the median of those of
the repetitions, with the lowest and the highest. neighbor_allreduce is along the default
topology; Gloo's is written with isend and irecv. Gloo has no windows. `make benchmark` in fog's checkout measures with
more care.
"""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def add(subparsers: Any) -> None:
    """Describes the command."""
    parser = add_command(
        subparsers,
        "bench",
        "time fog beside Gloo on this machine",
        "Times operations of fog on ranks of this machine, beside Gloo where Gloo has them, in half a minute.",
        _EXAMPLES,
    )
    parser.add_argument(
        "-np", "--num-proc", type=int, default=2, metavar="N", help="how many ranks (default: 2)"
    )
    parser.add_argument(
        "--bytes",
        type=byte_count,
        nargs="+",
        default=[4_000, 1_000_000, 16_000_000],
        metavar="SIZE",
        help="sizes of the tensor: 1000, 4K, 16M, 64Mi (default: 4K 1M 16M)",
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each time is taken (default: 1)")


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
    """Prints the table."""
    check_ranks(arguments.num_proc, 2)
    if not 0 < arguments.seconds <= 60:
        raise UsageError(f"--seconds: got {arguments.seconds}; allowed are numbers above 0, up to 60")
    cores = len(os.sched_getaffinity(0))
    if arguments.num_proc > cores:
        print(
            f"fog bench: {arguments.num_proc} ranks share {cores} cores, and their times say little",
            file=sys.stderr,
        )
    words = [str(arguments.seconds), *map(str, arguments.bytes)]
    limit = 60.0 + 10 * arguments.seconds * 6 * len(arguments.bytes)
    ended = run_program("bench_ranks", words, limit=limit, ranks=arguments.num_proc)
    if why := ended.why():
        print(f"fog bench: {why}. `fog doctor` says more", file=sys.stderr)
        return 1
    print(f"{arguments.num_proc} ranks on {cores} cores")
    print("\n".join(table(ended.objects())))
    return 0


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of the table."""
    cells = [("operation", "bytes", "fog", "Gloo", "Gloo / fog")]
    for row in rows:
        fog, gloo = zip(*row["times"], strict=True)
        ratios = [its / own for own, its in row["times"]] if None not in gloo else []
        cells.append(
            (
                row["name"],
                f"{row['bytes']:,}",
                _shown(statistics.median(fog)),
                _shown(statistics.median(gloo)) if ratios else "-",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                if ratios
                else "-",
            )
        )
    return columns(cells)


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
