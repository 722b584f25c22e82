"""Checkpoints of decentralized training, by torch.distributed.checkpoint: each rank's own state.

A checkpoint is whole or absent, and can be loaded on another number of ranks. ``docs/howto/checkpoints.md`` is the guide.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

from fogdist.agreement import check_same_everywhere
from fogdist.checkpoint import folders, states
from fogdist.checkpoint.folders import folder_of, latest, piece_of, steps
from fogdist.checkpoint.pieces import Piece, put_together, write
from fogdist.checkpoint.together import tell, together
from fogdist.context import current
from fogdist.observe.detection import suspend_detection
from fogdist.removed import missing
from fogdist.topology.validation import check_int

__all__ = ["Loaded", "latest", "load", "save", "steps"]

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Loaded:
    """What `load` has loaded.

    Attributes:
        step: The checkpoint's step.
        ranks: The number of ranks that saved it.
        is_mean: Whether this rank now has the mean of all ranks that saved it, in place of the state of one rank.
        extra: The `extra` that was saved on the rank of this number, or, if there was no such rank, on the rank
            whose number is the remainder by `ranks`.
    """

    step: int
    ranks: int
    is_mean: bool
    extra: Any


@suspend_detection()
def save(
    path: StrPath,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Saves the state of the training on all ranks as one checkpoint, which is whole or absent. Collective.

    Call it between two steps, on all ranks alike. The checkpoint is the folder "step-NNNNNNNN" in `path`, with one folder
    for each rank in the format of torch.distributed.checkpoint. It appears under its name once rank 0 has seen all files
    of all ranks; until then older checkpoints are not touched. A rank that is killed meanwhile leaves a hidden folder,
    which the next call removes, so two trainings must not use one `path`.

    Args:
        path: The folder of the checkpoints, in a file system that all ranks share. It is made if it is missing.
        model: The model, or the `fogdist.DecentralizedDataParallel` around it. Its parameters are no DTensors.
        optimizer: The optimizer, of torch or of fogdist: the state of a `fogdist.algorithms.Algorithm` goes with it.
            None for the model only.
        step: A number of the user's, from 0, that `path` has no checkpoint of yet.
        extra: This rank's own further state, of any types that can be pickled, such as the state dict of a scheduler, or
            the state of a random generator. `load` returns it.
        keep: The number of checkpoints to keep in `path`; those of the lowest steps are removed after the new one is
            there. None for all.
        group: The group of ranks; by default that of `fogdist.init`.

    Returns:
        The checkpoint's folder.

    Raises:
        TypeError: An argument has a wrong type; the model has DTensors.
        ValueError: A number is out of its range; ranks disagree on an argument (on all ranks alike); before `init`.
        OSError: `path` has a checkpoint of this step, or a rank could not write, for example because the disk is full. On
            all ranks alike, naming the ranks; nothing of the new checkpoint is left.
        RuntimeError: Another failure of a rank to write, on all ranks alike; after `shutdown`.
            torch.distributed.DistBackendError if a rank does not come. If that is rank 0 and it was killed in its last
            moments, the checkpoint may be there all the same.
    """
    from fog_pg._build_info import VERSION  # written by the build, which ranks need

    states.check_arguments(model, optimizer)
    step = check_int(step, "step", minimum=0)
    if keep is not None:
        keep = check_int(keep, "keep", minimum=1)
    context, root = current(group), Path(path).absolute()
    is_first = context.rank == 0
    states.settle(model, optimizer)
    weight, rest, tensors = states.capture(model, optimizer, extra)
    versions = {"fogdist": VERSION, "torch": torch.__version__}
    head = {"weight": weight, "ranks": context.size, "versions": versions}
    which = f"the checkpoint of step {step} in {root}"
    what = f"begin {which}"
    check_same_everywhere(context.backend, "checkpoint", [what, f"{keep=}"])
    begun = together(context, what, lambda: folders.begin(root, step).name if is_first else None)
    hidden = root / tell(context, what, begun)[0]
    pieces = [piece_of(rank) for rank in range(context.size)]
    try:
        together(context, f"write {which}", lambda: write(hidden / pieces[context.rank], head, rest, tensors))
        complete = partial(folders.complete, hidden, step, pieces)
        together(context, f"complete {which}", lambda: complete() if is_first else None)
    except Exception as error:
        # If a rank did not come, others may still be writing; the next save removes the files.
        if is_first and not isinstance(error, dist.DistBackendError):
            shutil.rmtree(hidden, ignore_errors=True)
        raise
    if is_first and keep is not None:
        folders.remove_old(root, keep, step)
    return folder_of(root, step)


@suspend_detection()
def load(
    path: StrPath,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Loads a checkpoint of `save` into the model and the optimizer. Collective.

    On as many ranks as saved it, each rank gets its own state back, and training continues bit for bit. On another
    number of ranks, all ranks get the mean over the ranks that saved it, of parameters, optimizer state and algorithm
    state. It keeps the mean of the parameters (with push-sum, the mean with the weights p, which become 1) and whatever
    linear rule the sums over ranks of an algorithm's vectors obey: the sum of gradient tracking's trackers is the sum of
    its gradients, and the sum of exact diffusion's corrections is 0. Numbers such as counts of steps and rounds are
    those of rank 0 then.

    Call it before the first step. `AsynchronousGossip` has to be made after it, and its checkpoint is loaded into its
    optimizer. Asynchronous modes that have trained before may mix once with what neighbors sent before.

    Args:
        path: The folder that `save` was given.
        model: As in `save`: a model with the same names, shapes and dtypes.
        optimizer: As in `save`: over the same parameters in the same order, of the same class. None to load the model
            only.
        step: The step of the checkpoint; by default the highest.
        group: The group of ranks; by default that of `fogdist.init`.

    Raises:
        TypeError: An argument has a wrong type; the model has DTensors.
        ValueError: The checkpoint is of another model, optimizer or algorithm, or of a newer version, with the differences;
            ranks disagree on an argument; before `init`. On all ranks alike; then the model is as it was.
        OSError: There is no such checkpoint, or it cannot be read, on all ranks alike.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if a rank does not come.
    """
    states.check_arguments(model, optimizer)
    if step is not None:
        step = check_int(step, "step", minimum=0)
    context, root = current(group), Path(path)
    states.settle(model, optimizer)
    wanted = "the latest checkpoint" if step is None else f"the checkpoint of step {step}"
    what = f"load {wanted} in {root}"
    check_same_everywhere(context.backend, "checkpoint", [what, f"optimizer: {optimizer is not None}"])
    chosen = together(context, what, lambda: folders.find(root, step).name if context.rank == 0 else None)
    folder = root / tell(context, what, chosen)[0]

    def begun() -> tuple[Piece, dict[str, Any], int, bool]:
        piece = Piece(folder / piece_of(0))
        ranks = piece.head()["ranks"]
        # From several states, rank 0's gives the numbers, and the names and shapes of the tensors.
        is_combined = ranks not in (1, context.size)
        if ranks == context.size:
            piece = Piece(folder / piece_of(context.rank))
        rest = piece.rest()
        states.check(model, optimizer, piece.shapes, rest, is_mean=is_combined)
        if is_combined:
            rest = states.of_all_ranks(rest, optimizer)
            rest["extra"] = Piece(folder / piece_of(context.rank % ranks)).rest()["extra"]
        return piece, rest, ranks, is_combined

    def sources() -> list[tuple[Piece, float]]:
        mine = [Piece(folder / piece_of(rank)) for rank in range(context.rank, ranks, context.size)]
        return [(each, each.head()["weight"]) for each in mine]

    piece, rest, ranks, is_combined = together(context, what, begun)
    parts = ("model.",) if optimizer is None else ("model.", "optimizer.")
    shapes = {name: shape for name, shape in piece.shapes.items() if name.startswith(parts)}
    found: dict[str, torch.Tensor] = {}
    if is_combined:
        found = states.means(context, what, shapes, together(context, what, sources))
    tensors = found | together(context, what, lambda: piece.tensors(shapes.keys() - found.keys()))
    if optimizer is not None:
        saved = rest["optimizer"]["state"]
        together(context, what, lambda: optimizer.load_state_dict(put_together(saved, tensors)))
    together(context, what, lambda: states.restore_model(model, rest, tensors))
    return Loaded(int(folder.name.partition("-")[2]), ranks, is_combined, rest["extra"])


if not TYPE_CHECKING:  # a type checker is to find misspelt names

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)
