"""Times training steps in every mode, with DDP on Gloo, DDP on fog, and no communication for comparison, in one run.

    python benchmarks/training.py                                  # 1 and 4 ranks, about five minutes
    python benchmarks/training.py --ranks 4 --models mlp --modes awc ddp_async
    python benchmarks/training.py --device cuda --back-to-back 20 --traces traces     # one rank on a GPU

Run it without a launcher: it starts its ranks itself, under mpiexec (see side_by_side.py). On each rank every mode has
its own model and optimizer: SGD with momentum, AdamW for gpt2. The modes take turns (see interleaved.py): in one turn all
ranks make --back-to-back training steps in one mode. The time of a turn is from the start of the first rank to the
end of the last one. The data are random and in memory.

    mlp         784 - 1024 - 1024 - 1024 - 10, 2.9 million parameters, batches of 32
    resnet20    ResNet-20 for CIFAR, 0.27 million parameters, batches of 4 images of 3 x 32 x 32
    resnet50    ResNet-50, batches of 32 images of 3 x 224 x 224
    gpt2        GPT-2 124M, batches of 4 x 1024 tokens

The modes are those of examples/modes.py, on the exponential-2 graph or the graph of --topology. "one-peer" is the same
optimizer with one neighbor per step, in turn. "awc timeline" records a timeline in each of its turns, whose start does
not count. "ddp gloo" is torch's DistributedDataParallel on Gloo. A single rank exchanges nothing, so the difference
between a mode and "none" is the mode's overhead in Python.

With --device cuda, the number of a rank selects its GPU, and a step is in bfloat16 by autocast. A single rank then does all
work of a rank with neighbors (hooks, buckets, streams, the exchange), so the difference between a mode and "none" is its
cost. The program ends at once if there is no GPU. If ranks share one, rows say "shared", and the loaded NCCL must allow
that (see docs/measurements/gpu.md).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fogdist
import program
import side_by_side
import torch
from fogdist.context import Context
from interleaved import take_turns
from report import Row
from side_by_side import Systems
from torch import Tensor, nn, profiler

# The examples show how to train in each mode, so they are measured.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))

import devices
import models
from modes import MODES, Setup

BATCHES = 4  # random ones, which are in memory already
TRACED_STEPS = 3
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
ON_GPUS = ["none", "ddp", "awc", "atc", "ddp_sync", "ddp_async", "win_put", "diloco"]


@dataclass(frozen=True)
class Task:
    """A model, and the batches on which it is trained.

    Attributes:
        title: Title for the output.
        make: Makes the model.
        shape: Shape of a batch's inputs.
        classes: Of the labels; of a text also of the inputs.
        is_text: Whether each input has a label of its own.
    """

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 10
    is_text: bool = False

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns inputs and labels."""
        if self.is_text:
            tokens = torch.randint(self.classes, self.shape, generator=generator)
            return tokens, tokens.roll(-1).flatten()
        inputs = torch.randn(self.shape, generator=generator)
        return inputs, torch.randint(self.classes, self.shape[:1], generator=generator)

    def optimizer(self, parameters: object) -> torch.optim.Optimizer:
        """Returns the optimizer of one rank."""
        if self.is_text:
            return torch.optim.AdamW(parameters, lr=1e-4)  # type: ignore[arg-type]
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)  # type: ignore[arg-type]


TASKS = {
    "mlp": Task("MLP of 2.9 M parameters, batch 32", lambda: models.mlp(784, (1024,) * 3), (32, 784)),
    "resnet20": Task("ResNet-20, batch 4", lambda: models.cifar_resnet(20), (4, 3, 32, 32)),
    "resnet50": Task("ResNet-50, batch 32", models.resnet50, (32, 3, 224, 224), 1000),
    "gpt2": Task(
        "GPT-2 124M, 4 x 1024 tokens",
        lambda: models.GPT(50257, 1024, 768, 12, 12),
        (4, 1024),
        50257,
        is_text=True,
    ),
}


def step_of_mode(
    name: str, task: Task, systems: Systems, topology: str, device: torch.device
) -> Callable[[], None]:
    """Sets up a mode; returns a function that makes one step of it. All ranks call this together.

    Args:
        name: The mode's name in SYSTEMS.
        task: The task to train.
        systems: The systems of this run.
        topology: Name of the group's topology, for one-peer modes.
        device: Of the model.
    """
    torch.manual_seed(0)
    model = task.make().to(device)
    sequence = None
    if name.endswith(ONE_PEER):
        sequence = fogdist.topology.one_peer(fogdist.topology.by_name(topology, systems.size))
    mode = MODES[name.removesuffix(ONE_PEER).removesuffix(GLOO).removesuffix(TIMELINE)]
    group = systems.gloo if name.endswith(GLOO) else systems.fog
    trainer = mode.make(Setup(model, task.optimizer, sequence, mode.local_steps or 1, group))
    generator = torch.Generator().manual_seed(systems.rank)  # ranks have different data
    batches = [[each.to(device) for each in task.batch(generator)] for _ in range(BATCHES)]
    steps = itertools.count()

    def step() -> None:
        number = next(steps)
        trainer.prepare(number)
        trainer.optimizer.zero_grad()
        inputs, labels = batches[number % BATCHES]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = nn.functional.cross_entropy(trainer.module(inputs).flatten(0, -2), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()

    return step


def switch_timeline(steps: Mapping[str, Callable[[], None]], prefix: str, mode: str) -> None:
    """Ends the timeline of the turn before, and starts one for a mode that is measured with it."""
    fogdist.timeline.stop()
    if mode.endswith(TIMELINE):
        fogdist.timeline.start(prefix)
        steps[mode]()  # the next call is one of many in a long recording


def trace(step: Callable[[], None], done: Callable[[], None], file: Path) -> None:
    """Writes a chrome trace of some steps, compressed: open it in chrome://tracing or ui.perfetto.dev."""
    with profiler.profile() as found:  # of all activities that torch can see
        for _ in range(TRACED_STEPS):
            step()
        done()
    found.export_chrome_trace(str(file))


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Times all models on a rank, and traces some steps."""
    device = devices.use(arguments.device)  # by the launcher's variables
    systems = side_by_side.join()
    size = systems.size
    fogdist.init(lambda n: fogdist.topology.by_name(arguments.topology, n))
    Context.exchanges_alone = device.type == "cuda"
    is_shared = device.type == "cuda" and size > torch.cuda.device_count()

    def done() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for name in arguments.models:
        task = TASKS[name]
        # One rank has no neighbors to choose from, and no DDP to compare with.
        chosen = [mode for mode in arguments.modes if size > 1 or not mode.endswith((ONE_PEER, GLOO))]
        steps = {mode: step_of_mode(mode, task, systems, arguments.topology, device) for mode in chosen}
        with tempfile.TemporaryDirectory(prefix="fog-timeline-") as folder:
            switch = partial(switch_timeline, steps, f"{folder}/")
            times, turns = take_turns(steps, systems.mpi, arguments, are_long=True, before=switch, after=done)
            fogdist.timeline.stop()
        for mode in chosen if arguments.traces else ():
            file = f"{name}-{mode}-{size}ranks-rank{systems.rank}.json.gz"
            trace(steps[mode], done, arguments.traces / file)
        del steps
        yield Row(task.title + (", shared" if is_shared else ""), size, 0, turns, times)


def text(row: Row) -> str:
    """Returns the times of a row's steps."""
    lines = [f"\n{row.operation}, {row.ranks} ranks, {row.iterations} turns"]
    lines += [f"{'':36}{'ms a step':>11}{'quartiles':>20}{'steps/s':>9}{'x none':>10}"]
    for name, times in row.times.items():
        quartiles = f"{times.lower:.2f} - {times.upper:.2f}"
        ratio = row.ratio("none", name)
        share = "-" if ratio is None else f"{ratio:.3f}"
        lines += [
            f"{SYSTEMS[name]:36}{times.median:>11.2f}{quartiles:>20}{1e3 / times.median:>9.1f}{share:>10}"
        ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line; ends the program where there is no such device."""
    parser = program.parser_of(__doc__)
    program.add_options(parser, ranks=[], seconds=60.0, back_to_back=10)
    program.add_names(parser, "--models", TASKS, [])
    program.add_names(parser, "--modes", SYSTEMS, [])
    parser.add_argument("--topology", default="exp2", help="of fogdist.topology.TOPOLOGY_NAMES")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="takes chrome traces of some steps")
    devices.add_flag(parser)
    arguments = parser.parse_args()
    is_cuda = arguments.device == "cuda"
    arguments.ranks = arguments.ranks or ([1] if is_cuda else [1, 4])
    arguments.models = arguments.models or (["resnet50", "gpt2"] if is_cuda else ["mlp", "resnet20"])
    arguments.modes = arguments.modes or (ON_GPUS if is_cuda else list(SYSTEMS))
    if not arguments.is_rank:
        most, gpus = max(arguments.ranks), torch.cuda.device_count()
        problem = devices.problem(arguments.device)
        if problem is None and is_cuda and most > gpus:
            problem = devices.sharing_problem(f"{most} ranks on {gpus} GPUs")
        if problem:
            parser.error(problem)
        if arguments.traces is not None:
            arguments.traces.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    program.run(__file__, parse_arguments(), measure, text)
