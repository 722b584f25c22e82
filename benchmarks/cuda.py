"""Compares fog on GPUs with plain torch.distributed on NCCL, and training steps with the bare optimizer, in one run.

    python benchmarks/cuda.py                                    # one rank, then one rank per GPU, or 2 on a single one
    python benchmarks/cuda.py --ranks 2 --parts neighbor windows --sizes 64K 16M --plot cuda.png
    python benchmarks/cuda.py --parts training --models gpt2 --traces traces     # chrome traces of some modes
    python benchmarks/cuda.py --device cpu --parts collectives   # the same code with Gloo in place of NCCL

Run it without a launcher: it starts its ranks itself, under mpiexec (see side_by_side.py), and the number of a rank
selects its GPU. With --device cuda, the default, it ends at once if there is no GPU. If ranks share a GPU, rows say
"shared". With any NCCL, ranks that share a GPU can measure windows; the other parts are skipped unless the loaded NCCL
lets ranks share a GPU (see docs/gpu.md). The implementations take turns (see interleaved.py). A turn is --back-to-back
calls, after which the host waits for the device. The time of a call is the longest one of all ranks.

The parts, and the columns of times in milliseconds:

    collectives    allreduce in place. fog: dist.all_reduce on fog; torch: the same on a group of NCCL
    neighbor       fog: fogdist.neighbor_allreduce along a ring, the exponential-2 graph, or one peer of it per call;
                   torch: batch_isend_irecv of the same messages, then x * w and one add_ for each neighbor
    windows        put, get, accumulate and update of fogdist.Window on a ring; torch: tensor.copy_ of as many tensors,
                   from another GPU if there is one (cudaMemcpyPeer), otherwise within this one
    training       steps of ResNet-50 (32 images of 224 x 224) and GPT-2 124M (4 x 1024 tokens) in bfloat16 autocast:
                   "none" is the bare optimizer, the others are modes of examples/modes.py. A single rank does all
                   work of a rank with neighbors (hooks, buckets, streams, the exchange), so the difference between a
                   mode and "none" is its cost

"limit" is the least time of the links or the memory: bytes divided by bandwidth. The bandwidth of this machine is
measured first, with large copies, by one rank after the other: of the memory of a GPU, and of the link to another GPU
if there is one, otherwise of the memory again. Ranks that share a GPU get equal parts of it. An allreduce of n ranks
must send 2 (n - 1) / n of a tensor over each link. An exchange must send one tensor to each of the d neighbors, and
then read d + 1 tensors and write one.

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

PARTS = ("collectives", "neighbor", "windows", "training")
# The parts that need more than one rank, and the parts that use NCCL.
OF_SEVERAL = ("neighbor", "windows")
OVER_NCCL = ("collectives", "neighbor", "training")
SYSTEMS = {"fog": "fog", "torch": "torch", "limit": "limit"}
TABLE = Table(SYSTEMS, [("fog", "torch"), ("fog", "limit")])
SIZES = [4 << 10, 256 << 10, 4 << 20, 64 << 20]
EXCHANGES = ("ring", "exp2", "one-peer")
WINDOW_OPERATIONS = ("put", "get", "accumulate", "update")
# The goal for the time of a step on one rank, relative to the bare optimizer.
OVERHEAD_GOAL = 1.03
# For the measurement of bandwidth: bytes of a copy, and the least duration. Starting copies and waiting for the last
# takes tens of microseconds.
COPIED = 256 << 20
COPY_SECONDS = 0.02
# The largest part of the device's free memory that these copies use.
COPIED_PART = 1 / 8
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
    """The groups, the device and the bandwidths of a rank.

    Attributes:
        systems: Groups of this run.
        parts: The parts to measure.
        peer: Group of plain torch.distributed: NCCL for cuda, Gloo for the CPU and where no part needs NCCL.
        device: This rank's device.
        memory: Bytes per second that a copy within the device reads and writes; this rank's part if shared.
        link: Bytes per second of a copy from another device, likewise.
        is_shared: Whether ranks share a GPU.
    """

    systems: Systems
    parts: Sequence[str]
    peer: dist.ProcessGroup
    device: torch.device
    memory: float
    link: float
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
        seconds=arguments.seconds,
        iterations=arguments.iterations,
        are_long=are_long,
    )
    return {
        name: Times(t.median / count, t.lower / count, t.upper / count) for name, t in times.items()
    }, iterations


def bandwidth(source: Tensor, target: Tensor, moved: int) -> float:
    """Bytes a second of a copy that moves so many: of the best of some turns, each of as many copies as take long enough."""
    import time

    def seconds(copies: int) -> float:
        synchronize(source.device)
        synchronize(target.device)
        begin = time.perf_counter()
        for _ in range(copies):
            target.copy_(source, non_blocking=True)
        synchronize(source.device)
        synchronize(target.device)
        return time.perf_counter() - begin

    copies = 1
    seconds(copies)  # whatever is made once
    while seconds(copies) < COPY_SECONDS:
        copies *= 2
    return moved * copies / min(seconds(copies) for _ in range(5))


def parts_of(parts: Sequence[str], device: str, ranks: int) -> tuple[list[str], str | None]:
    """Returns the parts that this number of ranks can measure on this machine, and the reasons for skipping the others.

    Args:
        parts: Names in PARTS.
        device: The type of device.
        ranks: The number of ranks.
    """
    import devices
    import torch

    kept = [part for part in parts if ranks > 1 or part not in OF_SEVERAL]
    gpus = torch.cuda.device_count() if device == "cuda" else ranks
    left_out = [part for part in kept if part in OVER_NCCL]
    if ranks <= gpus or not left_out:
        return kept, None
    problem = devices.sharing_problem(f"{', '.join(left_out)} with {ranks} ranks on {gpus} GPUs")
    return (kept, None) if problem is None else ([part for part in kept if part not in left_out], problem)


def join(device_type: str, asked: Sequence[str]) -> Place:
    """Starts the groups that the parts need in this rank, and measures its bandwidths."""
    import devices
    import torch
    import torch.distributed as dist

    device = devices.use(device_type)
    systems = side_by_side.join()
    parts, _ = parts_of(asked, device.type, systems.size)
    peer = systems.gloo
    if device.type == "cuda" and any(part in OVER_NCCL for part in parts):
        peer = dist.new_group(backend="nccl", timeout=side_by_side.TIMEOUT, device_id=device)
    memory = link = 0.0
    for turn in range(systems.size):
        if turn == systems.rank:
            memory, link = _bandwidths(device)
        systems.mpi.Barrier()
    gpus = torch.cuda.device_count() if device.type == "cuda" else systems.size
    sharing = -(-systems.size // gpus)
    return Place(systems, parts, peer, device, memory / sharing, link / sharing, sharing > 1)


def _bandwidths(device: torch.device) -> tuple[float, float]:
    """Returns the bandwidths of a device's memory and of its link to another device. Frees the memory that it used."""
    import torch

    copied = COPIED
    other = _other(device)
    if device.type == "cuda":
        free = min(torch.cuda.mem_get_info(each)[0] for each in (device, other))
        copied = min(copied, int(free * COPIED_PART))
    here = torch.zeros(copied, dtype=torch.uint8, device=device)
    memory = bandwidth(here, torch.empty_like(here), 2 * copied)
    link = memory / 2
    if other != device:
        link = bandwidth(torch.zeros(copied, dtype=torch.uint8, device=other), here, copied)
    del here
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return memory, link


def _other(device: torch.device) -> torch.device:
    """Returns another GPU that this process sees; the device itself if there is none."""
    import torch

    if device.type == "cuda" and torch.cuda.device_count() > 1:
        return torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())
    return device


def limit(bytes_: float, bytes_a_second: float) -> Times:
    """Returns the least number of milliseconds to move bytes."""
    milliseconds = 1e3 * bytes_ / bytes_a_second
    return Times(milliseconds, milliseconds, milliseconds)


def check_same(what: str, place: Place, found: Tensor, expected: Tensor) -> None:
    """Raises RuntimeError if two implementations have different results."""
    import torch

    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(found.dtype, 3e-2)
    if not torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance):
        difference = float((found.double() - expected.double()).abs().max())
        raise RuntimeError(f"{what}: fog and torch differ by {difference} on rank {place.rank}")


# --- operations ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One row of the table before it is timed.

    Attributes:
        name: The name of the operation.
        ways: The implementations.
        limit: The least time.
        moved: The least number of bytes that all ranks must read and write.
        free: Called after the measurements.
    """

    name: str
    ways: dict[str, Way]
    limit: Times
    moved: int
    free: Way = lambda: None


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
    n = place.size
    sent = 2 * (n - 1) / n * fog.nbytes
    yield Case(
        "allreduce",
        {
            "fog": lambda: dist.all_reduce(fog, group=place.systems.fog),
            "torch": lambda: dist.all_reduce(plain, group=place.peer),
        },
        limit(sent, place.link) if n > 1 else limit(2 * fog.nbytes, place.memory),
        2 * n * fog.nbytes,
    )


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
        moved = (degree + 2) * x.nbytes
        least = limit(degree * x.nbytes, place.link).median + limit(moved, place.memory).median
        yield Case(name, {**ways}, Times(least, least, least), place.size * moved)


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


def windows(place: Place, dtype: torch.dtype, elements: int) -> Iterator[Case]:
    """Returns the one-sided operations on a ring; none for a single rank."""
    import fogdist
    import torch

    if place.size == 1:
        return
    fogdist.set_topology(fogdist.topology.by_name("ring", place.size))
    tensor = torch.zeros(elements, dtype=dtype, device=place.device)
    window = fogdist.Window(tensor)
    degree = len(window.out_neighbors)
    near = torch.zeros_like(tensor)
    far = [torch.zeros(elements, dtype=dtype, device=_other(place.device)) for _ in range(degree)]

    def copies_out() -> None:
        for buffer in far:
            buffer.copy_(near)

    def copies_in() -> None:
        for buffer in far:
            near.copy_(buffer)

    def sums() -> None:
        for buffer in far:
            near.add_(buffer.to(near.device), alpha=0.5)

    operations: dict[str, tuple[Way, Way]] = {
        "put": (lambda: window.put(tensor), copies_out),
        "get": (lambda: window.get(), copies_in),
        "accumulate": (lambda: window.accumulate(tensor), copies_out),
        "update": (lambda: window.update(), sums),
    }
    for name in WINDOW_OPERATIONS:
        fog, plain = operations[name]
        if name == "update":
            least = limit((degree + 2) * tensor.nbytes, place.memory)
        else:
            least = limit(degree * tensor.nbytes, place.link)
        yield Case(
            f"window {name}", {"fog": fog, "torch": plain}, least, 2 * degree * place.size * tensor.nbytes
        )
    dist.barrier()
    window.free()


def named(operation: str, place: Place) -> str:
    """What a row says that it measured."""
    return f"{operation}, shared" if place.is_shared else operation


OPERATIONS: dict[str, Callable[[Place, torch.dtype, int], Iterator[Case]]] = {
    "collectives": collectives,
    "neighbor": neighbor,
    "windows": windows,
}


def measure_operations(place: Place, arguments: argparse.Namespace) -> list[Row]:
    """Times all parts except training; rank 0 prints."""
    import torch

    rows: list[Row] = []
    parts = [part for part in place.parts if part in OPERATIONS]
    for part, name, size in itertools.product(parts, arguments.dtypes, arguments.sizes):
        dtype: torch.dtype = getattr(torch, name)
        elements = max(1, size // dtype.itemsize)
        for case in OPERATIONS[part](place, dtype, elements):
            times, iterations = timed(case.ways, place, arguments)
            times["limit"] = case.limit
            rows.append(
                Row(
                    named(case.name, place),
                    place.size,
                    name,
                    elements,
                    elements * dtype.itemsize,
                    case.moved,
                    iterations,
                    times,
                )
            )
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

    place = join(arguments.device, arguments.parts)
    fogdist.init()
    Context.exchanges_alone = True
    facts = program.facts() | {
        "device": arguments.device,
        "memory, GB/s a rank": place.memory / 1e9,
        "link, GB/s a rank": place.link / 1e9,
    }
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
        print(
            f"\n{place.size} ranks on {arguments.device}{sharing}{': ' + known if known else ''}, milliseconds; ",
            end="",
        )
        print(f"memory {place.memory / 1e9:.0f} GB/s, link {place.link / 1e9:.0f} GB/s a rank")
        print(TABLE.heading(), flush=True)
    rows = measure_operations(place, arguments)
    if "training" in place.parts:
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
