"""Common parts of the benchmark programs: options, facts about the run, the worlds of ranks."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fogdist
import side_by_side
import torch
import torch.distributed as dist
from report import Row, parse_size, write

# The load average above which other programs are assumed to run.
BUSY = 0.7


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a program's command line, whose help is the program's docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_names(
    parser: argparse.ArgumentParser, flag: str, names: Iterable[str], default: Iterable[str] | None = None
) -> None:
    """Adds an option that takes some of these names, by default all of them."""
    known = list(names)
    chosen = known if default is None else list(default)
    text = ", ".join(known).replace("%", "%%")
    parser.add_argument(flag, nargs="+", choices=known, default=chosen, metavar="NAME", help=text)


def add_options(
    parser: argparse.ArgumentParser,
    *,
    ranks: Sequence[int],
    seconds: float,
    sizes: Sequence[int] | None = None,
    back_to_back: int = 1,
) -> None:
    """Adds the options of the programs whose ranks take turns (interleaved.py).

    Args:
        parser: Parser of the program.
        ranks: Default numbers of ranks.
        seconds: Default time for one row.
        sizes: Default sizes; None for a program that measures no sizes.
        back_to_back: Default number of operations in one measurement.
    """
    add = parser.add_argument
    add("--ranks", type=at_least(1), nargs="+", default=list(ranks), help="numbers of ranks")
    if sizes is not None:
        add("--sizes", type=parse_size, nargs="+", default=sizes, metavar="BYTES", help="such as 4, 64K, 16M")
    add("--seconds", type=float, default=seconds, help="time to measure one row")
    add("--iterations", type=at_least(1), help="number of measurements instead")
    add(
        "--back-to-back",
        type=at_least(1),
        default=back_to_back,
        metavar="N",
        help="operations in one of them",
    )
    add("--json", type=Path, help="file for the numbers")
    # Tells this process that it is a rank.
    add("--is-rank", action="store_true", help=argparse.SUPPRESS)


def add_pause(parser: argparse.ArgumentParser) -> None:
    """Adds the option of programs that can measure operations after a pause."""
    what = "milliseconds that ranks sleep before each measurement"
    parser.add_argument("--pause", type=float, default=0.0, metavar="MS", help=what)


def at_least(least: int) -> Callable[[str], int]:
    """Returns the type of an option that is an integer of at least so much."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text}; must be {least} or more")
        return int(text)

    return number


def positive(text: str) -> float:
    """The type of an option that is a positive number."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"got {text}; must be positive")
    return float(text)


def facts() -> dict[str, Any]:
    """Returns facts about the run for readers of the numbers; warns if other programs run."""
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"load average {load:.1f} before the start: other programs run, and these numbers contain them")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpich": importlib.metadata.version("mpich"),
        "load average before": round(load, 2),
    }


def run(
    script: str,
    arguments: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Iterator[Row]],
    line: Callable[[Row], str],
    heading: str = "",
    run_ranks: Callable[[int, Path, Sequence[str]], None] = side_by_side.run_ranks,
) -> None:
    """Starts the ranks of each world in turn, which print and write their measurements; on a rank, measures.

    Args:
        script: The calling program; its ranks run it again, with this process's command line.
        arguments: Of the options of `add_options`, and more.
        measure: Runs on each rank, starts its systems, and yields rows; those of rank 0 count.
        line: Makes the text of a row.
        heading: Of these lines.
        run_ranks: Starts the ranks of one world, given their number, the program and its command line.
    """
    if arguments.is_rank:
        from mpi4py import MPI  # starts raw MPI with the launcher's variables

        for row in measure(arguments):
            if MPI.COMM_WORLD.rank == 0:
                print(line(row), flush=True)
                if arguments.json:
                    before = json.loads(arguments.json.read_text())
                    write(arguments.json, **before | {"rows": [*before["rows"], asdict(row)]})
        fogdist.shutdown()
        dist.barrier()
        dist.destroy_process_group()  # raw MPI ends with the process
        return
    side_by_side.require("mpi4py")
    about = facts()
    if arguments.json:
        write(arguments.json, facts=about, rows=[])
    for ranks in arguments.ranks:
        print(f"\n{ranks} ranks, {os.cpu_count()} cores, milliseconds\n{heading}", flush=True)
        run_ranks(ranks, Path(script), [*sys.argv[1:], "--is-rank"])
