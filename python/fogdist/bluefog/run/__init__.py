"""`bluefog.run`: `bfrun`, which is `fog run` with BlueFog's names for the script; `ibfrun` is `fogdist.interactive`."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence

from fogdist import bluefog, interactive


def fog_run(words: Sequence[str]) -> list[str]:
    """Returns the words of `fog run` for those of `bfrun`.

    fog has no use for `--use-infiniband`, as UCX finds the network itself, nor for `--extra-mpi-flags`, as no launcher of MPI
    starts the ranks. `fog run` has all other options, or a variable for what they do.
    """
    parser = argparse.ArgumentParser(prog="bfrun", allow_abbrev=False, add_help=False)
    parser.add_argument("-v", "--version", action="version", version=bluefog.__version__)
    parser.add_argument("--use-infiniband", action="store_true")
    parser.add_argument("--extra-mpi-flags", default="")
    for option in (("-np", "--num-proc"), ("-p", "--ssh-port"), ("--network-interface",)):
        parser.add_argument(*option)
    parser.add_argument("--prefix", type=shlex.split, default=[])
    parser.add_argument("-H", "--hosts")
    parser.add_argument("-hostfile", "--hostfile")
    parser.add_argument("--timeline-filename")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = vars(parser.parse_args(words))
    command = given.pop("command")
    prefix, timeline, verbose = given.pop("prefix"), given.pop("timeline_filename"), given.pop("verbose")
    for unused in ("use_infiniband", "extra_mpi_flags"):
        given.pop(unused)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value]
    if timeline:
        options.append(f"-xFOG_TIMELINE={timeline}")
    if verbose:
        options.append("-xFOG_LOG_LEVEL=debug")
    first, *rest = command or [""]
    if os.path.basename(first).startswith("python"):
        command = rest
    elif first and not os.path.exists(first):
        command = [shutil.which(first) or first, *rest]  # a program in Python, such as pytest
    interpreter = [*prefix, sys.executable] if prefix else []
    return [*options, *interpreter, "-m", "fogdist.bluefog", *command]


def interrupt_hanged_processes(profile: str = "bluefog") -> None:
    """As `fogdist.interactive.Cluster.interrupt`, of all clusters of this process; `profile` is not used."""
    clusters = interactive.running()
    if not clusters:
        raise RuntimeError(
            "this process has started no ranks to interrupt: fogdist.interactive.start(4) does what `ibfrun start -np 4` did"
        )
    for cluster in clusters:
        cluster.interrupt()


def main() -> None:
    """Runs the command line of this process in place of it."""
    os.execv(sys.executable, [sys.executable, "-m", "fog_cli", "run", *fog_run(sys.argv[1:])])
