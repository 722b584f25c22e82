"""Measures how many images a second ResNet-50 trains on, in any mode, on random images that stay the same.

    torchrun --nproc_per_node=4 examples/synthetic_resnet50.py --image-size 64 --batch-size 4      # on a CPU
    torchrun --nproc_per_node=4 examples/synthetic_resnet50.py --image-size 64 --batch-size 4 --mode ddp

The first --num-warmup-batches steps do not count. Then come --num-iters iterations of --num-batches-per-iter
steps each; an iteration gives each rank a number of images per second. The run ends with their mean and 1.96
standard deviations (between which 95% of them lie, if they are normally distributed), of each rank and of all
ranks together. Where ranks are asynchronous they share the steps, and a faster rank has more iterations than
a slower one.

Images are of 224 x 224 pixels by default, as those of ImageNet; smaller ones make a step possible on a CPU,
and the exchange, which has as many parameters as ever (25.6 million), a larger part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from models import resnet50
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from training import (
    describe,
    end,
    gather,
    make_parser,
    make_trainer,
    parse,
    report,
    root_mean_square,
    sgd,
    start,
    train,
)

CLASSES = 1000
SMALLEST_IMAGE = 32  # pixels: ResNet-50 halves the size five times


def iteration_rates(times: Sequence[float], batch_size: int, warmup: int, batches: int) -> list[float]:
    """Returns the images per second of each whole iteration.

    Args:
        times: Seconds after each step.
        batch_size: Images of a step.
        warmup: Steps that do not count.
        batches: Steps of an iteration.
    """
    marks = [0.0, *times][warmup::batches]
    return [batches * batch_size / (after - before) for before, after in itertools.pairwise(marks)]


def show(rates: Sequence[float]) -> str:
    """Returns the mean and 1.96 standard deviations in words."""
    if not rates:
        return "not one whole iteration"
    mean = sum(rates) / len(rates)
    spread = 1.96 * root_mean_square([rate - mean for rate in rates])
    return f"{mean:.1f} +- {spread:.1f} ({len(rates)} iterations)"


@record  # torchrun then shows this rank's exception, a lost peer for one, in its closing summary
def main() -> None:
    parser = make_parser(
        "Images per second of ResNet-50 in any mode, on random images.",
        steps=None,
        batch_size=32,
        lr=0.001,
        momentum=0.9,
    )
    add = parser.add_argument
    add("--image-size", type=int, default=224, metavar="PIXELS", help="width, height (default: %(default)s)")
    add("--num-warmup-batches", type=int, default=10, metavar="N",
        help="steps that do not count (default: %(default)s)")  # fmt: skip
    add("--num-batches-per-iter", type=int, default=10, metavar="N",
        help="steps of an iteration (default: %(default)s)")  # fmt: skip
    add("--num-iters", type=int, default=10, metavar="N", help="iterations (default: %(default)s)")
    args = parse(parser)
    for flag, smallest in (("image_size", SMALLEST_IMAGE), ("num_warmup_batches", 0),
                           ("num_batches_per_iter", 1), ("num_iters", 1)):  # fmt: skip
        if getattr(args, flag) < smallest:
            parser.error(f"--{flag.replace('_', '-')} must be at least {smallest}, got {getattr(args, flag)}")
    args.steps = args.num_warmup_batches + args.num_iters * args.num_batches_per_iter

    rank, size = start(args)
    model = resnet50(CLASSES)
    trainer = make_trainer(args, model, sgd(args, weight_decay=0.0))
    generator = torch.Generator().manual_seed(args.seed * size + rank)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, generator=generator)
    labels = torch.randint(CLASSES, (args.batch_size,), generator=generator)
    images, labels = images.to(args.place), labels.to(args.place)
    source: Iterator[tuple[Tensor, Tensor]] = itertools.repeat((images, labels))
    history = train(args, trainer, source, cross_entropy)
    mine = iteration_rates(history.times, args.batch_size, args.num_warmup_batches, args.num_batches_per_iter)
    rates = gather(mine)

    def loss(module: nn.Module) -> float:
        return float(cross_entropy(module(images), labels))

    count = sum(parameter.numel() for parameter in model.parameters())
    pixels = f"{args.batch_size} images a step of {args.image_size} x {args.image_size} pixels"
    title = f"ResNet-50 of {count:,} parameters, {pixels}\n{describe(args)}"
    more = {"images per second": rates}
    report(args, title, trainer, model, history, ("loss", loss), more)
    if rank == 0:
        # Iterations of asynchronous ranks begin at times of their own: those that all have are added up.
        totals = [sum(of_all) for of_all in zip(*rates, strict=False)]
        for name, found in (*((f"rank {r}", rates[r]) for r in range(size)), (f"all {size} ranks", totals)):
            print(f"images per second of {name}: {show(found)}")
    end(args)


if __name__ == "__main__":
    main()
