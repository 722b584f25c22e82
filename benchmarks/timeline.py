"""Times the cost of a timeline: the same operations and training steps with FOG_TIMELINE's recording on and off.

    python benchmarks/timeline.py                               # 2 and 4 ranks, some five minutes
    python benchmarks/timeline.py --ranks 2 --seconds 60 --json timeline.json

Run it as a plain program: it starts its ranks itself, under mpiexec (see side_by_side.py). Turns with and without a
timeline alternate in a random order (see interleaved.py). Each turn with a timeline writes a new file. The start of the
file, its end and one call after the start do not count; the writing thread runs within the turn and counts.

    step                an AWC step of an MLP of 2.9 million parameters, batches of 32, as in training.py
    neighbor_allreduce  blocking, the exponential-2 graph, 4 KiB and 4 MiB: the operation alone, without any compute

The goal is for the step: at most 1.02 of the time without a timeline.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import program
import side_by_side
from goals import Goal, print_goals
from interleaved import take_turns
from report import Row, Table, write_json
from training import TASKS, step_of_mode

SYSTEMS = {"on": "timeline on", "off": "timeline off"}
TABLE = Table(SYSTEMS, [("on", "off")])
# Calls of a turn, by elements of float32. A turn is long beside the few milliseconds after the start of a timeline in
# which its thread and its memory are new.
EXCHANGES = {1 << 10: 4000, 1 << 20: 200}
STEPS = 40
GOAL = 1.02


def measure_all(arguments: argparse.Namespace) -> None:
    """Measures everything in one rank."""
    import fogdist
    import torch

    systems = side_by_side.join()
    fogdist.init(lambda n: fogdist.topology.by_name("exp2", n))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="fog-timeline-") as folder:

        def measure(operation: str, elements: int, work: Callable[[], object], calls: int) -> None:
            def switch(name: str) -> None:
                fogdist.timeline.stop()
                if name == "on":
                    fogdist.timeline.start(f"{folder}/")
                work()  # the next call is one of many in a long recording

            times, iterations = take_turns(
                dict.fromkeys(SYSTEMS, work),
                systems.mpi,
                arguments,
                back_to_back=calls,
                are_long=True,
                before=switch,
            )
            fogdist.timeline.stop()
            rows.append(Row(operation, systems.size, "float32", elements, 4 * elements, 0, iterations, times))
            if systems.rank == 0:
                print(TABLE.line(rows[-1]), flush=True)

        if systems.rank == 0:
            print(f"\n{systems.size} ranks, ms\n{TABLE.heading()}")
        task = TASKS["mlp"]
        measure("step", 0, step_of_mode("awc", task, systems, "exp2"), STEPS)
        for elements, calls in EXCHANGES.items():
            tensor = torch.ones(elements)
            measure("neighbor_allreduce", elements, partial(fogdist.neighbor_allreduce, tensor), calls)
    if systems.rank == 0:
        write_json(arguments.rows, program.facts(), rows)
    fogdist.shutdown()
    side_by_side.leave()


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    program.add_options(parser, ranks=[2, 4], seconds=25.0, has_sizes=False)
    return program.parse_options(parser)


def main() -> None:
    """Starts the ranks of each world, then compares the results with the goal; in a rank, measures."""
    arguments = parse_arguments()
    rows = program.run(Path(__file__), arguments, measure_all, SYSTEMS)
    print_goals([Goal("step", ranks, 0, "on", "off", GOAL) for ranks in arguments.ranks], rows, SYSTEMS)


if __name__ == "__main__":
    main()
