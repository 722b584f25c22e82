"""Trains a classifier of handwritten digits on ranks that average with their neighbors, or in any other mode.

    torchrun --nproc_per_node=4 examples/train_digits.py                      # averages with neighbors (AWC)
    torchrun --nproc_per_node=4 examples/train_digits.py --dynamic            # ... one peer a step
    torchrun --nproc_per_node=4 examples/train_digits.py --mode ddp --backend gloo         # to compare with
    mpiexec -n 4 python examples/train_digits.py                              # under another launcher

The images are scikit-learn's digits (1797 scans of 8 x 8 pixels, part of that package), or MNIST's with
`--data DIR`. Every rank trains on its own part of the training set and is tested on the whole test set. The
run ends with a table, and a picture of loss, test accuracy and how far apart the models are:

    d_i = || x_i - mean_j x_j ||_2,   consensus distance = sqrt(mean_i d_i^2)

where x_i is the vector of all parameters of rank i.
"""

from __future__ import annotations

from pathlib import Path

from images import load_digits, load_mnist
from models import mlp
from torch import nn
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


@record  # torchrun then shows this rank's exception, a lost peer for one, in its closing summary
def main() -> None:
    parser = make_parser(
        "Train a classifier of digits, in any mode.",
        steps=630,
        batch_size=16,
        lr=0.1,
        momentum=0.9,
        plot_file=Path("train_digits.png"),
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="MNIST's files (default: scikit-learn's digits)"
    )
    args = parse(parser)
    data = parser.load(lambda: load_digits() if args.data is None else load_mnist(args.data))
    rank, size = start(args)
    share = len(data.train_images) // size
    check_batch_size(args, share)
    images, labels = data.train_images[rank::size][:share], data.train_labels[rank::size][:share]
    model = mlp(images[0].numel(), (256,))
    trainer = make_trainer(args, model, sgd(args, weight_decay=WEIGHT_DECAY))

    def accuracy(module: nn.Module) -> float:
        predicted = module(data.test_images.to(args.place)).argmax(dim=1).cpu()
        return float((predicted == data.test_labels).double().mean())

    evaluate = ("test accuracy", accuracy)
    source = batches(images, labels, args.batch_size, seed=args.seed * size + rank)
    history = train(args, trainer, source, cross_entropy, Watch(model, share // args.batch_size, evaluate))
    title = f"{data.name}, {share} images a rank\n{describe(args)}"
    report(args, title, trainer, model, history, evaluate)
    end(args)


if __name__ == "__main__":
    main()
