"""The folder of the checkpoints: one folder per step, which appears under its name in one step once it is whole.

A checkpoint is written into a hidden folder. Rank 0 checks that it sees all files that the ranks have written, adds the
description, and renames the folder. A folder with the name of a step and a description is therefore whole. Hidden
folders are what saves left that did not end.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fogdist.warn import warn_user

_NAME = re.compile(r"step-(\d+)")
_DESCRIPTION = "fog.json"
_FORMAT = 1


@dataclass(frozen=True)
class Description:
    """What a checkpoint has.

    Attributes:
        step: The user's number of it.
        ranks: The number of ranks that saved it.
        pieces: The names of its folders, one for each rank in order, or "mean" for the mean of all.
        weights: The weight of each piece in the mean of all ranks' parameters.
        files: The names and sizes of all files.
        versions: Of the libraries that wrote it.
        format: Of this description and of the files.
    """

    step: int
    ranks: int
    pieces: list[str]
    weights: list[float]
    files: dict[str, int]
    versions: dict[str, str]
    format: int = _FORMAT


def steps(path: str | os.PathLike[str]) -> list[int]:
    """Returns the steps of all checkpoints in a folder, in ascending order. Not collective.

    Args:
        path: The folder that `save` was given; it may be missing.
    """
    found = [_NAME.fullmatch(each.parent.name) for each in Path(path).glob(f"step-*/{_DESCRIPTION}")]
    return sorted(int(match[1]) for match in found if match)


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
        discard(entry)
    hidden = _hidden(folder)
    hidden.mkdir()
    return hidden


def complete(hidden: Path, description: Description) -> None:
    """Checks that all files of a checkpoint are there, and gives its folder its name.

    Raises:
        OSError: A file is missing or of another size, or the system refuses.
    """
    root, files = hidden.parent, description.files
    if missing := _missing(hidden, files):
        raise FileNotFoundError(
            errno.ENOENT,
            f"path must be a folder that all ranks share, got {root}, where rank 0 does not see {len(missing)} of "
            f"{len(files)} files as they were written, such as {missing[0]} of {files[missing[0]]} bytes",
        )
    with (hidden / _DESCRIPTION).open("w") as file:
        json.dump(asdict(description), file)
        file.flush()
        os.fsync(file.fileno())
    sync(hidden)
    hidden.rename(folder_of(root, description.step))
    sync(root)


def describe(folder: Path) -> Description:
    """Reads the description of a checkpoint.

    Raises:
        OSError: It cannot be read.
        ValueError: A newer version of fogdist wrote it.
    """
    with damage_named(folder):
        read = dict(json.loads((folder / _DESCRIPTION).read_text()))
    if read.get("format") != _FORMAT:
        raise ValueError(
            f"path must have checkpoints of format {_FORMAT}, got one of format {read.get('format')} in {folder}; it "
            f"was written by {read.get('versions')}"
        )
    with damage_named(folder):
        described = Description(**read)
        numbers = [described.step, described.ranks, *described.weights, *described.files.values()]
        names = [*described.pieces, *described.files]
        if len(described.pieces) != len(described.weights) or not described.pieces:
            raise ValueError(f"it has {len(described.pieces)} pieces, with {len(described.weights)} weights")
        if not all(type(each) in (int, float) for each in numbers) or not all(type(n) is str for n in names):
            raise TypeError("a name or a number is of another type")
    return described


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Raises an OSError that names a folder for whatever its damaged files have made a reader raise."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"the checkpoint in {folder} is damaged: {error!r}") from error


def check_piece(folder: Path, description: Description, piece: str) -> None:
    """Raises FileNotFoundError if a file of a piece is missing or of another size."""
    files = {name: size for name, size in description.files.items() if name.startswith(f"{piece}/")}
    for name in _missing(folder, files):
        raise FileNotFoundError(
            errno.ENOENT,
            f"the checkpoint in {folder} is damaged: {name} is missing or has not its {files[name]} bytes",
        )


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


def discard(hidden: Path) -> None:
    """Removes the hidden folder of a checkpoint that could not be written."""
    shutil.rmtree(hidden, ignore_errors=True)


def sync(folder: Path) -> None:
    """Makes the names in a folder last through a loss of power, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")


def _missing(folder: Path, files: Mapping[str, int]) -> list[str]:
    """Returns the files that are missing or of another size than they were written."""
    return [
        name
        for name, size in files.items()
        if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]
