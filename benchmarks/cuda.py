"""Compares fog on GPUs with plain torch.distributed on NCCL, and training steps with the bare optimizer, in one run.

    python benchmarks/cuda.py                                    # one rank, then one rank per GPU, or 2 on a single one
    python benchmarks/cuda.py --ranks 2 --parts neighbor --sizes 64K 16M
    python benchmarks/cuda.py --parts training --models gpt2 --traces traces     # chrome traces of some modes
    python benchmarks/cuda.py --device cpu --parts collectives   # the same code with Gloo in place of NCCL

Run it without a launcher: it starts its ranks itself, under mpiexec (see side_by_side.py), and the number of a rank
selects its GPU. With --device cuda, the default, it ends at once if there is no GPU. If ranks share a GPU, rows say
"shared", and the loaded NCCL must allow that (see docs/measurements/gpu.md), or these ranks are skipped. The implementations take
turns (see interleaved.py). A turn is --back-to-back calls, after which the host waits for the device. The time of a call
is the longest one of all ranks.

The parts, and the columns of times in milliseconds:

    collectives    allreduce in place. fog: dist.all_reduce on fog; torch: the same on a group of NCCL
    neighbor       fog: fogdist.neighbor_allreduce along a ring, the exponential-2 graph, or one peer of it per call;
                   torch: batch_isend_irecv of the same messages, then x * w and one add_ for each neighbor
    training       steps of ResNet-50 (32 images of 224 x 224) and GPT-2 124M (4 x 1024 tokens) in bfloat16 autocast:
                   "none" is the bare optimizer, the others are modes of examples/modes.py. A single rank does all
                   work of a rank with neighbors (hooks, buckets, streams, the exchange), so the difference between a
                   mode and "none" is its cost

The first results of all implementations are compared before the measurements.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import program
import side_by_side
from interleaved import Times, take_turns
from report import Row, Table, print_shares, print_steps, write_json

# The examples show how to train in each mode, and how a rank finds its GPU.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from side_by_side import Systems
    from torch import Tensor, nn

Way = Callable[[], object]

PARTS = ("collectives", "neighbor", "training")
SYSTEMS = {"fog": "fog", "torch": "torch"}
TABLE = Table(SYSTEMS, [("fog", "torch")])
SIZES = [4 << 10, 256 << 10, 4 << 20, 64 << 20]
EXCHANGES = ("ring", "exp2", "one-peer")
# The goal for the time of a step on one rank, relative to the bare optimizer.
OVERHEAD_GOAL = 1.03
MODE_TITLES = {
    "none": "bare optimizer",
    "ddp": "DDP on fog",
    "awc": "AWC",
    "atc": "ATC",
    "ddp_sync": "Decentralized DDP, sync",
    "ddp_async": "Decentralized DDP, async",
    "win_put": "win_put",
    "diloco": "DiLoCo",
}
# The number of steps in a trace.
TRACED = 3
TRACED_MODES = ("none", "awc", "ddp_sync")


# --- the machine --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The groups and the device of a rank.

    Attributes:
        systems: Groups of this run.
        peer: Group of plain torch.distributed: NCCL for cuda, Gloo for the CPU.
        device: This rank's device.
        is_shared: Whether ranks share a GPU.
    """

    systems: Systems
    peer: dist.ProcessGroup
    device: torch.device
    is_shared: bool

    @property
    def rank(self) -> int:
        """This rank."""
        return self.systems.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.systems.size


def synchronize(device: torch.device) -> None:
    """Waits until the device has completed its work."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(
    ways: Mapping[str, Way], place: Place, arguments: argparse.Namespace, *, are_long: bool = False
) -> tuple[dict[str, Times], int]:
    """Times several implementations; all ranks call this together. A turn ends when the device is done.

    Returns:
        The times of one call by implementation, and the number of turns.
    """
    count = arguments.back_to_back

    def turn(way: Way) -> Way:
        def run() -> None:
            for _ in range(count):
                way()
            synchronize(place.device)

        return run

    times, iterations = take_turns(
        {name: turn(way) for name, way in ways.items()},
        place.systems.mpi,
        arguments,
        back_to_back=1,
        are_long=are_long,
    )
    return {
        name: Times(t.median / count, t.lower / count, t.upper / count) for name, t in times.items()
    }, iterations


def parts_of(parts: Sequence[str], device: str, ranks: int) -> tuple[list[str], str | None]:
    """Returns the parts that this number of ranks can measure on this machine, and the reason for skipping the others.

    Args:
        parts: Names in PARTS.
        device: The type of device.
        ranks: The number of ranks.
    """
    import devices
    import torch

    kept = [part for part in parts if ranks > 1 or part != "neighbor"]
    gpus = torch.cuda.device_count() if device == "cuda" else ranks
    if ranks <= gpus or not kept:
        return kept, None
    problem = devices.sharing_problem(f"{', '.join(kept)} with {ranks} ranks on {gpus} GPUs")
    return (kept, None) if problem is None else ([], problem)


def join(device_type: str) -> Place:
    """Starts the groups in this rank."""
    import devices
    import torch
    import torch.distributed as dist

    device = devices.use(device_type)
    systems = side_by_side.join()
    peer = systems.gloo
    if device.type == "cuda":
        peer = dist.new_group(backend="nccl", timeout=side_by_side.TIMEOUT, device_id=device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else systems.size
    return Place(systems, peer, device, systems.size > gpus)


def check_same(what: str, place: Place, found: Tensor, expected: Tensor) -> None:
    """Raises RuntimeError if two implementations have different results."""
    import torch

    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(found.dtype, 3e-2)
    if not torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance):
        difference = float((found.double() - expected.double()).abs().max())
        raise RuntimeError(f"{what}: fog and torch differ by {difference} on rank {place.rank}")


# --- operations ---------------------------------------------------------------------------------------------


# One row of the table before it is timed: its name, the implementations, and the bytes that all ranks must read and write.
Case = tuple[str, dict[str, Way], int]


def collectives(place: Place, dtype: torch.dtype, elements: int) -> Iterator[Case]:
    """allreduce."""
    import torch
    import torch.distributed as dist

    fog = torch.full((elements,), 1.0 + place.rank, dtype=dtype, device=place.device)
    plain = fog.clone()
    dist.all_reduce(fog, group=place.systems.fog)
    dist.all_reduce(plain, group=place.peer)
    check_same("allreduce", place, fog, plain)
    fog.zero_(), plain.zero_()  # repeated sums would overflow the dtype
    ways: dict[str, Way] = {
        "fog": lambda: dist.all_reduce(fog, group=place.systems.fog),
        "torch": lambda: dist.all_reduce(plain, group=place.peer),
    }
    yield "allreduce", ways, 2 * place.size * fog.nbytes


def neighbor(
    place: Place, dtype: torch.dtype, elements: int, names: Sequence[str] = EXCHANGES
) -> Iterator[Case]:
    """Returns the exchanges with neighbors; none for a single rank."""
    import fogdist
    import torch

    if place.size == 1:
        return
    generator = torch.Generator().manual_seed(place.rank)
    x = torch.randn(elements, generator=generator).to(place.device, dtype)
    for name in names:
        sequence = fogdist.topology.one_peer_exponential(place.size) if name == "one-peer" else None
        if sequence is None:
            fogdist.set_topology(fogdist.topology.by_name(name, place.size))
        ways = {"fog": _on_fogdist(place, x, sequence), "torch": _on_torch(place, x, sequence)}
        for _ in range(3):
            results = {way: exchange() for way, exchange in ways.items()}
            check_same(name, place, results["fog"], results["torch"])
        degree = 1 if sequence is not None else len(fogdist.in_neighbor_ranks())
        yield name, {**ways}, place.size * (degree + 2) * x.nbytes


def _peers_of(place: Place, sequence: Any) -> Iterator[tuple[float, list[int], list[int]]]:
    """Of each call: the weight of every tensor, sources and destinations."""
    import fogdist

    for t in itertools.count():
        if sequence is None:
            sources, destinations = fogdist.in_neighbor_ranks(), fogdist.out_neighbor_ranks()
            yield 1 / (len(sources) + 1), sources, destinations
        else:
            peers = sequence.peers(place.rank, t)
            yield peers["self_weight"], list(peers["src_weights"]), list(peers["dst_weights"])


def _on_fogdist(place: Place, x: Tensor, sequence: Any) -> Callable[[], Tensor]:
    import fogdist

    if sequence is None:
        return lambda: fogdist.neighbor_allreduce(x)
    rounds = itertools.count()

    def exchange() -> Tensor:
        result: Tensor = fogdist.neighbor_allreduce(
            x, **sequence.peers(place.rank, next(rounds)), enable_topo_check=False
        )
        return result

    return exchange


def _on_torch(place: Place, x: Tensor, sequence: Any) -> Callable[[], Tensor]:
    import torch
    import torch.distributed as dist

    rounds = _peers_of(place, sequence)
    received: list[Tensor] = []

    def exchange() -> Tensor:
        weight, sources, destinations = next(rounds)
        while len(received) < len(sources):
            received.append(torch.empty_like(x))
        messages = [dist.P2POp(dist.isend, x, peer, group=place.peer) for peer in destinations]
        messages += [
            dist.P2POp(dist.irecv, buffer, peer, group=place.peer)
            for buffer, peer in zip(received, sources, strict=False)
        ]
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        result = x * weight
        for buffer in received[: len(sources)]:
            result.add_(buffer, alpha=weight)
        return result

    return exchange


def named(operation: str, place: Place) -> str:
    """What a row says that it measured."""
    return f"{operation}, shared" if place.is_shared else operation


OPERATIONS: dict[str, Callable[[Place, torch.dtype, int], Iterator[Case]]] = {
    "collectives": collectives,
    "neighbor": neighbor,
}


def measure_operations(place: Place, arguments: argparse.Namespace) -> list[Row]:
    """Times all parts except training; rank 0 prints."""
    import torch

    rows: list[Row] = []
    parts = [
        part for part in arguments.parts if part in OPERATIONS and (place.size > 1 or part != "neighbor")
    ]
    for part, name, size in itertools.product(parts, arguments.dtypes, arguments.sizes):
        dtype: torch.dtype = getattr(torch, name)
        elements = max(1, size // dtype.itemsize)
        for operation, ways, moved in OPERATIONS[part](place, dtype, elements):
            times, iterations = timed(ways, place, arguments)
            title, bytes_ = named(operation, place), elements * dtype.itemsize
            rows.append(Row(title, place.size, name, elements, bytes_, moved, iterations, times))
            if place.rank == 0:
                print(TABLE.line(rows[-1]), flush=True)
    return rows


# --- training -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model, its batches, its optimizer and its loss.

    Attributes:
        title: The title in the output.
        make: Makes the model, and a batch of inputs and targets.
        optimizer: Makes the optimizer.
        loss: The loss of outputs and targets.
    """

    title: str
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]


def _resnet50() -> tuple[nn.Module, Tensor, Tensor]:
    import torch
    from models import resnet50

    return resnet50(), torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))


def _gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    import torch
    from models import GPT

    tokens = torch.randint(50257, (4, 1025))
    return GPT(50257, 1024, 768, 12, 12), tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


def _mlp() -> tuple[nn.Module, Tensor, Tensor]:
    import torch
    from models import mlp

    return mlp(784, (128,)), torch.randn(32, 784), torch.randint(10, (32,))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets)


TASKS = {
    "resnet50": Task("ResNet-50, batch 32", _resnet50, _sgd, _cross_entropy),
    "gpt2": Task("GPT-2 124M, 4 x 1024 tokens", _gpt2, _adamw, _cross_entropy),
    "mlp": Task("MLP of 0.1 M parameters, batch 32", _mlp, _sgd, _cross_entropy),
}


def step_of_mode(name: str, task: Task, place: Place, precision: str) -> tuple[Way, Way, int]:
    """Sets a mode up; returns its step, its end, and the number of parameters. All ranks call this together."""
    import torch
    from modes import MODES, Setup

    torch.manual_seed(0)
    model, inputs, targets = task.make()
    model.to(place.device)
    inputs, targets = inputs.to(place.device), targets.to(place.device)
    mode = MODES[name]
    trainer = mode.make(Setup(model, task.optimizer, None, mode.local_steps or 1, place.systems.fog))
    rounds = itertools.count()

    def autocast() -> AbstractContextManager[object]:
        if precision == "float32":
            return nullcontext()
        return torch.autocast(place.device.type, getattr(torch, precision))

    def step() -> None:
        trainer.prepare(next(rounds))
        trainer.optimizer.zero_grad()
        with autocast():
            loss = task.loss(trainer.module(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()

    return step, trainer.finish, sum(parameter.numel() for parameter in model.parameters())


def measure_training(place: Place, arguments: argparse.Namespace) -> list[Row]:
    """Times training steps, and traces some; rank 0 prints."""
    import fogdist

    fogdist.set_topology(fogdist.topology.by_name("exp2", place.size))
    rows: list[Row] = []
    for name in arguments.models:
        task = TASKS[name]
        steps: dict[str, Way] = {}
        ends: list[Way] = []
        count = 0
        for mode in arguments.modes:
            steps[mode], end, count = step_of_mode(mode, task, place, arguments.precision)
            ends.append(end)
        times, iterations = timed(steps, place, arguments, are_long=True)
        title = named(task.title, place)
        rows.append(Row(title, place.size, arguments.precision, count, 4 * count, 0, iterations, times))
        if place.rank == 0:
            head = f"{title}, {arguments.precision}, {place.size} ranks"
            print_steps(head, rows[-1], MODE_TITLES, "x bare", partial(rows[-1].ratio, "none"))
        if arguments.traces is not None:
            for mode in (mode for mode in steps if mode in arguments.traced_modes):
                file = f"{name}-{mode}-{place.size}ranks-rank{place.rank}.json.gz"
                trace(steps[mode], place, arguments.traces / file)
        for end in ends:
            end()
    return rows


def trace(step: Way, place: Place, file: Path) -> None:
    """Writes a chrome trace of some steps, compressed: open it in chrome://tracing or ui.perfetto.dev."""
    from torch import profiler

    activities = [profiler.ProfilerActivity.CPU]
    if place.device.type == "cuda":
        activities.append(profiler.ProfilerActivity.CUDA)
    with profiler.profile(activities=activities) as found:
        for _ in range(TRACED):
            step()
        synchronize(place.device)
    found.export_chrome_trace(str(file))


def print_goals(rows: Sequence[Row]) -> None:
    """Prints which modes reach the goal for the overhead on one rank."""
    for row in rows:
        if row.ranks == 1:
            head = f"{row.operation}, one rank"
            print_shares(head, row, MODE_TITLES, [m for m in MODE_TITLES if m != "none"], 1 / OVERHEAD_GOAL)


# --- the program --------------------------------------------------------------------------------------------


def measure_all(arguments: argparse.Namespace) -> None:
    """Runs the benchmark on a rank."""
    import devices
    import fogdist
    import torch
    from fogdist.context import Context

    place = join(arguments.device)
    fogdist.init()
    Context.exchanges_alone = True
    facts = program.facts() | {"device": arguments.device}
    if place.device.type == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(place.device),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "nccl": devices.nccl_version(),
        }
    if place.rank == 0:
        known = ", ".join(f"{key} {facts[key]}" for key in ("gpu", "cuda", "nccl") if key in facts)
        sharing = f" that share {facts['gpus']} GPUs" if place.is_shared else ""
        known = f": {known}" if known else ""
        print(f"\n{place.size} ranks on {arguments.device}{sharing}{known}, milliseconds")
        print(TABLE.heading(), flush=True)
    rows = measure_operations(place, arguments)
    if "training" in arguments.parts:
        rows += measure_training(place, arguments)
    if place.rank == 0:
        write_json(arguments.rows, facts, rows)
    fogdist.shutdown()
    side_by_side.leave()


def parse_arguments() -> argparse.Namespace:
    """The command line, checked; ends the program where there is no such device."""
    import devices

    parser = program.parser_of(__doc__)
    program.add_options(parser, ranks=[], seconds=2.0, back_to_back=20)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with Gloo in place of NCCL")
    program.add_names(parser, "--parts", PARTS)
    program.add_names(parser, "--dtypes", ("float32", "bfloat16", "float16"), ["float32"])
    program.add_names(parser, "--models", TASKS, ["resnet50", "gpt2"])
    program.add_names(parser, "--modes", MODE_TITLES)
    add("--precision", choices=("bfloat16", "float32"), default="bfloat16", help="of training, by autocast")
    add("--traces", type=Path, metavar="FOLDER", help="takes chrome traces of training steps")
    program.add_names(
        parser, "--traced-modes", MODE_TITLES, TRACED_MODES, "those of --modes that --traces shows"
    )
    parser.set_defaults(sizes=SIZES)
    arguments = program.parse_options(parser)
    if arguments.rows is not None:  # a rank, whose parent has looked
        return arguments
    if problem := devices.problem(arguments.device):
        parser.error(problem)
    choose_ranks(parser, arguments)
    if arguments.traces is not None:
        arguments.traces.mkdir(parents=True, exist_ok=True)
    return arguments


def choose_ranks(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Numbers of ranks that measure something; ends the program if there are none, or one that was asked for does not."""
    import torch

    asked = arguments.ranks
    gpus = torch.cuda.device_count() if arguments.device == "cuda" else 1
    ranks = []
    for number in asked or sorted({1, max(gpus, 2)}):
        parts, problem = parts_of(arguments.parts, arguments.device, number)
        if not parts and asked:
            parser.error(problem or f"{', '.join(arguments.parts)}: not with --ranks {number}")
        if problem:
            print(f"left out: {problem}")
        if parts:
            ranks.append(number)
    if not ranks:
        parser.error(f"{', '.join(arguments.parts)}: nothing to measure on {gpus} GPUs")
    arguments.ranks = ranks


def main() -> None:
    """Starts the ranks of each world and compares the results with the goal; on a rank, measures."""
    rows = program.run(Path(__file__), parse_arguments(), measure_all, SYSTEMS | MODE_TITLES)
    print_goals(rows)


if __name__ == "__main__":
    main()
