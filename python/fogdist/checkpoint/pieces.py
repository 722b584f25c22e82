"""A piece of a checkpoint: the state of one rank as a checkpoint of torch.distributed.checkpoint in a folder of its own.

A rank writes and reads its piece without a word to the others, so what one rank does cannot hold up or confuse another
one, and a piece can be read on any number of ranks, also by torch.distributed.checkpoint itself.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fogdist.nested import replaced

# The entries with what readers know first, and with all that is no tensor. They are tuples, because
# torch.distributed.checkpoint would take a dict apart.
_HEAD, _REST = "fog_head", "fog"
# Of these entries.
_FORMAT = 2
# The key of the dict that stands in the tree for a tensor; its value is the tensor's name.
_TENSOR = "fog tensor"


def take_apart(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns a state dict, as of `fogdist.nested.replaced`, with names for its tensors, which it adds to `tensors`."""

    def take(value: Any, name: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        while name in tensors:
            name += "'"
        tensors[name] = value.detach()
        return {_TENSOR: name}

    return replaced(state, take, name)


def put_together(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the state dict that `take_apart` was given."""

    def put(value: Any, _: str) -> Any:
        return tensors[value[_TENSOR]] if isinstance(value, dict) and set(value) == {_TENSOR} else value

    return replaced(tree, put)


def write(folder: Path, head: Mapping[str, Any], rest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Writes a piece into a new folder; its files are on the disk when this returns.

    Args:
        folder: The folder.
        head: What readers know first, see `Piece.head`.
        rest: All that is no tensor.
        tensors: By name; a name has its part of the state before its first dot: "model.NAME" and "optimizer.NAME".
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    entries: dict[str, Any] = {_HEAD: ({"format": _FORMAT, **head},), _REST: (rest,)}
    for name, tensor in tensors.items():
        part, _, inner = name.partition(".")
        entries.setdefault(part, {})[inner] = tensor.cpu()
    # The steps of `torch.distributed.checkpoint.save`, which warns if it has no group of ranks.
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    writer.set_up_storage_writer(True)
    planner.set_up_planner(entries, writer.storage_meta(), True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
    sync(folder)


class Piece:
    """A piece that was written before, in a folder.

    Attributes:
        shapes: Of its tensors, by name, as tensors on the device "meta".

    Raises:
        FileNotFoundError: A file is missing or shorter than what was written.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._folder = folder
        with damage_named(folder):
            self._reader = FileSystemReader(folder)
            self._metadata = self._reader.read_metadata()
            self.shapes = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                for name, entry in self._metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            for part in self._metadata.storage_data.values():
                file = folder / part.relative_path
                if not file.is_file() or file.stat().st_size < part.offset + part.length:
                    name = f"{folder.name}/{part.relative_path}"
                    text = f"the checkpoint in {folder.parent} is damaged: {name} is missing or not whole"
                    raise FileNotFoundError(errno.ENOENT, text)

    def head(self) -> dict[str, Any]:
        """Reads what the piece's checkpoint is: "ranks", "weight" of this piece in the mean of all, and "versions".

        Raises:
            ValueError: A newer version of fogdist wrote it.
        """
        (head,) = self._read({_HEAD: None})[_HEAD]
        if head.get("format") != _FORMAT:
            raise ValueError(
                f"path must have checkpoints of format {_FORMAT}, got one of format {head.get('format')} in "
                f"{self._folder}; it was written by {head.get('versions')}"
            )
        return dict(head)

    def rest(self) -> Any:
        """Reads all that is no tensor."""
        return self._read({_REST: None})[_REST][0]

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads tensors, into the memory of the host."""
        return self._read({name: torch.empty_like(self.shapes[name], device="cpu") for name in names})

    def _read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        # The steps of `torch.distributed.checkpoint.load`, which warns if it has no group of ranks.
        with damage_named(self._folder):
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            planner.set_up_planner(wanted, self._metadata, True)
            self._reader.set_up_storage_reader(self._metadata, True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            (plan,) = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        read: dict[str, Any] = planner.state_dict
        return read


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Raises an OSError that names a folder for whatever its damaged files have made a reader raise."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"the checkpoint in {folder} is damaged: {error!r}") from error


def sync(folder: Path) -> None:
    """Makes the names in a folder last through a loss of power, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
