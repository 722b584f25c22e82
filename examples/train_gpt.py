"""Trains a tiny byte-level GPT on the sources of Python's standard library, in any mode.

    torchrun --nproc_per_node=4 examples/train_gpt.py --mode awc
    torchrun --nproc_per_node=4 examples/train_gpt.py --mode ddp --backend gloo    # to compare with
    torchrun --nproc_per_node=4 examples/train_gpt.py --mode diloco --local-steps 32

The text is there wherever Python is: the modules of the standard library, of which one in twenty is kept for
the test and one in twenty for validation. Each rank draws pieces of its own part of the rest. The run ends with
the loss on the test text, in nats a byte, of each rank's model and of their average; with --validation, by which
settings are to be chosen, with that on the validation text.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from models import GPT
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from training import describe, end, make_parser, make_trainer, parse, report, start, train

HELD_OUT_EVERY = 20  # every so many-th file is for the test, and the one half way to the next for validation
HELD_OUT_PIECES = 256  # that the loss is taken of


def read_sources(largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the bytes of the standard library's modules, for training, validation and test, as uint8.

    Args:
        largest: How many bytes are read; the last module is read to its end.

    Raises:
        ValueError: These are too few modules.
    """
    parts: tuple[bytearray, bytearray, bytearray] = (bytearray(), bytearray(), bytearray())
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for number, file in enumerate(files):
        if sum(map(len, parts)) < largest:
            place = number % HELD_OUT_EVERY
            parts[2 if place == 0 else 1 if place == HELD_OUT_EVERY // 2 else 0].extend(file.read_bytes())
    if not all(parts):
        raise ValueError(f"--text-bytes must be more, got {largest}: no module was left to validate with")
    training, validation, test = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return training, validation, test


def pieces(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns the pieces of a text that begin at `starts`, and the same one byte further, to be foretold."""
    places = starts.unsqueeze(1) + torch.arange(length)
    return text[places].long(), text[places + 1].long()


def batches(text: Tensor, length: int, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields random pieces without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield pieces(text, torch.randint(len(text) - length, (batch_size,), generator=generator), length)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats a byte."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags, checked; by default those of the command line."""
    parser = make_parser(
        "Train a tiny GPT on Python's sources, in any mode.", steps=600, batch_size=8, lr=6e-3
    )
    add = parser.add_argument
    add("--beta2", type=float, default=0.95, help="AdamW's, of the mean of squared gradients")
    add("--weight-decay", type=float, default=0.1, help="AdamW's, which it multiplies by the learning rate")
    add("--context", type=int, default=64, help="bytes that the model sees")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--text-bytes", type=int, default=4 << 20, help="how much text is read at most")
    add("--validation", action="store_true", help="end with the loss on the validation text")
    return parse(parser, arguments)


def run(args: argparse.Namespace, rank: int, size: int) -> dict[str, Any]:
    """Trains and reports, after `start`; all ranks call this together. Rank 0 gets what --json gets."""
    text, validation, test = read_sources(args.text_bytes)
    part = text.tensor_split(size)[rank]
    model = GPT(256, args.context, args.width, args.heads, args.layers)
    trainer = make_trainer(
        args,
        model,
        lambda parameters: torch.optim.AdamW(
            parameters, lr=args.lr, betas=(0.9, args.beta2), weight_decay=args.weight_decay
        ),
    )
    source = batches(part, args.context, args.batch_size, seed=args.seed * size + rank)
    history = train(args, trainer, source, loss_of)

    name, held_out = ("validation", validation) if args.validation else ("test", test)
    places = torch.linspace(0, len(held_out) - args.context - 1, HELD_OUT_PIECES).long()
    x, y = (part.to(args.place) for part in pieces(held_out, places, args.context))

    def loss_on_held_out(module: nn.Module) -> float:
        return float(loss_of(module(x), y))

    count = sum(parameter.numel() for parameter in model.parameters())
    title = f"GPT of {count:,} parameters, {len(text):,} bytes of text\n{describe(args)}"
    return report(args, title, trainer, model, history, (f"{name} loss", loss_on_held_out))


@record  # torchrun then shows this rank's exception, a lost peer for one, in its closing summary
def main() -> None:
    args = read_flags()
    run(args, *start(args))
    end(args)


if __name__ == "__main__":
    main()
