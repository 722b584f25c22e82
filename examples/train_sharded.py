"""Trains a small Llama that some ranks shard by FSDP2, and whose replicas gossip: a mesh of two dimensions.

    torchrun --nproc_per_node=4 examples/train_sharded.py
    torchrun --nproc_per_node=4 examples/train_sharded.py --how diloco --checkpoints /tmp/llama    # again: goes on

With 4 ranks and --shards 2 there are two replicas of two shards. Within a replica FSDP2 gathers parameters and
scatters gradients. Between replicas each rank exchanges its own shard only, with the rank that has the same shard. The text
is that of train_gpt.py; each rank reads a part of its own. All replicas end with their average, of which the run
prints the loss on the test text, in nats a byte.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import fogdist
import torch
from fogdist.algorithms import DiLoCo
from fogdist.compression import Int8
from models import Llama
from ranks import mean
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from train_gpt import HELD_OUT_PIECES, loss_of, pieces, read_sources
from training import Parser, learning_rate_factor

# How replicas train together: functions of an optimizer, its model and the group of ranks that have the same shard.
HOW: dict[str, Callable[..., Any]] = {
    "gossip": fogdist.DecentralizedOptimizer,
    "int8": lambda *these, **options: fogdist.DecentralizedOptimizer(*these, compression=Int8(), **options),
    "diloco": lambda *these, **options: DiLoCo(*these, local_steps=20, fragments=2, delay=2, **options),
}


def read_flags() -> argparse.Namespace:
    """Returns the flags, checked."""
    parser = Parser(description="Train a small Llama whose replicas are sharded and gossip.")
    add = parser.add_argument
    devices.add_flag(parser)
    add("--shards", type=int, default=2, help="ranks that share a replica (default: %(default)s)")
    add("--how", choices=list(HOW), default="gossip", help="replicas train (default: %(default)s)")
    add("--steps", type=int, default=400, help="of each rank, in all (default: %(default)s)")
    add("--batch-size", type=int, default=8, help="pieces of text a step of each rank (default: %(default)s)")
    add("--lr", type=float, default=6e-3, help="highest learning rate (default: %(default)s)")
    add("--context", type=int, default=64, help="bytes that the model sees (default: %(default)s)")
    add("--width", type=int, default=64, help="a multiple of 8 (default: %(default)s)")
    add("--layers", type=int, default=2)
    add("--text-bytes", type=int, default=4 << 20, help="how much text is read at most")
    add(
        "--checkpoints", type=Path, metavar="FOLDER", help="where states are saved, and the last one is found"
    )
    add(
        "--every", type=int, default=50, help="steps between lines, and between states (default: %(default)s)"
    )
    args = parser.parse_args()
    for name in ("shards", "steps", "batch_size", "every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.width < 8 or args.width % 8:
        parser.error(f"--width must be a multiple of 8, got {args.width}")
    if problem := devices.problem(args.device):
        parser.error(problem)
    args.place = devices.use(args.device)
    return args


def make_model(args: argparse.Namespace, mesh: DeviceMesh) -> Llama:
    """Returns the model, block by block in shards over one dimension of the mesh."""
    model = Llama(256, args.context, args.width, heads=4, groups=2, layers=args.layers).to(args.place)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["shard"])
    return model


class Checkpoints:
    """States of all replicas, each of all steps up to it in a folder of its own.

    Replicas differ, so each has names of its own. Any number of shards can load what another number has saved.

    Args:
        folder: The folder, which all ranks share.
        model: The model of this replica.
        optimizer: Its optimizer.
        replica: Its number.
    """

    def __init__(self, folder: Path, model: nn.Module, optimizer: Any, replica: int) -> None:
        self._folder, self._replica = folder, f"replica{replica}"
        self._model, self._optimizer = model, optimizer

    def save(self, step: int) -> None:
        """Saves the state after a step; the file .metadata comes last."""
        self._optimizer.settle()  # ends exchanges in flight
        checkpoint.save(self._state(), checkpoint_id=self._folder / f"step-{step:06}")

    def load(self) -> int:
        """Loads the last state that is whole; returns its step, or 0 if there is none."""
        whole = sorted(self._folder.glob("step-*/.metadata"))
        if not whole:
            return 0
        state = self._state()
        checkpoint.load(state, checkpoint_id=whole[-1].parent)
        model, optimizer = (state[self._replica][name] for name in ("model", "optimizer"))
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return int(whole[-1].parent.name.removeprefix("step-"))

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {self._replica: {"model": model, "optimizer": optimizer}}


def batch(text: Tensor, args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Returns this rank's batch of a step, the same whenever the step is made."""
    generator = torch.Generator().manual_seed(step * fogdist.size() + fogdist.rank())
    places = torch.randint(len(text) - args.context, (args.batch_size,), generator=generator)
    x, y = pieces(text, places, args.context)
    return x.to(args.place), y.to(args.place)


def run(args: argparse.Namespace) -> None:
    """Trains and prints on rank 0."""
    rank, size = fogdist.rank(), fogdist.size()
    if size % args.shards:
        raise SystemExit(f"error: --shards must divide {size}, the number of ranks, got {args.shards}")
    mesh = init_device_mesh(
        args.device, (size // args.shards, args.shards), mesh_dim_names=("gossip", "shard")
    )
    model = make_model(args, mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = HOW[args.how](adamw, model, group=mesh["gossip"].get_group())
    states = args.checkpoints and Checkpoints(args.checkpoints, model, optimizer, rank // args.shards)
    first = states.load() if states else 0
    training, _, test = read_sources(args.text_bytes)
    text = training.tensor_split(size)[rank]
    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        own = sum(parameter.to_local().numel() for parameter in model.parameters())
        print(f"Llama of {count:,} parameters, {own:,} of them on rank 0; replicas: {mesh['gossip'].size()}")
        print(f"going on after step {first}" if first else "from the beginning", flush=True)

    began, losses = time.perf_counter(), torch.zeros(0)
    for step in range(first + 1, args.steps + 1):
        x, y = batch(text, args, step)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * learning_rate_factor(step / args.steps)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm of all shards of the replica
        optimizer.step()
        losses = torch.cat([losses, loss.detach().cpu().reshape(1)])
        if step % args.every == 0 or step == args.steps:
            found, losses = float(mean(losses.mean())), torch.zeros(0)
            if rank == 0:
                print(f"step {step}: loss {found:.3f}, {time.perf_counter() - began:.1f} s", flush=True)
            if states:
                states.save(step)

    optimizer.average()  # all replicas have one model now
    places = torch.linspace(0, len(test) - args.context - 1, HELD_OUT_PIECES).long().tensor_split(size)[rank]
    x, y = (part.to(args.place) for part in pieces(test, places, args.context))
    with torch.no_grad():
        found = float(mean(loss_of(model(x), y).cpu()))
    if rank == 0:
        print(f"test loss of the average: {found:.4f}", flush=True)


@record
def main() -> None:
    args = read_flags()
    torch.set_num_threads(1)  # ranks share the cores
    fogdist.init()
    torch.manual_seed(0)  # all replicas begin with the same model
    run(args)
    fogdist.shutdown()


if __name__ == "__main__":
    main()
