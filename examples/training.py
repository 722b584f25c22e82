"""What the training examples share: flags, start and end, the training loop, the closing table and picture."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from modes import MODES, OptimizerFunction, Setup, Trainer
from torch import Tensor, nn

import fogdist
from fogdist.topology import TOPOLOGY_NAMES, by_name, one_peer

WARMUP_FRACTION = 0.1
Batch = tuple[Tensor, Tensor]
Item = TypeVar("Item")


# --- flags ---


def make_parser(description: str, *, steps: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all training examples have.

    Args:
        description: Heads the help.
        steps: Default of --steps.
        batch_size: Default of --batch-size.
        lr: Default of --lr.
    """
    modes = "; ".join(f"{name}: {mode.summary}" for name, mode in MODES.items())
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--mode", choices=list(MODES), default="awc", help=modes)
    add("--backend", choices=("fog", "gloo"), default="fog", help="gloo: only with modes ddp and none")
    add("--topology", choices=TOPOLOGY_NAMES, help="who is whose neighbor; by default what suits the mode")
    add("--dynamic", action="store_true", help="one of the neighbors a step, in turn")
    add("--local-steps", type=int, help="steps between averages, where a mode has them")
    add("--steps", type=int, default=steps, help="of each rank; asynchronous ones share size * steps")
    add("--batch-size", type=int, default=batch_size, help="of each rank")
    add("--lr", type=float, default=lr, help="highest learning rate")
    add("--seed", type=int, default=0, help="of parameters and order of samples")
    add("--slow-rank", type=int, metavar="RANK", help="this rank takes --slowdown times as long to compute")
    add("--slowdown", type=float, default=4.0)
    add("--save-plot-file", type=Path, metavar="PNG", help="picture of the loss, needs matplotlib")
    add("--json", type=Path, metavar="FILE", help="takes the results")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags, checked; ends the program if they do not go together."""
    args = parser.parse_args(arguments)
    mode = MODES[args.mode]
    if args.backend == "gloo" and args.mode not in ("ddp", "none"):
        parser.error(f"--backend gloo knows no neighbors: it needs --mode ddp or none, not {args.mode}")
    if args.dynamic and not mode.can_be_dynamic:
        parser.error(f"--dynamic is not for --mode {args.mode}")
    if args.topology is not None and not mode.follows_topology:
        parser.error(f"--topology is not for --mode {args.mode}")
    args.topology = args.topology or mode.topology
    if args.dynamic and args.topology in ("mesh", "torus", "star"):
        parser.error(f"--dynamic needs a topology that looks the same from each rank, not {args.topology}")
    if args.local_steps is not None and mode.local_steps is None:
        parser.error(f"--local-steps is not for --mode {args.mode}")
    args.local_steps = args.local_steps or mode.local_steps or 1
    for name in ("steps", "batch_size", "local_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.slowdown < 1:
        parser.error(f"--slowdown must be at least 1, got {args.slowdown}")
    return args


# --- start and end ---


def start(args: argparse.Namespace) -> tuple[int, int]:
    """Connects this process to the others; returns its rank and their number."""
    torch.set_num_threads(1)  # ranks share the cores
    if args.backend == "gloo":
        dist.init_process_group("gloo")
    else:
        fogdist.init(lambda size: by_name(args.topology, size), is_weighted=True)
    torch.manual_seed(args.seed)  # all ranks make the same model
    return dist.get_rank(), dist.get_world_size()


def end(args: argparse.Namespace) -> None:
    """Leaves the others."""
    if args.backend == "gloo":
        # A thread of Gloo drops its last tensor a moment after the operation is done, see train_digits.py.
        time.sleep(0.5)
    dist.destroy_process_group()


def make_trainer(args: argparse.Namespace, model: nn.Module, make_optimizer: OptimizerFunction) -> Trainer:
    """Returns the trainer of --mode. Collective."""
    sequence = one_peer(by_name(args.topology, dist.get_world_size())) if args.dynamic else None
    return MODES[args.mode].make(Setup(model, make_optimizer, sequence, args.local_steps))


def describe(args: argparse.Namespace) -> str:
    """Returns a line on what is trained how."""
    mode = MODES[args.mode]
    words = [args.mode, f"{dist.get_world_size()} ranks", f"backend {args.backend}"]
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

    Ranks that wait for each other have done as many steps each. Asynchronous ones share the steps: each tells all
    others of every step, by a window of one number, and all stop when there were enough, whoever made them.

    Args:
        steps: Of each rank, or each rank's part of the shared ones.
        is_shared: Whether they are shared; needs fog. Collective then.
    """

    def __init__(self, steps: int, is_shared: bool) -> None:
        self._all = steps
        self._done = torch.zeros(1, dtype=torch.float64)
        self._window: fogdist.Window | None = None
        if is_shared and dist.get_world_size() > 1:
            self._all = steps * dist.get_world_size()
            everybody = dist.new_group()
            fogdist.set_topology(fogdist.FullyConnectedGraph(dist.get_world_size()), group=everybody)
            self._window = fogdist.Window(self._done, everybody, zero_init=True)
        self._one = torch.ones_like(self._done)

    def advance(self) -> None:
        """Counts a step of this rank, and those that others have told of."""
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
class History:
    """What one rank did.

    Attributes:
        losses: Of its batches.
        fractions: How much of the training was done after each.
        seconds: Of training.
        samples: That it trained on.
    """

    losses: list[float]
    fractions: list[float]
    seconds: float
    samples: int


def learning_rate_factor(fraction: float) -> float:
    """Linear warm-up, then a cosine down to 0, so that the ranks end on nearly the same parameters."""
    return min(1.0, (fraction + 1e-3) / WARMUP_FRACTION) * 0.5 * (1 + math.cos(math.pi * fraction))


def train(
    args: argparse.Namespace,
    trainer: Trainer,
    batches: Iterator[Batch],
    loss_function: Callable[[Tensor, Tensor], Tensor],
) -> History:
    """Trains for --steps steps; all ranks call this together.

    Args:
        args: From `parse`.
        trainer: From `make_trainer`.
        batches: This rank's, without end: inputs and targets.
        loss_function: Of outputs and targets.
    """
    is_slow = dist.get_rank() == args.slow_rank
    progress = Progress(args.steps, MODES[args.mode].is_asynchronous)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda _: learning_rate_factor(progress.fraction)
    )
    losses: list[float] = []
    fractions: list[float] = []
    dist.barrier()
    begin = time.perf_counter()
    while progress.fraction < 1.0:
        x, y = next(batches)
        trainer.prepare(len(losses))
        began = time.perf_counter()
        loss = loss_function(trainer.module(x), y)
        loss.backward()
        if is_slow:
            time.sleep((args.slowdown - 1) * (time.perf_counter() - began))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        losses.append(loss.item())
        progress.advance()
        fractions.append(progress.fraction)
        schedule.step()
    seconds = time.perf_counter() - begin
    dist.barrier()
    progress.close()
    return History(losses, fractions, seconds, len(losses) * args.batch_size)


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


def report(
    args: argparse.Namespace,
    title: str,
    trainer: Trainer,
    model: nn.Module,
    history: History,
    evaluate: tuple[str, Callable[[nn.Module], float]],
) -> dict[str, Any]:
    """Evaluates each rank's model, then their average, and prints a table; all ranks call this together.

    Args:
        args: From `parse`.
        title: Heads the table and the picture.
        trainer: That trained.
        model: What it trained.
        history: Of this rank.
        evaluate: What is evaluated, and what does it, given a model in evaluation mode.

    Returns:
        What --json gets; on rank 0.
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
        print(f"{rank:>6}{value:>16.4f}{distance:>22.2e}{steps:>8}{rate:>12,.0f}")
    healthy = [rate for rank, rate in enumerate(rates) if rank != args.slow_rank]
    print(f"samples per second of a rank{' that is not slow' if args.slow_rank is not None else ''}: "
          f"{sum(healthy) / len(healthy):,.0f}")  # fmt: skip
    print(f"{name} of the {'average' if args.mode != 'none' else 'model of rank 0'}: {final:.4f}", flush=True)
    if args.save_plot_file:
        plot(args.save_plot_file, title, histories)
    results = {
        "title": title,
        "mode": args.mode,
        "metric": name,
        "final": final,
        "ranks": own,
        "distances": distances,
        "samples per second": rates,
        "steps": [len(each.losses) for each in histories],
        "healthy samples per second": sum(healthy) / len(healthy),
    }
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


def plot(path: Path, title: str, histories: Sequence[History]) -> None:
    """Draws each rank's loss, smoothed over a twentieth of its steps, over what was done of the training."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for rank, history in enumerate(histories):
        width = max(1, len(history.losses) // 20)
        smooth = torch.tensor(history.losses).unfold(0, width, 1).mean(dim=1)
        axes.plot(history.fractions[width - 1 :], smooth, label=f"rank {rank}", linewidth=1)
    axes.set(title=title, xlabel="part of all steps", ylabel="training loss", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def shuffled(count: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yields indices of batches without end, in a new order each epoch; a rest that fills no batch is left out."""
    if batch_size > count:
        raise ValueError(f"--batch-size must be at most {count}, the samples of a rank, got {batch_size}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % batch_size].split(batch_size)
