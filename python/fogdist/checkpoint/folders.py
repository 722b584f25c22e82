"""The folder of the checkpoints: one folder per step, which appears under its name in one step once it is whole.

A checkpoint is written into a hidden folder. Rank 0 checks that it sees all files that the ranks have written, and
renames the folder. A folder with the name of a step is therefore whole. Hidden folders are what saves left that did not
end.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from fogdist.checkpoint.pieces import Piece, sync
from fogdist.warn import warn_user

_NAME = re.compile(r"step-(\d+)")


def steps(path: str | os.PathLike[str]) -> list[int]:
    """Returns the steps of all checkpoints in a folder, in ascending order. Not collective.

    Args:
        path: The folder that `save` was given; it may be missing.
    """
    found = [(each, _NAME.fullmatch(each.name)) for each in Path(path).glob("step-*")]
    metadata = f"{piece_of(0)}/.metadata"
    return sorted(int(match[1]) for each, match in found if match and (each / metadata).is_file())


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Returns the folder of the checkpoint with the highest step, or None if there is no checkpoint. Not collective.

    Args:
        path: The folder that `save` was given; it may be missing.
    """
    known = steps(path)
    return folder_of(Path(path), known[-1]) if known else None


def folder_of(root: Path, step: int) -> Path:
    """Returns the folder of a step."""
    return root / f"step-{step:08d}"


def piece_of(rank: int) -> str:
    """Returns the name of a rank's piece."""
    return f"rank{rank}"


def find(root: Path, step: int | None) -> Path:
    """Returns the folder of a step's checkpoint, or of the highest step. Raises FileNotFoundError if there is none."""
    known = steps(root)
    if not known or (step is not None and step not in known):
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        there = f"those of steps {known}" if known else "none"
        raise FileNotFoundError(errno.ENOENT, f"path must have {wanted}, got {root} with {there}")
    return folder_of(root, known[-1] if step is None else step)


def begin(root: Path, step: int) -> Path:
    """Makes the hidden folder of a new checkpoint, and removes those of saves that did not end.

    Raises:
        FileExistsError: There is a checkpoint of this step.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = folder_of(root, step)
    if folder.exists():
        raise FileExistsError(errno.EEXIST, f"path must have no checkpoint of step {step} yet, got {folder}")
    for entry in root.glob(".step-*"):
        shutil.rmtree(entry, ignore_errors=True)
    hidden = _hidden(folder)
    hidden.mkdir()
    return hidden


def complete(hidden: Path, step: int, pieces: Iterable[str]) -> None:
    """Checks that all files of a checkpoint are there, and gives its folder its name.

    Raises:
        OSError: A file is missing or too short, or the system refuses.
    """
    try:
        for piece in pieces:
            Piece(hidden / piece)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT,
            f"path must be a folder that all ranks share, got {hidden.parent}, where rank 0 does not see all files as "
            f"they were written: {error}",
        ) from error
    sync(hidden)
    hidden.rename(folder_of(hidden.parent, step))
    sync(hidden.parent)


def remove_old(root: Path, keep: int, but: int) -> None:
    """Removes the checkpoints of the lowest steps, so that `keep` are left, among them that of step `but`.

    An error of the system is a warning: the new checkpoint is there.
    """
    others = [step for step in steps(root) if step != but]
    for step in others[: max(0, len(others) - keep + 1)]:
        folder = folder_of(root, step)
        try:
            shutil.rmtree(folder.rename(_hidden(folder)))  # never seen without some of its files
        except OSError as error:
            warn_user(f"an old checkpoint could not be removed: {error}")


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
