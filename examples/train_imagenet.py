"""Trains a ResNet the way ImageNet is trained: warm-up, steps of the learning rate, checkpoints, TensorBoard.

    torchrun --nproc_per_node=4 examples/train_imagenet.py                                  # plaids, made here
    torchrun --nproc_per_node=4 examples/train_imagenet.py --epochs 9 --checkpoints DIR     # goes on where it ended
    torchrun --nproc_per_node=8 examples/train_imagenet.py --data DIR --model resnet50 --epochs 90

DIR holds the folders train and val with a folder of images for each class; reading them needs torchvision. Without --data
the images are plaids (see images.py), which every machine can make.

The recipe is that of Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour" (2017), with parameters
averaged among neighbors in place of gradients among all: the learning rate goes from that of one rank to as many times as much as
there are ranks in the first epochs, and down to a tenth after a third, two thirds and eight ninths of them. A step may take several
batches. After each epoch the ranks' models are tested on their share of the test images, and the ranks save a checkpoint; a
run that finds one goes on from there. Loss and accuracy also go to TensorBoard, if it is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import devices
import fogdist
import torch
import torch.distributed as dist
from fogdist import checkpoint
from images import make_plaids
from models import cifar_resnet, resnet50
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

MODELS: dict[str, Callable[[], nn.Module]] = {"resnet8": lambda: cifar_resnet(8), "resnet50": resnet50}
MILESTONES = (1 / 3, 2 / 3, 8 / 9)  # of all epochs: 30, 60 and 80 of 90


def load(folder: Path | None, images: int | None) -> tuple[Dataset[Any], Dataset[Any]]:
    """Returns training and test images.

    Args:
        folder: With train and val; None for plaids.
        images: How many training images to take of the plaids, and a fourth as many for the test; None for all.
    """
    if folder is None:
        data = make_plaids()
        parts = (
            (data.train_images, data.train_labels, images),
            (data.test_images, data.test_labels, images and images // 4),
        )
        train, test = (TensorDataset(x[:n].float() / 128 - 1, y[:n]) for x, y, n in parts)
        return train, test
    try:
        from torchvision import datasets, transforms
    except ImportError:
        raise SystemExit(
            "error: --data needs torchvision, which reads the images: pip install torchvision"
        ) from None
    scale = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    changed = transforms.Compose(
        [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *scale]
    )
    cut = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), *scale])
    return datasets.ImageFolder(str(folder / "train"), changed), datasets.ImageFolder(
        str(folder / "val"), cut
    )


def writer(folder: Path | None) -> Any:
    """Returns rank 0's writer of TensorBoard; None without a folder, on other ranks, and where it is not installed."""
    if folder is None or fogdist.rank() != 0:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("TensorBoard is not installed (pip install tensorboard): going on without")
        return None
    return SummaryWriter(folder)


def learning_rate(base: float, progress: float, epochs: int, warmup: float) -> float:
    """Returns the learning rate.

    Args:
        base: Of one rank alone.
        progress: Epochs that are over, with a fraction.
        epochs: All.
        warmup: In how many of them it rises.
    """
    size = fogdist.size()
    if progress < warmup:
        return base * (1 + (size - 1) * progress / warmup)
    return base * size * 0.1 ** sum(progress >= share * epochs for share in MILESTONES)


class Mean:
    """The mean of values over batches, and over all ranks."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)  # of losses, of right answers, of samples

    def add(self, output: Tensor, target: Tensor, loss: Tensor) -> None:
        """Adds a batch."""
        right = (output.detach().argmax(dim=1) == target).sum().item()
        self._sums += torch.tensor([loss.item() * len(target), right, len(target)])

    def of_all_ranks(self) -> tuple[float, float]:
        """Returns loss and accuracy. Collective."""
        dist.all_reduce(self._sums)
        loss, right, count = self._sums.tolist()
        return loss / count, right / count


def main() -> None:
    parser = argparse.ArgumentParser(description="ImageNet-style training of a ResNet.")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folders train and val (default: plaids, made here)"
    )
    parser.add_argument("--images", type=int, help="of the plaids, how many to train on (default: all)")
    parser.add_argument("--model", choices=list(MODELS), default="resnet8")
    parser.add_argument("--order", choices=("awc", "atc"), default="awc", help="of adapting and combining")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--warmup-epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=32, help="of one forward pass")
    parser.add_argument("--batches-per-step", type=int, default=1, help="whose gradients a step adds up")
    parser.add_argument("--base-lr", type=float, default=0.05, help="learning rate of one rank alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="where to save, and to go on from")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="for TensorBoard")
    args = devices.parse(parser, "epochs", "batch_size", "batches_per_step")

    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    place = devices.use(args.device)
    train_set, test_set = load(args.data, args.images)
    samplers = [DistributedSampler(part, size, rank, seed=args.seed) for part in (train_set, test_set)]
    train_loader, test_loader = (
        DataLoader(part, args.batch_size, sampler=sampler)
        for part, sampler in zip((train_set, test_set), samplers, strict=True)
    )
    torch.manual_seed(args.seed)
    model = MODELS[args.model]().to(place)
    sgd = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=5e-5)
    optimizer = fogdist.DecentralizedOptimizer(sgd, model, order=args.order)
    begin = 0
    if args.checkpoints is not None and checkpoint.latest(args.checkpoints) is not None:
        begin = checkpoint.load(args.checkpoints, model, optimizer).step
    if rank == 0 and begin > 0:
        print(f"going on after epoch {begin}")
    log = writer(args.log_dir)

    for epoch in range(begin, args.epochs):
        samplers[0].set_epoch(epoch)
        means = {"train": Mean(), "test": Mean()}
        model.train()
        for batch, (x, y) in enumerate(train_loader):
            data, target = x.to(place), y.to(place)
            part = batch % args.batches_per_step
            if part == 0:
                rate = learning_rate(
                    args.base_lr, epoch + batch / len(train_loader), args.epochs, args.warmup_epochs
                )
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.zero_grad()
            is_last = part == args.batches_per_step - 1
            with nullcontext() if is_last else optimizer.no_sync():
                output = model(data)
                loss = cross_entropy(output, target)
                (loss / args.batches_per_step).backward()
            means["train"].add(output, target, loss)
            if is_last:
                optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, y in test_loader:
                output, target = model(x.to(place)), y.to(place)
                means["test"].add(output, target, cross_entropy(output, target))
        found = {name: mean.of_all_ranks() for name, mean in means.items()}
        if args.checkpoints is not None:
            checkpoint.save(args.checkpoints, model, optimizer, step=epoch + 1)
        if rank == 0:
            shown = ", ".join(
                f"{name} loss {loss:.3f}, accuracy {right:.3f}" for name, (loss, right) in found.items()
            )
            print(f"epoch {epoch + 1} of {args.epochs}, learning rate {rate:.4f}: {shown}", flush=True)
        if log is not None:
            for name, (loss, right) in found.items():
                log.add_scalar(f"{name}/loss", loss, epoch + 1)
                log.add_scalar(f"{name}/accuracy", right, epoch + 1)
    if log is not None:
        log.close()
    fogdist.shutdown()


if __name__ == "__main__":
    main()
