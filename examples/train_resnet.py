"""Trains a ResNet for small images on CIFAR-10, or on images that are made here, in any mode.

    torchrun --nproc_per_node=4 examples/train_resnet.py                            # a minute, on plaids
    torchrun --nproc_per_node=4 examples/train_resnet.py --mode ddp --backend gloo  # to compare with
    torchrun --nproc_per_node=4 examples/train_resnet.py --data DIR --batch-size 32 --steps 64000 --mode atc

DIR holds CIFAR-10's python version, unpacked: data_batch_1 to data_batch_5 and test_batch. 64,000 steps of 4
ranks with 32 images each is how He, Zhang, Ren and Sun trained ("Deep Residual Learning for Image
Recognition", CVPR 2016, section 4.2), but for the learning rate, which goes down along a cosine here. Without
--data the images are plaids (see images.py), which every machine can make: they are of CIFAR's shape, and say
nothing about accuracy on photographs.

Each rank trains on its own part of the images, shifted by up to 4 pixels and flipped at random, with batch
normalization over its own batches. At the end of each epoch every rank's model is tested; the run ends with a
table, and with the accuracy of the average of all models, of whose batch normalization the running statistics
are averages too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from images import load_cifar10, make_plaids
from models import cifar_resnet
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy, pad
from training import (
    Watch,
    check_batch_size,
    describe,
    end,
    make_parser,
    make_trainer,
    parse,
    report,
    sgd,
    shuffled,
    start,
    train,
)

WEIGHT_DECAY = 1e-4
SHIFT = 4  # pixels
TEST_BATCH = 256


class Normalize:
    """Makes float32 of bytes, with mean 0 and deviation 1 of each color.

    Args:
        images: uint8 of shape (number, 3, height, width), by whose first 1,000 mean and deviation are found.
    """

    def __init__(self, images: Tensor) -> None:
        self._deviation, self._mean = torch.std_mean(images[:1000].float(), dim=(0, 2, 3), keepdim=True)

    def __call__(self, images: Tensor) -> Tensor:
        return (images.float() - self._mean) / self._deviation


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns images, each shifted by up to SHIFT pixels, half of them flipped; what comes in is the mean, 0.

    Args:
        images: Images of shape (number, channels, height, width).
        generator: The generator for shifts and flips.
    """
    count, _, height, width = images.shape
    padded = pad(images, (SHIFT,) * 4)
    top, left = torch.randint(2 * SHIFT + 1, (2, count, 1, 1), generator=generator)
    rows, columns = top + torch.arange(height).reshape(1, -1, 1), left + torch.arange(width)
    # Indices on both sides of a slice: the channels come last.
    shifted = padded[torch.arange(count).reshape(-1, 1, 1), :, rows, columns].permute(0, 3, 1, 2)
    is_flipped = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
    return torch.where(is_flipped, shifted.flip(3), shifted)


def batches(
    images: Tensor, labels: Tensor, normalize: Normalize, batch_size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields augmented batches without end."""
    generator = torch.Generator().manual_seed(seed)
    for chosen in shuffled(len(images), batch_size, seed):
        yield augment(normalize(images[chosen]), generator), labels[chosen]


@record  # torchrun then shows this rank's exception, a lost peer for one, in its closing summary
def main() -> None:
    parser = make_parser(
        "Train a ResNet on CIFAR-10, or on images made here, in any mode.",
        steps=128,
        batch_size=16,
        lr=0.1,
        momentum=0.9,
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="CIFAR-10's python batches (default: plaids, made here)")
    add("--depth", type=int, default=20, metavar="N",
        help="layers of the ResNet: 6 k + 2, as 8, 20, 32, 44, 56 (default: %(default)s)")  # fmt: skip
    args = parse(parser)
    if args.depth < 8 or args.depth % 6 != 2:
        parser.error(f"--depth must be 6 k + 2, as 8, 14 or 20, got {args.depth}")
    data = parser.load(lambda: make_plaids() if args.data is None else load_cifar10(args.data))
    rank, size = start(args)
    share = len(data.train_images) // size
    check_batch_size(args, share)
    normalize = Normalize(data.train_images)
    images, labels = data.train_images[rank::size][:share], data.train_labels[rank::size][:share]
    model = cifar_resnet(args.depth)
    trainer = make_trainer(args, model, sgd(args, weight_decay=WEIGHT_DECAY))

    def accuracy(module: nn.Module) -> float:
        right = 0
        images_of_test, labels_of_test = (
            torch.split(tensor, TEST_BATCH) for tensor in (data.test_images, data.test_labels)
        )
        for x, y in zip(images_of_test, labels_of_test, strict=True):
            right += int((module(normalize(x).to(args.place)).argmax(dim=1).cpu() == y).sum())
        return right / len(data.test_labels)

    evaluate = ("test accuracy", accuracy)
    source = batches(images, labels, normalize, args.batch_size, seed=args.seed * size + rank)
    history = train(args, trainer, source, cross_entropy, Watch(model, share // args.batch_size, evaluate))
    count = sum(parameter.numel() for parameter in model.parameters())
    title = (
        f"ResNet-{args.depth} of {count:,} parameters, {data.name}, {share} images a rank\n{describe(args)}"
    )
    report(args, title, trainer, model, history, evaluate)
    end(args)


if __name__ == "__main__":
    main()
