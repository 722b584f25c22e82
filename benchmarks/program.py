"""Common parts of the benchmark programs: options, facts about the run, the worlds of ranks, output files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import side_by_side
from report import Row, parse_size, plot, read_rows, write_json

# The load average above which other programs are assumed to run.
BUSY = 0.7


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a program's command line, whose help is the program's docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_names(
    parser: argparse.ArgumentParser,
    flag: str,
    names: Iterable[str],
    default: Iterable[str] | None = None,
    help: str | None = None,
) -> None:
    """Adds an option that takes some of these names, by default all of them."""
    known = list(names)
    chosen = known if default is None else list(default)
    text = help or ", ".join(known)
    parser.add_argument(flag, nargs="+", choices=known, default=chosen, metavar="NAME", help=text)


def add_options(
    parser: argparse.ArgumentParser,
    *,
    ranks: Sequence[int],
    seconds: float,
    has_sizes: bool = True,
    has_pause: bool = False,
    back_to_back: int = 1,
) -> None:
    """Adds the options that every benchmark has.

    Args:
        parser: Parser of the program.
        ranks: Default numbers of ranks.
        seconds: Default time for one row.
        has_sizes: Whether the program measures several sizes.
        has_pause: Whether the program can measure operations after a pause.
        back_to_back: Default number of operations in one measurement.
    """
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=list(ranks), help="numbers of ranks")
    if has_sizes:
        add("--sizes", type=parse_size, nargs="+", metavar="BYTES", help="such as 4, 64K, 16M")
    add("--seconds", type=float, default=seconds, help="time to measure one row")
    add("--iterations", type=int, help="number of measurements instead")
    add("--back-to-back", type=int, default=back_to_back, metavar="N", help="operations in one measurement")
    if has_pause:
        add(
            "--pause",
            type=float,
            default=0.0,
            metavar="MS",
            help="milliseconds that ranks sleep before each measurement",
        )
    add("--json", type=Path, help="file for the numbers")
    add("--plot", type=Path, help="file for a picture")
    # Tells this process that it is a rank, and where to write its rows.
    add("--rows", type=Path, help=argparse.SUPPRESS)


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the command line; ends the program if a number of calls is not positive."""
    arguments = parser.parse_args()
    for name in ("iterations", "back_to_back"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: {value}; must be 1 or more")
    return arguments


def load_before() -> float:
    """Returns the load average, and warns if other programs run."""
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"load average {load:.1f} before the start: other programs run, and these numbers contain them")
    return load


def facts() -> dict[str, object]:
    """Returns facts about the run for readers of the numbers; on a rank that uses raw MPI, also its version."""
    import torch

    from fog_pg import _C

    raw = sys.modules.get("mpi4py.MPI")

    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"mpi": raw.Get_library_version().splitlines()[0]} if raw else {}),
        "mpi of fog": _C.mpi_version().splitlines()[0],
    }


def run(
    script: Path,
    arguments: argparse.Namespace,
    measure: Callable[[argparse.Namespace], None],
    systems: Mapping[str, str],
    run_ranks: Callable[[int, Path, Sequence[str]], None] = side_by_side.run_ranks,
) -> list[Row]:
    """Starts the ranks of each world in turn, and writes their measurements; on a rank, measures.

    Args:
        script: The calling program; its ranks run it again, with this process's command line.
        arguments: From `parse_options`.
        measure: Runs on a rank; rank 0 writes its rows to `arguments.rows`.
        systems: Systems of the plot, as in `report.Table`.
        run_ranks: Starts the ranks of one world, given their number, the program and its command line.

    Returns:
        The rows of all worlds; none on a rank.
    """
    if arguments.rows is not None:
        measure(arguments)
        return []
    side_by_side.require("mpi4py", *(["matplotlib"] if arguments.plot else []))
    load = load_before()
    rows: list[Row] = []
    about: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="fog-benchmark-") as directory:
        for ranks in arguments.ranks:
            file = Path(directory) / f"{ranks}.json"
            run_ranks(ranks, script, [*sys.argv[1:], "--rows", str(file)])
            rows += read_rows(file)
            about = {key: value for key, value in json.loads(file.read_text()).items() if key != "rows"}
    if arguments.json:
        write_json(arguments.json, {**about, "load average before": load}, rows)
    if arguments.plot:
        plot(arguments.plot, rows, systems)
    return rows
