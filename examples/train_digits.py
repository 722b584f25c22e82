"""Trains a classifier of handwritten digits on ranks that average with their neighbors, or in any other mode.

    torchrun --nproc_per_node=4 examples/train_digits.py                      # averages with neighbors (AWC)
    torchrun --nproc_per_node=4 examples/train_digits.py --dynamic            # ... one peer a step
    torchrun --nproc_per_node=4 examples/train_digits.py --mode ddp --backend gloo         # to compare with
    torchrun --nproc_per_node=4 examples/train_digits.py --split labels --mode ddp_async --slow-rank 0
    mpiexec -n 4 python examples/train_digits.py                              # under another launcher

The images are scikit-learn's digits (1797 scans of 8 x 8 pixels, part of that package), or MNIST's with
`--data DIR`, which holds its idx files, compressed or not; where only the test files (t10k) are there, these are split
into a training and a test set. Every rank trains on its own part of the training set and is tested on the whole test set.
With --split labels the first half of the ranks has the labels 0 to 4 and the second half the others, so no rank alone
learns to tell all digits apart. The run ends with a table, and a picture of loss, test accuracy and how far apart the
models are:

    d_i = || x_i - mean_j x_j ||_2,   consensus distance = sqrt(mean_i d_i^2)

where x_i is the vector of all parameters of rank i. Settings are to be chosen with --validation, which tests on images
that it holds out of the training set.

With --slow-rank a rank takes --slowdown times as long to compute. Modes in which ranks wait for each other then go at
its pace; in the asynchronous ones (win_put, ddp_async, asynchronous_gossip) the others go on, and make
more of the steps: in total as many as elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from images import ImageSet, load_digits, load_mnist
from models import convolutional, mlp
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from training import (
    Watch,
    batches,
    check_batch_size,
    describe,
    end,
    make_parser,
    make_trainer,
    parse,
    report,
    sgd,
    start,
    train,
)

WEIGHT_DECAY = 5e-4
VALIDATION_FRACTION = 0.2  # of the training images
VALIDATION_SEED = 1  # the same images in every run


def hold_out(data: ImageSet) -> ImageSet:
    """Returns the training images alone, some of them in the test images' place."""
    count = len(data.train_images)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(VALIDATION_SEED))
    held, rest = order.tensor_split([int(VALIDATION_FRACTION * count)])
    images, labels = data.train_images, data.train_labels
    return ImageSet(data.name, images[rest], labels[rest], images[held], labels[held])


def share(data: ImageSet, split: str, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's training images, of shape (number, 1, height, width), and labels; all have equally many."""
    images, labels = data.train_images.unsqueeze(1), data.train_labels
    if split == "even" or size == 1:
        count = len(images) // size
        return images[rank::size][:count], labels[rank::size][:count]
    half = (size + 1) // 2
    groups = [range(half), range(half, size)]
    masks = [labels < 5, labels >= 5]
    count = min(int(mask.sum()) // len(ranks) for mask, ranks in zip(masks, groups, strict=True))
    number = int(rank >= half)
    mask, ranks = masks[number], groups[number]
    place = rank - ranks.start
    return images[mask][place :: len(ranks)][:count], labels[mask][place :: len(ranks)][:count]


def read_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags, checked; by default those of the command line."""
    parser = make_parser(
        "Train a classifier of digits, in any mode.",
        steps=630,
        batch_size=16,
        lr=0.1,
        momentum=0.9,
        plot_file=Path("train_digits.png"),
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="MNIST's files (default: scikit-learn's digits)")
    add("--model", choices=("mlp", "convolutional"), default="mlp", help="default: %(default)s")
    add("--split", choices=("even", "labels"), default="even", help="of the training images")
    add("--validation", action="store_true", help="test on images held out of the training set")
    args = parse(parser, arguments)
    parser.load(lambda: read_images(args.data, args.validation))  # what is missing is said before training
    return args


@cache
def read_images(folder: Path | None, is_validation: bool) -> ImageSet:
    """Returns the images that the flags --data and --validation name."""
    data = load_digits() if folder is None else load_mnist(folder)
    return hold_out(data) if is_validation else data


def run(args: argparse.Namespace, rank: int, size: int) -> dict[str, Any]:
    """Trains and reports, after `start`; all ranks call this together. Rank 0 gets what --json gets."""
    data = read_images(args.data, args.validation)
    images, labels = share(data, args.split, rank, size)
    check_batch_size(args, len(images))
    pixels = images.shape[-1]
    model = mlp(pixels**2, (256,)) if args.model == "mlp" else convolutional(pixels)
    trainer = make_trainer(args, model, sgd(args, weight_decay=WEIGHT_DECAY))

    def accuracy(module: nn.Module) -> float:
        predicted = module(data.test_images.unsqueeze(1).to(args.place)).argmax(dim=1).cpu()
        return float((predicted == data.test_labels).double().mean())

    evaluate = (f"{'validation' if args.validation else 'test'} accuracy", accuracy)
    source = batches(images, labels, args.batch_size, seed=args.seed * size + rank)
    watch = Watch(model, len(images) // args.batch_size, evaluate)
    history = train(args, trainer, source, cross_entropy, watch)
    title = f"{data.name}, {len(images)} images a rank, split {args.split}\n{describe(args)}"
    return report(args, title, trainer, model, history, evaluate)


@record  # torchrun then shows this rank's exception, a lost peer for one, in its closing summary
def main() -> None:
    args = read_flags()
    run(args, *start(args))
    end(args)


if __name__ == "__main__":
    main()
