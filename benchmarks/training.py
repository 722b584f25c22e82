"""Times training steps in every mode, with DDP on Gloo, DDP on fog, and no communication for comparison, in one run.

    python benchmarks/training.py                                  # 1 and 4 ranks, about five minutes
    python benchmarks/training.py --ranks 4 --models mlp --modes awc ddp_async

Run it without a launcher: it starts its ranks itself, under mpiexec (see side_by_side.py). On each rank every mode has
its own model and optimizer, SGD with momentum. The modes take turns (see interleaved.py): in one turn all ranks make
--back-to-back training steps (10 by default) in one mode. The time of a turn is from the start of the first rank to the
end of the last one. The data are random and in memory.

    mlp         784 - 1024 - 1024 - 1024 - 10, 2.9 million parameters, batches of 32
    resnet20    ResNet-20 for CIFAR, 0.27 million parameters, batches of 4 images of 3 x 32 x 32

The modes are those of examples/modes.py, on the exponential-2 graph or the graph of --topology. "one-peer" is the same
optimizer with one neighbor per step, in turn. "awc timeline" records a timeline in each of its turns, whose start does
not count. "ddp gloo" is torch's DistributedDataParallel on Gloo. A single rank exchanges nothing, so the difference
between a mode and "none" is the mode's overhead in Python.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import program
import side_by_side
from interleaved import take_turns
from report import Row, print_shares, print_steps, write_json

# The examples show how to train in each mode, so they are measured.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))

if TYPE_CHECKING:
    from side_by_side import Systems
    from torch import nn

CLASSES = 10
BATCHES = 4  # random ones, which are in memory already
ONE_PEER = " one-peer"
GLOO = " gloo"
TIMELINE = " timeline"
# Headings, by name.
SYSTEMS = {
    "none": "no communication",
    "ddp gloo": "DDP on Gloo",
    "ddp": "DDP on fog",
    "awc": "AWC, static",
    "awc one-peer": "AWC, one-peer",
    "awc timeline": "AWC, static, with a timeline",
    "atc": "ATC, static",
    "atc one-peer": "ATC, one-peer",
    "ddp_sync": "Decentralized DDP, sync",
    "ddp_sync one-peer": "Decentralized DDP, sync, one-peer",
    "ddp_async": "Decentralized DDP, async",
    "gossip_hook": "DDP with gossip hook",
    "win_put": "win_put",
    "win_put one-peer": "win_put, one-peer",
    "push_sum": "push-sum",
    "local_sgd": "local SGD, 8 steps",
    "diloco": "DiLoCo, 16 steps",
}
NEIGHBOR_MODES = [
    name
    for name in SYSTEMS
    if name.split()[0] in ("awc", "atc", "ddp_sync", "ddp_async", "gossip_hook", "win_put", "push_sum")
]
# The goal for the steps per second, relative to those without communication.
SPEED_GOAL = 0.8
# The goal for the step time on one rank, relative to that of the optimizer alone.
OVERHEAD_GOAL = 1.05


@dataclass(frozen=True)
class Task:
    """A model, and the batches on which it is trained.

    Attributes:
        title: Title for the output.
        shape: Shape of a batch's inputs.
        make: Makes the model.
    """

    title: str
    shape: tuple[int, ...]
    make: Callable[[], nn.Module]


def _mlp() -> nn.Module:
    from models import mlp

    return mlp(784, (1024, 1024, 1024))


def _resnet20() -> nn.Module:
    from models import cifar_resnet

    return cifar_resnet(20)


TASKS = {
    "mlp": Task("MLP of 2.9 M parameters, batch 32", (32, 784), _mlp),
    "resnet20": Task("ResNet-20, batch 4", (4, 3, 32, 32), _resnet20),
}


def step_of_mode(name: str, task: Task, systems: Systems, topology: str) -> Callable[[], None]:
    """Sets up a mode; returns a function that makes one step of it. All ranks call this together.

    Args:
        name: The mode's name in SYSTEMS.
        task: The task to train.
        systems: The systems of this run.
        topology: Name of the group's topology, for one-peer modes.
    """
    import fogdist
    import torch
    from modes import MODES, Setup

    torch.manual_seed(0)
    model = task.make()
    sequence = None
    if name.endswith(ONE_PEER):
        sequence = fogdist.topology.one_peer(fogdist.topology.by_name(topology, systems.size))
    mode = MODES[name.removesuffix(ONE_PEER).removesuffix(GLOO).removesuffix(TIMELINE)]
    trainer = mode.make(
        Setup(
            model,
            lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            sequence,
            mode.local_steps or 1,
            systems.gloo if name.endswith(GLOO) else systems.fog,
        )
    )
    generator = torch.Generator().manual_seed(systems.rank)  # ranks have different data
    inputs = [torch.randn(task.shape, generator=generator) for _ in range(BATCHES)]
    labels = [torch.randint(CLASSES, task.shape[:1], generator=generator) for _ in range(BATCHES)]
    steps = itertools.count()

    def step() -> None:
        number = next(steps)
        trainer.prepare(number)
        trainer.optimizer.zero_grad()
        place = number % BATCHES
        torch.nn.functional.cross_entropy(trainer.module(inputs[place]), labels[place]).backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()

    return step


def switch_timeline(steps: Mapping[str, Callable[[], None]], prefix: str, mode: str) -> None:
    """Ends the timeline of the turn before, and starts one for a mode that is measured with it."""
    import fogdist

    fogdist.timeline.stop()
    if mode.endswith(TIMELINE):
        fogdist.timeline.start(prefix)
        steps[mode]()  # the next call is one of many in a long recording


def measure_all(arguments: argparse.Namespace) -> None:
    """Measures on a rank."""
    import fogdist

    systems = side_by_side.join()
    size = systems.size
    fogdist.init(lambda n: fogdist.topology.by_name(arguments.topology, n))
    rows: list[Row] = []
    for name in arguments.models:
        task = TASKS[name]
        # One rank has no neighbors to choose from, and no DDP to compare with.
        modes = [mode for mode in arguments.modes if size > 1 or not mode.endswith((ONE_PEER, GLOO))]
        steps = {mode: step_of_mode(mode, task, systems, arguments.topology) for mode in modes}
        with tempfile.TemporaryDirectory(prefix="fog-timeline-") as folder:
            switch = partial(switch_timeline, steps, f"{folder}/")
            times, iterations = take_turns(steps, systems.mpi, arguments, are_long=True, before=switch)
            fogdist.timeline.stop()
        elements = sum(parameter.numel() for parameter in task.make().parameters())
        rows.append(Row(task.title, size, "float32", elements, 4 * elements, 0, iterations, times))
        if systems.rank == 0:
            head = f"{task.title}, {size} ranks, {os.cpu_count()} cores"
            print_steps(head, rows[-1], SYSTEMS, "x none", partial(rows[-1].ratio, "none"))
        del steps
    if systems.rank == 0:
        write_json(arguments.rows, program.facts(), rows)
    fogdist.shutdown()
    side_by_side.leave()


def print_goals(rows: Sequence[Row]) -> None:
    """Prints which modes reach the goals: beside others, and of modes that have nobody to talk to."""
    for row in rows:
        head = f"{row.operation}, {row.ranks} ranks"
        if row.ranks > 1:
            print_shares(head, row, SYSTEMS, NEIGHBOR_MODES, SPEED_GOAL)
        else:
            print_shares(head, row, SYSTEMS, [name for name in SYSTEMS if name != "none"], 1 / OVERHEAD_GOAL)


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    program.add_options(parser, ranks=[1, 4], seconds=60.0, has_sizes=False, back_to_back=10)
    program.add_names(parser, "--models", TASKS)
    program.add_names(parser, "--modes", SYSTEMS)
    parser.add_argument("--topology", default="exp2", help="of fogdist.topology.TOPOLOGY_NAMES")
    return program.parse_options(parser)


def main() -> None:
    """Starts the ranks of each world and compares the results with the goals; on a rank, measures."""
    rows = program.run(Path(__file__), parse_arguments(), measure_all, SYSTEMS)
    print_goals(rows)


if __name__ == "__main__":
    main()
