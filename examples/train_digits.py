"""Trains a classifier of handwritten digits on several processes that average with their neighbors.

    torchrun --nproc_per_node=4 examples/train_digits.py                       # averages with neighbors (AWC)
    torchrun --nproc_per_node=4 examples/train_digits.py --dynamic             # ... one peer a step
    torchrun --nproc_per_node=4 examples/train_digits.py --optimizer gradient  # all-reduces gradients
    torchrun --nproc_per_node=4 examples/train_digits.py --optimizer ddp --backend gloo  # to compare with
    mpiexec -n 4 python examples/train_digits.py                               # under another launcher

The images are scikit-learn's digits (1797 scans of 8 x 8 pixels, part of that package), or MNIST's with
`--mnist`. Every rank trains on its own part of the training set and is tested on the whole test set. The run
ends with a table and a picture of the loss and of the consensus distance: how far apart the models are,

    d_i = || x_i - mean_j x_j ||_2,   consensus distance = sqrt(mean_i d_i^2)

where x_i is the vector of all parameters of rank i.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from images import ImageSet, load_digits, load_mnist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import fogdist
from fogdist.topology import TOPOLOGY_NAMES, GetDynamicOnePeerSendRecvRanks, by_name

MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
WARMUP_FRACTION = 0.1
MEASUREMENTS = 150  # of the consensus distance in a run: it needs a global sum, which training does not


@dataclass(frozen=True)
class History:
    """What one rank saw in training."""

    losses: Tensor  # (steps,) training loss of this rank's batches
    measured_steps: list[int]
    consensus_distances: list[float]  # at `measured_steps`
    seconds: float  # of training; measuring is left out
    samples: int  # that this rank trained on


def make_model(pixels: int) -> nn.Module:
    """An MLP with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 256), nn.ReLU(), nn.Linear(256, 10))


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to 0, so that the ranks end on nearly the same parameters."""
    warmup = min(1.0, (step + 1) / (WARMUP_FRACTION * steps))
    return warmup * 0.5 * (1 + math.cos(math.pi * step / steps))


def distribute(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes the optimizer communicate: parameters with the neighbors, or gradients with all ranks."""
    fogdist.broadcast_parameters(model.state_dict(), root_rank=0)
    if name == "awc":
        return fogdist.DistributedAdaptWithCombineOptimizer(optimizer, model)
    if name == "atc":
        return fogdist.DistributedAdaptThenCombineOptimizer(optimizer, model)
    return fogdist.DistributedGradientAllreduceOptimizer(optimizer, model)


def choose_peers(optimizer: Any, peers: Iterator[tuple[list[int], list[int]]]) -> None:
    """Sets whom this rank sends to and receives from in the coming step, all with equal weights."""
    send_ranks, recv_ranks = next(peers)
    weight = 1.0 / (len(recv_ranks) + 1)
    optimizer.self_weight = weight
    optimizer.src_weights = {rank: weight for rank in recv_ranks}
    optimizer.dst_weights = {rank: 1.0 for rank in send_ranks}


def batches(images: Tensor, labels: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches without end, in a new order each epoch; a rest that fills no batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(images), generator=generator)
        for chosen in order[: len(order) - len(order) % size].split(size):
            yield images[chosen], labels[chosen]


@torch.no_grad()
def distance_to_average(model: nn.Module) -> float:
    """|| x_i - mean_j x_j ||_2 of this rank; every rank has to call it."""
    mine = nn.utils.parameters_to_vector(model.parameters()).double()
    average = mine.clone()
    dist.all_reduce(average)
    average /= dist.get_world_size()
    return float((mine - average).norm())


def gather(value: float) -> list[float]:
    """Returns the value of every rank, in rank order."""
    return [float(item) for item in gather_tensors(torch.tensor(value, dtype=torch.float64))]


def gather_tensors(tensor: Tensor) -> list[Tensor]:
    """Returns the tensor of every rank, in rank order; they have the same shape."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    predicted = model(images).argmax(dim=1)
    return float((predicted == labels).float().mean())


def train(args: argparse.Namespace, data: ImageSet, model: nn.Module) -> History:
    """Trains the model of this rank on its share of the training images."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    forward: nn.Module = model
    if args.optimizer == "ddp":
        forward = DistributedDataParallel(model)
    else:
        optimizer = distribute(args.optimizer, model, optimizer)

    images, labels = data.train_images[rank::size], data.train_labels[rank::size]
    steps = args.epochs * (len(data.train_images) // size // args.batch_size)  # the same on every rank
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    peers = None
    if args.dynamic and size > 1:
        peers = GetDynamicOnePeerSendRecvRanks(by_name(args.topology, size), rank)

    losses: list[float] = []
    measured_steps: list[int] = []
    distances: list[float] = []
    seconds = 0.0
    with progress_bar(steps) if rank == 0 else nullcontext() as bar:
        source = batches(images, labels, args.batch_size, seed=args.seed * size + rank)
        for step, (x, y) in zip(range(1, steps + 1), source):
            start = time.perf_counter()
            if peers is not None:
                choose_peers(optimizer, peers)
            loss = nn.functional.cross_entropy(forward(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            seconds += time.perf_counter() - start

            losses.append(loss.item())
            if step % max(1, steps // MEASUREMENTS) == 0 or step == steps:
                measured_steps.append(step)
                distances.append(root_mean_square(gather(distance_to_average(model))))
                if bar is not None:
                    bar.set_postfix(loss=f"{losses[-1]:.3f}", consensus=f"{distances[-1]:.1e}", refresh=False)
            if bar is not None:
                bar.update()
    return History(torch.tensor(losses), measured_steps, distances, seconds, steps * args.batch_size)


def progress_bar(steps: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=steps, unit="step", desc="training")


def report(title: str, accuracies: list[float], distances: list[float], rates: list[float]) -> str:
    """Returns the closing table as text."""
    lines = [
        title,
        f"{'rank':>6}{'test accuracy':>16}{'distance to average':>22}{'samples/s':>12}",
        *(
            f"{rank:>6}{accuracy:>16.4f}{distance:>22.2e}{rate:>12,.0f}"
            for rank, (accuracy, distance, rate) in enumerate(zip(accuracies, distances, rates))
        ),
        f"test accuracy: lowest {min(accuracies):.4f}, highest {max(accuracies):.4f}",
        f"consensus distance: {root_mean_square(distances):.2e}",
        f"samples per second, all ranks: {sum(rates):,.0f}",
    ]
    return "\n".join(lines)


def plot(path: Path, title: str, losses: Tensor, history: History, steps_per_epoch: int) -> None:
    """Draws the loss and the consensus distance over the steps.

    Args:
        path: PNG file to write.
        title: Heads the picture.
        losses: Training losses, of shape (ranks, steps).
        history: Of any rank: the consensus distance is the same on all.
        steps_per_epoch: Width of the moving average of the loss.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    mean = losses.mean(dim=0)
    width = min(steps_per_epoch, len(mean))
    smooth = mean.unfold(0, width, 1).mean(dim=1)
    steps = range(1, len(mean) + 1)

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    for rank, of_rank in enumerate(losses):
        label = "one batch of one rank" if rank == 0 else None
        left.plot(steps, of_rank, color="tab:blue", alpha=0.15, linewidth=0.6, label=label)
    centers = range(1 + width // 2, 1 + width // 2 + len(smooth))
    left.plot(centers, smooth, color="tab:blue", label="mean over ranks and an epoch")
    left.set(title="Training loss", ylabel="cross-entropy", yscale="log")
    left.legend()

    distances = history.consensus_distances
    right.plot(history.measured_steps, distances, color="tab:red")
    right.set(title="Consensus distance", ylabel=r"$\sqrt{\mathrm{mean}_i\,\|x_i-\bar{x}\|^2}$")
    if any(distance > 0 for distance in distances):
        right.set_yscale("log")
    else:
        right.text(0.5, 0.6, "0: all ranks hold the same parameters", ha="center", transform=right.transAxes)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on digits, averaging with neighbors.")
    parser.add_argument(
        "--optimizer",
        choices=("awc", "atc", "gradient", "ddp"),
        default="awc",
        help="awc: adapt with combine; atc: adapt then combine; gradient: allreduce of gradients; "
        "ddp: torch's DistributedDataParallel",
    )
    parser.add_argument("--backend", choices=("fog", "gloo"), default="fog", help="gloo: only with ddp")
    parser.add_argument("--topology", choices=TOPOLOGY_NAMES, default="exp2", help="who is whose neighbor")
    parser.add_argument("--dynamic", action="store_true", help="one peer a step, in turn")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="folder of MNIST's idx files")
    parser.add_argument("--epochs", type=int, help="default: 30, with --mnist 5")
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and order of samples")
    parser.add_argument("--output", type=Path, default=Path("train_digits.png"), metavar="PNG")
    args = parser.parse_args()
    if args.backend == "gloo" and args.optimizer != "ddp":
        parser.error(f"--backend gloo knows no neighbors: it needs --optimizer ddp, not {args.optimizer}")
    if args.dynamic and args.optimizer not in ("awc", "atc"):
        parser.error(f"--dynamic needs --optimizer awc or atc, not {args.optimizer}")
    if args.dynamic and args.topology in ("mesh", "torus", "star"):
        parser.error(f"--dynamic needs a topology that looks the same from each rank, not {args.topology}")
    if args.epochs is None:
        args.epochs = 30 if args.mnist is None else 5
    for name in ("epochs", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


@record  # torchrun then shows this rank's exception, a lost peer for one, in its closing summary
def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # the model is small, and the ranks share the cores
    if args.backend == "gloo":
        dist.init_process_group("gloo")
    else:
        fogdist.init(lambda size: by_name(args.topology, size), is_weighted=True)
    rank, size = dist.get_rank(), dist.get_world_size()

    data = load_digits() if args.mnist is None else load_mnist(args.mnist)
    share = len(data.train_images) // size
    if args.batch_size > share:
        raise ValueError(f"--batch-size must be at most {share}, the images of a rank, got {args.batch_size}")
    title = f"{args.optimizer}, {size} ranks, backend {args.backend}"
    if args.optimizer in ("awc", "atc"):
        title += f", topology {args.topology}{', one peer a step' if args.dynamic else ''}"
    if rank == 0:
        print(
            f"{data.name}: {len(data.train_images)} training images, {share} a rank; "
            f"{len(data.test_images)} test images\n{title}",
            flush=True,
        )

    torch.manual_seed(args.seed)
    model = make_model(pixels=data.train_images[0].numel())
    history = train(args, data, model)

    accuracies = gather(accuracy(model, data.test_images, data.test_labels))
    distances = gather(distance_to_average(model))
    rates = gather(history.samples / history.seconds)
    losses = torch.stack(gather_tensors(history.losses))
    if rank == 0:
        print(report(title, accuracies, distances, rates))
        plot(args.output, f"{data.name}: {title}", losses, history, share // args.batch_size)
        print(f"loss and consensus distance over the steps: {args.output}", flush=True)
    if args.backend == "gloo":
        # A thread of Gloo drops its last tensor a moment after the operation is done. If Python is on its way
        # out by then, the process aborts (seen with torch 2.13 in one run of five).
        time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
