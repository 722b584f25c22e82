"""Injects random faults into processes of a job, by their pids: `python -m fogdist.testing.faults --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fogdist.testing.faults.schedule import FROM_OUTSIDE, Fault, Schedule


def main(arguments: Sequence[str] | None = None) -> int:
    """Injects the faults of the command line, prints each, and returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m fogdist.testing.faults",
        description="Kills, crashes and stops processes of a job at random times.",
    )
    parser.add_argument("pids", nargs="+", type=int, help="the processes of the ranks")
    parser.add_argument("--seconds", type=float, default=60.0, help="when to end (default: 60)")
    parser.add_argument(
        "--every",
        nargs=2,
        type=float,
        default=(0.5, 2.0),
        metavar=("LEAST", "MOST"),
        help="seconds from one fault to the next (default: 0.5 2)",
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=FROM_OUTSIDE, default=["kill"], help="what happens (default: kill)"
    )
    parser.add_argument(
        "--pause",
        nargs=2,
        type=float,
        default=(0.1, 1.0),
        metavar=("LEAST", "MOST"),
        help="seconds of a stop (default: 0.1 1)",
    )
    parser.add_argument("--least-living", type=int, default=1, help="so many live on (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        schedule = Schedule.random(
            options.seed,
            len(options.pids),
            until=options.seconds,
            every=tuple(options.every),
            kinds=options.kinds,
            seconds=tuple(options.pause),
            least_living=options.least_living,
        )
    except ValueError as error:
        parser.error(str(error))

    def inject(fault: Fault) -> None:
        pid = options.pids[fault.rank]
        lasting = f" for {fault.seconds:g} s" if fault.seconds else ""
        print(f"{fault.when:.1f} s: {fault.kind} {pid}{lasting}", flush=True)
        fault.inject(pid)

    happened = schedule.run(inject)
    print(f"{len(happened)} faults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
