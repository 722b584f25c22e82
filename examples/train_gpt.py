"""Trains a tiny byte-level GPT on the sources of Python's standard library, in any mode.

    torchrun --nproc_per_node=4 examples/train_gpt.py --mode awc
    torchrun --nproc_per_node=4 examples/train_gpt.py --mode ddp --backend gloo    # to compare with
    torchrun --nproc_per_node=4 examples/train_gpt.py --mode diloco --local-steps 32

The text is there wherever Python is: the modules of the standard library, of which one in twenty is kept for
validation. Each rank draws pieces of its own part of the rest. The run ends with the loss on the validation text, in
nats a byte, of each rank's model and of their average.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from models import GPT
from modes import MODES
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from training import describe, end, make_parser, make_trainer, parse, report, start, train

VALIDATION_EVERY = 20  # every so many-th file
VALIDATION_PIECES = 64
WEIGHT_DECAY = 0.1


def read_sources(largest: int) -> tuple[Tensor, Tensor]:
    """Returns the bytes of the standard library's modules, for training and for validation, as uint8.

    Args:
        largest: How many bytes are read at most.
    """
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for number, file in enumerate(files):
        if len(parts[0]) + len(parts[1]) < largest:
            parts[number % VALIDATION_EVERY == 0].extend(file.read_bytes())
    training, validation = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return training, validation


def pieces(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns the pieces of a text that begin at `starts`, and the same one byte further: what is to be foretold."""
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


@record  # torchrun then shows this rank's exception, a lost peer for one, in its closing summary
def main() -> None:
    parser = make_parser(
        "Train a tiny GPT on Python's sources, in any mode.", steps=400, batch_size=8, lr=3e-3
    )
    add = parser.add_argument
    add("--context", type=int, default=64, help="bytes that the model sees")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--text-bytes", type=int, default=4 << 20, help="how much text is read at most")
    args = parse(parser)
    if MODES[args.mode].has_momentum:
        parser.error(f"--mode {args.mode} brings momentum of its own, which AdamW has too")
    rank, size = start(args)
    text, validation = read_sources(args.text_bytes)
    part = text.tensor_split(size)[rank]
    model = GPT(256, args.context, args.width, args.heads, args.layers)
    trainer = make_trainer(
        args, model, lambda parameters: torch.optim.AdamW(parameters, lr=args.lr, weight_decay=WEIGHT_DECAY)
    )
    source = batches(part, args.context, args.batch_size, seed=args.seed * size + rank)
    history = train(args, trainer, source, loss_of)

    places = torch.linspace(0, len(validation) - args.context - 1, VALIDATION_PIECES).long()
    x, y = pieces(validation, places, args.context)

    def validation_loss(module: nn.Module) -> float:
        return float(loss_of(module(x), y))

    count = sum(parameter.numel() for parameter in model.parameters())
    title = f"GPT of {count:,} parameters, {len(text):,} bytes of text\n{describe(args)}"
    report(args, title, trainer, model, history, ("validation loss", validation_loss))
    end(args)


if __name__ == "__main__":
    main()
