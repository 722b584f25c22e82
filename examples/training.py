"""The common part of the training examples: flags, start and end, training loop, closing table and picture."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import devices
import fogdist
import torch
import torch.distributed as dist
from fogdist.topology import TOPOLOGY_NAMES, by_name, one_peer
from modes import MODES, OptimizerFunction, Setup, Trainer
from torch import Tensor, nn

WARMUP_FRACTION = 0.1
PROGRESS_LINES = 10  # of a training that is not watched
Batch = tuple[Tensor, Tensor]
Evaluation = tuple[str, Callable[[nn.Module], float]]
Item = TypeVar("Item")


# --- flags ---


class Parser(argparse.ArgumentParser):
    """A parser that tells of mistakes in one line, as every rank prints it.

    Attributes:
        momentum: Default of --momentum; None if there is no such flag, or the script has its own.
    """

    momentum: float | None = None

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists all flags)\n")

    def load(self, read: Callable[[], Item]) -> Item:
        """Returns the result of `read`; ends the program if files, or the package with them, are missing."""
        try:
            return read()
        except (ImportError, OSError, ValueError) as error:
            self.error(str(error))


def make_parser(
    description: str,
    *,
    steps: int | None,
    batch_size: int,
    lr: float,
    momentum: float | None = None,
    plot_file: Path | None = None,
) -> Parser:
    """Returns a parser with the flags that all training examples have.

    Args:
        description: Heads the help.
        steps: Default of --steps; None for a script that has other flags for it, and sets `args.steps`.
        batch_size: Default of --batch-size.
        lr: Default of --lr.
        momentum: Default of --momentum, for scripts that train with `sgd`; None for no such flag.
        plot_file: Default of --save-plot-file; None for no picture.
    """
    width = max(map(len, MODES))
    modes = "\n".join(f"  {name:{width}}  {mode.summary}" for name, mode in MODES.items())
    parser = Parser(
        description=description,
        epilog=f"modes:\n{modes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", choices=list(MODES), default="awc", metavar="MODE",
        help="how ranks train together: one of the modes below (default: %(default)s)")  # fmt: skip
    devices.add_flag(parser)
    add("--backend", choices=("fog", "gloo", "nccl"), default="fog",
        help="of torch.distributed; gloo, and nccl with --device cuda: only for modes ddp, none "
             "(default: %(default)s)")  # fmt: skip
    add("--topology", choices=TOPOLOGY_NAMES, metavar="NAME",
        help=f"who is whose neighbor: {', '.join(TOPOLOGY_NAMES)} (default: the mode's)")  # fmt: skip
    add("--dynamic", action="store_true", help="average with one of the neighbors a step, in turn")
    add("--local-steps", type=int, metavar="N",
        help="steps between averages (default: what suits the mode, if it has them)")  # fmt: skip
    if steps is not None:
        add("--steps", type=int, default=steps, metavar="N",
            help="of each rank; asynchronous ones share ranks * N (default: %(default)s)")  # fmt: skip
    add("--batch-size", type=int, default=batch_size, metavar="N",
        help="samples a step of each rank (default: %(default)s)")  # fmt: skip
    add("--lr", type=float, default=lr, help="highest learning rate (default: %(default)s)")
    if momentum is not None:
        parser.momentum = momentum
        add("--momentum", type=float,
            help=f"of SGD on each rank (default: {momentum}, or 0 if the mode has its own)")  # fmt: skip
    add("--seed", type=int, default=0, help="of parameters and order of samples (default: %(default)s)")
    add("--slow-rank", type=int, metavar="RANK", help="this rank takes --slowdown times as long to compute")
    add("--slowdown", type=float, default=4.0, metavar="X", help="at least 1 (default: %(default)s)")
    add("--save-plot-file", type=Path, metavar="PNG", default=plot_file,
        help="picture of the training, needs matplotlib (default: "
             f"{plot_file or 'none'})")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="takes the results")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags, checked, and this rank's device as `place`; ends the program if they do not go together."""
    args = parser.parse_args(arguments)
    mode = MODES[args.mode]
    if args.backend != "fog" and args.mode not in ("ddp", "none"):
        parser.error(
            f"--backend {args.backend} knows no neighbors: it needs --mode ddp or none, not {args.mode}"
        )
    if args.backend == "nccl" and args.device != "cuda":
        parser.error(f"--backend nccl needs --device cuda, got {args.device}")
    if args.dynamic and not mode.can_be_dynamic:
        parser.error(f"--dynamic is not for --mode {args.mode}")
    if args.topology is not None and not mode.follows_topology:
        parser.error(f"--topology {args.topology} is not for --mode {args.mode}: it has no neighbors")
    args.topology = args.topology or mode.topology
    if args.dynamic and args.topology in ("mesh", "star"):
        parser.error(f"--dynamic needs a topology that looks the same from each rank, not {args.topology}")
    if args.local_steps is None:
        args.local_steps = mode.local_steps or 1
    elif mode.local_steps is None:
        parser.error(f"--local-steps {args.local_steps} is not for --mode {args.mode}")
    momentum = getattr(parser, "momentum", None)
    if momentum is not None:
        if args.momentum is None:
            args.momentum = momentum
        if not 0 <= args.momentum < 1:
            parser.error(f"--momentum must be at least 0 and below 1, got {args.momentum}")
    for name in ("steps", "batch_size", "local_steps"):
        if getattr(args, name, 1) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not (math.isfinite(args.lr) and args.lr > 0):
        parser.error(f"--lr must be above 0, got {args.lr}")
    if args.slow_rank is not None and args.slow_rank < 0:
        parser.error(f"--slow-rank must be at least 0, got {args.slow_rank}")
    if not (math.isfinite(args.slowdown) and args.slowdown >= 1):
        parser.error(f"--slowdown must be at least 1, got {args.slowdown}")
    if problem := devices.problem(args.device):
        parser.error(problem)
    # At once, not when all the training is done.
    for flag, path in (("--save-plot-file", args.save_plot_file), ("--json", args.json)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            parser.error(f"{flag} must be a file in a folder that exists, got {path}")
    if args.save_plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--save-plot-file {args.save_plot_file} needs matplotlib, which is not installed")
    args.place = devices.use(args.device)
    return args


# --- start and end ---


def start(args: argparse.Namespace) -> tuple[int, int]:
    """Connects this process to the others; returns its rank and their number."""
    torch.set_num_threads(1)  # ranks share the cores
    if args.backend == "fog":
        fogdist.init(lambda size: by_name(args.topology, size))
    else:
        if not dist.is_torchelastic_launched() and "RANK" not in os.environ:
            raise SystemExit(
                f"error: --backend {args.backend} needs torchrun, which tells the ranks of each other"
            )
        dist.init_process_group(args.backend, device_id=args.place if args.backend == "nccl" else None)
    torch.manual_seed(args.seed)  # all ranks make the same model
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.slow_rank is not None and args.slow_rank >= size:
        give_up(args, f"--slow-rank must be below {size}, the number of ranks, got {args.slow_rank}")
    return rank, size


def give_up(args: argparse.Namespace, message: str) -> NoReturn:
    """Ends the program because of a mistake that all ranks have found; they call this together."""
    end(args)
    raise SystemExit(f"error: {message}")


def check_batch_size(args: argparse.Namespace, samples: int) -> None:
    """Ends the program if a batch is larger than the samples of each rank; all ranks call this together."""
    if args.batch_size > samples:
        give_up(args, f"--batch-size must be at most {samples}, the samples of a rank, got {args.batch_size}")


def end(args: argparse.Namespace) -> None:
    """Leaves the others."""
    if args.backend == "gloo":
        # A thread of Gloo drops its last tensor a moment after the operation is done. If Python is on its way
        # out by then, the process aborts (seen with torch 2.13 in one run of five).
        time.sleep(0.5)
    dist.destroy_process_group()


def sgd(args: argparse.Namespace, *, weight_decay: float) -> OptimizerFunction:
    """Returns a function that makes SGD with --lr and --momentum."""
    if MODES[args.mode].takes_adamw_only:
        give_up(args, f"--mode {args.mode} is a form of AdamW, which train_gpt.py trains with")
    return lambda parameters: torch.optim.SGD(
        parameters, lr=args.lr, momentum=args.momentum, weight_decay=weight_decay
    )


def make_trainer(args: argparse.Namespace, model: nn.Module, make_optimizer: OptimizerFunction) -> Trainer:
    """Returns the trainer of --mode, with the model on this rank's device. Collective."""
    model.to(args.place)
    sequence = one_peer(by_name(args.topology, dist.get_world_size())) if args.dynamic else None
    return MODES[args.mode].make(Setup(model, make_optimizer, sequence, args.local_steps))


def describe(args: argparse.Namespace) -> str:
    """Returns a line that describes the training."""
    mode = MODES[args.mode]
    words = [args.mode, f"{dist.get_world_size()} ranks", f"backend {args.backend}"]
    if args.device != "cpu":
        words.append(f"on {args.device}")
    if mode.follows_topology:
        words.append(f"topology {args.topology}{', one peer a step' if args.dynamic else ''}")
    if mode.local_steps is not None:
        words.append(f"local steps {args.local_steps}")
    if args.slow_rank is not None:
        words.append(f"rank {args.slow_rank} {args.slowdown:g} times slower")
    return ", ".join(words)


# --- training ---


class Progress:
    """How much of the training is done, from 0 to 1.

    Ranks that wait for each other have done as many steps each. Asynchronous ones share the steps: each tells
    all others of every step, by a window of one number, and all stop when there were enough, whoever made
    them.

    Args:
        steps: The steps of each rank, or each rank's part of the shared ones.
        is_shared: Whether they are shared; needs fog. Collective then.
    """

    def __init__(self, steps: int, is_shared: bool) -> None:
        self._all = steps
        self._done = torch.zeros(1, dtype=torch.float64)
        self._window: fogdist.Window | None = None
        if is_shared and dist.get_world_size() > 1:
            self._all = steps * dist.get_world_size()
            everybody = dist.new_group()
            fogdist.set_topology(fogdist.topology.fully_connected(dist.get_world_size()), group=everybody)
            self._window = fogdist.Window(self._done, everybody, zero_init=True)
        self._one = torch.ones_like(self._done)

    def advance(self) -> None:
        """Counts a step of this rank, and the steps that other ranks have reported."""
        if self._window is not None:
            self._window.accumulate(self._one)
            self._window.collect()
        self._done += 1

    @property
    def fraction(self) -> float:
        """Steps done, of all."""
        return min(1.0, self._done.item() / self._all)

    def close(self) -> None:
        """Collective where steps are shared."""
        if self._window is not None:
            self._window.free()


@dataclass(frozen=True)
class Watch:
    """The measurements of `train` during training.

    Attributes:
        model: The model that is trained.
        epoch: Steps after which it looks; where ranks share the steps, that part of all of them.
        evaluate: The metric's name, and the function that computes it for the model in evaluation mode.
    """

    model: nn.Module
    epoch: int
    evaluate: Evaluation


@dataclass(frozen=True)
class Measurement:
    """The measurements of one rank at the end of an epoch.

    Attributes:
        step: Steps that it had done.
        fraction: How much of the training was done.
        loss: Mean of its batches since the measurement before.
        value: Of its model, as `Watch.evaluate` has it; None if nothing is watched.
        consensus_distance: sqrt(mean_i || x_i - mean_j x_j ||^2); None if nothing is watched, or ranks are
            asynchronous: they would have to wait for each other.
    """

    step: int
    fraction: float
    loss: float
    value: float | None = None
    consensus_distance: float | None = None


@dataclass(frozen=True)
class History:
    """The training of one rank.

    Attributes:
        losses: The losses of its batches.
        fractions: How much of the training was done after each.
        times: Seconds of training after each, without the time of measurements.
        samples: That it trained on.
        measurements: One an epoch.
    """

    losses: list[float]
    fractions: list[float]
    times: list[float]
    samples: int
    measurements: list[Measurement]

    @property
    def seconds(self) -> float:
        """Of training."""
        return self.times[-1] if self.times else 0.0


def learning_rate_factor(fraction: float) -> float:
    """Linear warm-up, then a cosine down to 0, so that the ranks end on nearly the same parameters."""
    return min(1.0, (fraction + 1e-3) / WARMUP_FRACTION) * 0.5 * (1 + math.cos(math.pi * fraction))


def train(
    args: argparse.Namespace,
    trainer: Trainer,
    batches: Iterator[Batch],
    loss_function: Callable[[Tensor, Tensor], Tensor],
    watch: Watch | None = None,
) -> History:
    """Trains for --steps steps, and tells of it on rank 0; all ranks call this together.

    Args:
        args: From `parse`.
        trainer: From `make_trainer`.
        batches: This rank's, without end: inputs and targets.
        loss_function: The loss of outputs and targets.
        watch: The measurements of each epoch; None to record only the loss.
    """
    is_slow = dist.get_rank() == args.slow_rank
    is_asynchronous = MODES[args.mode].is_asynchronous
    progress = Progress(args.steps, is_asynchronous)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda _: learning_rate_factor(progress.fraction)
    )
    losses: list[float] = []
    fractions: list[float] = []
    times: list[float] = []
    measurements: list[Measurement] = []
    epoch = min(1.0, watch.epoch / args.steps if watch is not None else 1 / PROGRESS_LINES)
    epochs = 0
    dist.barrier()
    begin = time.perf_counter()
    while progress.fraction < 1.0:
        x, y = (part.to(args.place, non_blocking=True) for part in next(batches))
        trainer.prepare(len(losses))
        began = time.perf_counter()
        loss = loss_function(trainer.module(x), y)
        loss.backward()
        if is_slow:
            if args.place.type != "cpu":
                torch.accelerator.synchronize(args.place)  # so far the work was only submitted
            time.sleep((args.slowdown - 1) * (time.perf_counter() - began))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        losses.append(loss.item())
        progress.advance()
        fraction = progress.fraction
        fractions.append(fraction)
        schedule.step()
        times.append(time.perf_counter() - begin)
        # The added constant allows for the rounding of quotients.
        epochs, before = int(fraction / epoch + 1e-9), epochs
        if fraction == 1.0 or epochs > before:
            since = measurements[-1].step if measurements else 0
            found = Measurement(len(losses), fraction, sum(losses[since:]) / len(losses[since:]))
            if watch is not None:
                found = _measure(watch, found, has_distance=not is_asynchronous)
            measurements.append(found)
            _tell(watch, found, math.ceil(fraction / epoch - 1e-9))
            begin = time.perf_counter() - times[-1]
    dist.barrier()
    progress.close()
    return History(losses, fractions, times, len(losses) * args.batch_size, measurements)


@torch.no_grad()
def _measure(watch: Watch, found: Measurement, *, has_distance: bool) -> Measurement:
    """Adds to a measurement what is watched. Collective if it has a distance."""
    watch.model.eval()
    value = watch.evaluate[1](watch.model)
    watch.model.train()
    distance = root_mean_square(gather(distance_to_average(watch.model))) if has_distance else None
    return Measurement(found.step, found.fraction, found.loss, value, distance)


def _tell(watch: Watch | None, found: Measurement, epoch: int) -> None:
    if dist.get_rank() != 0:
        return
    words = [f"loss {found.loss:.3f}"]
    if watch is not None and found.value is not None:
        words.append(f"{watch.evaluate[0]} {found.value:.4f}")
    if found.consensus_distance is not None:
        words.append(f"consensus distance {found.consensus_distance:.1e}")
    place = f"step {found.step}, {100 * found.fraction:.0f}%"
    print(f"{f'epoch {epoch}, ' if watch is not None else ''}{place}: rank 0: {', '.join(words)}", flush=True)


# --- results ---


def gather(item: Item) -> list[Item]:
    """Returns the item of every rank, in rank order."""
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


@torch.no_grad()
def distance_to_average(model: nn.Module) -> float:
    """Returns || x_i - mean_j x_j ||_2 of this rank's parameters; every rank has to call it."""
    mine = nn.utils.parameters_to_vector(model.parameters()).double()
    mean = mine.clone()
    dist.all_reduce(mean)
    return float((mine - mean / dist.get_world_size()).norm())


def root_mean_square(values: Sequence[float]) -> float:
    """Returns the square root of the mean of the squares."""
    return math.sqrt(sum(value * value for value in values) / len(values))


def report(
    args: argparse.Namespace,
    title: str,
    trainer: Trainer,
    model: nn.Module,
    history: History,
    evaluate: Evaluation,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Evaluates each rank's model, then their average, and prints a table; all ranks call this together.

    Args:
        args: From `parse`.
        title: The title of the table and the picture.
        trainer: The trainer that trained it.
        model: The trained model.
        history: The history of this rank.
        evaluate: The metric's name, and the function that computes it for a model in evaluation mode.
        more: Further results, by name, for --json.

    Returns:
        The contents of the --json file; on rank 0.
    """
    name, function = evaluate
    model.eval()
    with torch.no_grad():
        own = gather(function(model))
        distances = gather(distance_to_average(model))
        trainer.finish()
        final = gather(function(model))[0]
    histories = gather(history)
    if dist.get_rank() != 0:
        return {}
    rates = [each.samples / each.seconds for each in histories]
    print(title)
    print(f"{'rank':>6}{name:>16}{'distance to average':>22}{'steps':>8}{'samples/s':>12}")
    for rank, (value, distance, rate) in enumerate(zip(own, distances, rates, strict=True)):
        steps = len(histories[rank].losses)
        shown = f"{value:.4f}" if abs(value) < 1e4 else f"{value:.2e}"  # a diverged loss is large
        print(f"{rank:>6}{shown:>16}{distance:>22.2e}{steps:>8}{rate:>12,.1f}")
    healthy = [rate for rank, rate in enumerate(rates) if rank != args.slow_rank]
    if healthy:
        print(f"samples per second of a rank{' that is not slow' if args.slow_rank is not None else ''}: "
              f"{sum(healthy) / len(healthy):,.1f}; of all ranks: {sum(rates):,.1f}")  # fmt: skip
    print(f"consensus distance: {root_mean_square(distances):.2e}")
    print(f"{name} of the {'average' if args.mode != 'none' else 'model of rank 0'}: {final:.4f}", flush=True)
    if args.save_plot_file:
        plot(args.save_plot_file, title, histories, name)
        print(f"picture: {args.save_plot_file}", flush=True)
    results = {
        "title": title,
        "mode": args.mode,
        "metric": name,
        "final": final,
        "ranks": own,
        "distances": distances,
        "consensus distance": root_mean_square(distances),
        "samples per second": rates,
        "steps": [len(each.losses) for each in histories],
        "healthy samples per second": sum(healthy) / len(healthy) if healthy else None,
        "measurements": [[asdict(found) for found in each.measurements] for each in histories],
        **(more or {}),
    }
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


def plot(path: Path, title: str, histories: Sequence[History], metric: str) -> None:
    """Draws the training: each rank's loss, smoothed over a twentieth of its steps, and what was measured.

    Args:
        path: PNG file to write.
        title: Heads the picture.
        histories: The histories of all ranks.
        metric: The metric that was evaluated.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    measured = [found for found in histories[0].measurements if found.value is not None]
    distances = [found.consensus_distance for found in measured if found.consensus_distance is not None]
    panels = 1 + bool(measured) + bool(distances)
    size = (8.0, 4.5) if panels == 1 else (5.0 * panels, 4.2)
    figure, row = pyplot.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title)
    loss, *others = row[0]
    for rank, history in enumerate(histories):
        width = max(1, len(history.losses) // 20)
        smooth = torch.tensor(history.losses).unfold(0, width, 1).mean(dim=1)
        loss.plot(history.fractions[width - 1 :], smooth, label=f"rank {rank}", linewidth=1)
        if measured:
            found = history.measurements
            others[0].plot([each.fraction for each in found], [each.value for each in found], linewidth=1)
    loss.set(ylabel="training loss", yscale="log")
    loss.legend()
    if measured:
        others[0].set(ylabel=metric)
    if distances:
        others[1].plot([found.fraction for found in measured], distances, color="black", linewidth=1)
        others[1].set(ylabel=r"consensus distance  $\sqrt{\mathrm{mean}_i\,\|x_i-\bar{x}\|^2}$")
        if max(distances) > 0:
            others[1].set_yscale("log")
    for axes in row[0]:
        axes.set_xlabel("part of all steps")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def shuffled(count: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yields indices of batches without end, in a new order each epoch; an incomplete batch is dropped."""
    if batch_size > count:
        raise ValueError(f"--batch-size must be at most {count}, the samples of a rank, got {batch_size}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from torch.split(order[: count - count % batch_size], batch_size)


def batches(images: Tensor, labels: Tensor, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches of `shuffled` places, without end."""
    for chosen in shuffled(len(images), batch_size, seed):
        yield images[chosen], labels[chosen]
