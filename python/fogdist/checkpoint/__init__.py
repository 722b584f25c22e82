"""Checkpoints of decentralized training, by torch.distributed.checkpoint: each rank's own state, or the mean of all.

A checkpoint is whole or absent, and can be loaded on another number of ranks. ``docs/howto/checkpoints.md`` is the guide.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

from fogdist.agreement import check_same_everywhere
from fogdist.checkpoint import folders, states
from fogdist.checkpoint.folders import MEAN, folder_of, latest, piece_of, steps
from fogdist.checkpoint.pieces import Piece, State, write
from fogdist.checkpoint.together import tell, together
from fogdist.context import Context, current
from fogdist.observe.detection import suspend_detection
from fogdist.topology.validation import check_flags, check_int

__all__ = ["Loaded", "Saving", "latest", "load", "save", "save_nonblocking", "steps"]

StrPath = str | os.PathLike[str]

# The saves that have not ended, by folder: another one would remove their files.
_in_flight: weakref.WeakValueDictionary[Path, Saving] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Loaded:
    """What `load` has loaded.

    Attributes:
        step: The checkpoint's step.
        ranks: The number of ranks that saved it.
        is_mean: Whether this rank now has the mean of all ranks that saved it, in place of the state of one rank.
        extra: The `extra` that was saved on the rank of this number, or, if there was no such rank, on the rank
            whose number is the remainder by `ranks`; on rank 0, if the checkpoint has the mean only.
    """

    step: int
    ranks: int
    is_mean: bool
    extra: Any


class Saving:
    """A checkpoint that is being written, made by `save_nonblocking`. It is not there before all ranks call `wait`."""

    def __init__(self, written: Future[None], complete: Callable[[], Path]) -> None:
        self._written = written
        self._complete = complete
        self._ended: Path | Exception | None = None

    def is_written(self) -> bool:
        """Returns whether this rank has written its files, or failed to; `wait` then waits for other ranks only."""
        return self._written.done()

    @suspend_detection()
    def wait(self) -> Path:
        """Completes the checkpoint and returns its folder. Collective; calling it again gives the same at once.

        Raises:
            OSError: A rank could not write; see `save`.
            RuntimeError: As `save`; torch.distributed.DistBackendError if a rank does not come.
        """
        if self._ended is None:
            try:
                self._ended = self._complete()
            except Exception as error:
                self._ended = error
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended


@suspend_detection()
def save(
    path: StrPath,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    average: bool = False,
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
        average: Whether to save one copy, the mean over all ranks of parameters, optimizer state and algorithm state,
            instead of the state of each rank. Counts and other integers are those of rank 0.
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
        RuntimeError: Another failure of a rank to write, on all ranks alike; an earlier `save_nonblocking` into `path`
            was not waited for; after `shutdown`. torch.distributed.DistBackendError if a rank does not come. If that is
            rank 0 and it was killed in its last moments, the checkpoint may be there all the same.
    """
    return _begin(path, model, optimizer, step, average, extra, keep, group, is_copied=False).wait()


def save_nonblocking(
    path: StrPath,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    average: bool = False,
    extra: Any = None,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Saving:
    """Begins `save`, whose arguments it has, and writes a copy of the state while the training goes on. Collective.

    The thread that writes sends no messages, so nothing meets the exchanges of the training. All ranks complete the
    checkpoint by `Saving.wait`, for example before the next call; until then it is not there.

    Raises:
        TypeError: As `save`.
        ValueError: As `save`.
        OSError: `path` has a checkpoint of this step.
        RuntimeError: As `save`.
    """
    return _begin(path, model, optimizer, step, average, extra, keep, group, is_copied=True)


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
    number of ranks, and from a checkpoint of ``average=True``, all ranks get the mean over the ranks that saved it, of
    parameters, optimizer state and algorithm state. It keeps the mean of the parameters (with push-sum, the mean with
    the weights p, which become 1) and whatever linear rule the sums over ranks of an algorithm's vectors obey: the sum of
    gradient tracking's trackers is the sum of its gradients, and the sum of exact diffusion's corrections is 0. Numbers
    such as counts of steps and rounds are those of rank 0 then.

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
    has_mean_only = (folder / MEAN).is_dir()

    def opened(name: str) -> Piece:
        piece = Piece(folder / name)
        piece.check()
        return piece

    def begun() -> tuple[Piece, dict[str, Any], int, bool]:
        piece = opened(MEAN if has_mean_only else piece_of(0))
        ranks = piece.head()["ranks"]
        # From several states, rank 0's gives the numbers, and the names and shapes of the tensors.
        is_combined = not has_mean_only and ranks not in (1, context.size)
        if not has_mean_only and ranks == context.size:
            piece = opened(piece_of(context.rank))
        rest = piece.rest()
        states.check(model, optimizer, piece.shapes, rest, is_mean=is_combined)
        if is_combined:
            rest = states.of_all_ranks(rest, optimizer)
            rest["extra"] = opened(piece_of(context.rank % ranks)).rest()["extra"]
        return piece, rest, ranks, is_combined

    def sources() -> list[states.Source]:
        mine = [opened(piece_of(rank)) for rank in range(context.rank, ranks, context.size)]
        return [
            states.Source(each.tensors, states.weights_of(each.shapes, each.rest(), each.head()))
            for each in mine
        ]

    piece, rest, ranks, is_combined = together(context, what, begun)
    parts = ("model.",) if optimizer is None else ("model.", "optimizer.")
    shapes = {name: shape for name, shape in piece.shapes.items() if name.startswith(parts)}
    found: dict[str, torch.Tensor] = {}
    if is_combined:
        found = states.means(context, what, shapes, together(context, what, sources))
    tensors = found | together(context, what, lambda: piece.tensors(shapes.keys() - found.keys()))
    if optimizer is not None:
        together(context, what, lambda: states.restore_optimizer(optimizer, rest, tensors))
    together(context, what, lambda: states.restore_model(model, rest, tensors))
    return Loaded(int(folder.name.partition("-")[2]), ranks, is_combined or has_mean_only, rest["extra"])


# --- inside ---


def _begin(
    path: StrPath,
    model: Module,
    optimizer: Optimizer | None,
    step: int,
    average: bool,
    extra: Any,
    keep: int | None,
    group: dist.ProcessGroup | None,
    *,
    is_copied: bool,
) -> Saving:
    """Begins a checkpoint: a thread writes the state, or with `is_copied` a copy of it."""
    from fog_pg._build_info import VERSION  # written by the build, which ranks need

    states.check_arguments(model, optimizer)
    step = check_int(step, "step", minimum=0)
    check_flags(average=average)
    if keep is not None:
        keep = check_int(keep, "keep", minimum=1)
    context, root = current(group), Path(path).absolute()
    if root in _in_flight:
        raise RuntimeError(
            f"an earlier save_nonblocking into {root} needs a call of its wait() on all ranks before"
        )
    states.settle(model, optimizer)
    state = states.capture(model, optimizer, extra)
    what = f"begin the checkpoint of step {step} in {root}"
    check_same_everywhere(context.backend, "checkpoint", [what, f"{average=}", f"{keep=}", f"{is_copied=}"])
    begun = together(context, what, lambda: folders.begin(root, step).name if context.rank == 0 else None)
    hidden = root / tell(context, what, begun)[0]
    pieces = [MEAN] if average else [piece_of(rank) for rank in range(context.size)]
    if average:
        try:
            state = _mean_of(context, what, state, optimizer)
        except Exception:
            folders.discard(hidden)
            raise
    head = {"ranks": context.size, "versions": {"fogdist": VERSION, "torch": torch.__version__}}
    written: Future[None] = Future()
    if context.rank < len(pieces):
        # Here, because streams of devices belong to threads.
        tensors = {name: tensor.to("cpu", copy=is_copied) for name, tensor in state.tensors.items()}
        rest = copy.deepcopy(state.rest) if is_copied else state.rest
        executor = ThreadPoolExecutor(1, thread_name_prefix="fogdist.checkpoint")
        kept = State(tensors, rest, state.head | head)
        written = executor.submit(write, hidden / pieces[context.rank], kept)
        executor.shutdown(wait=False)
    else:
        written.set_result(None)
    is_first, which = context.rank == 0, f"the checkpoint of step {step} in {root}"

    def finish() -> Path:
        try:
            together(context, f"write {which}", written.result)
            together(
                context,
                f"complete {which}",
                lambda: folders.complete(hidden, step, pieces) if is_first else None,
            )
        except Exception as error:
            # If a rank did not come, others may still be writing; the next save removes the files.
            if is_first and not isinstance(error, dist.DistBackendError):
                folders.discard(hidden)
            raise
        finally:
            _in_flight.pop(root, None)
        if is_first and keep is not None:
            folders.remove_old(root, keep, step)
        return folder_of(root, step)

    saving = _in_flight[root] = Saving(written, finish)
    return saving


def _mean_of(context: Context, what: str, state: State, optimizer: Optimizer | None) -> State:
    """Returns the mean of the states of all ranks, with the numbers of rank 0. Collective."""
    own = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in state.tensors.items()]
    told = tell(context, what, own if context.rank == 0 else None)[0]
    shapes = {
        name: torch.empty(size, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
        for name, dtype, size in told
    }
    weights = states.weights_of(state.tensors, state.rest, state.head)
    found = states.means(context, what, shapes, [states.Source(lambda names: state.tensors, weights)])
    others = {name: tensor for name, tensor in state.tensors.items() if name not in found}
    return State({**others, **found}, states.of_all_ranks(state.rest, optimizer), {"weight": 1.0})
