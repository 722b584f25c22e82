"""`fog bench`: a small table of this machine."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from fog_cli import count, number
from fog_cli import table as columns
from fog_cli.spawn import run_program

EXAMPLES = """\
examples:
  fog bench                       2 ranks; 4 KB, 1 MB and 16 MB
  fog bench -np 4 --bytes 100M

The times are medians of the slowest rank, over 7 repetitions on this machine only; the ratio is the median of those of
the repetitions, with the lowest and the highest. neighbor_allreduce is along the default
topology; Gloo's is written with isend and irecv. Gloo has no windows. `make benchmark` in the folder of fog's sources measures with
more care.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Describes the arguments."""
    parser.add_argument(
        "-np", "--num-proc", type=number(int, 2), default=2, metavar="N", help="how many ranks (default: 2)"
    )
    parser.add_argument(
        "--bytes",
        type=count,
        nargs="+",
        default=[4_000, 1_000_000, 16_000_000],
        metavar="SIZE",
        help="sizes of the tensor: 1000, 4K, 16M, 64Mi (default: 4K 1M 16M)",
    )
    parser.add_argument(
        "--seconds",
        type=number(float, 0.001, 60),
        default=1.0,
        help="how long each time is taken (default: 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the table."""
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
