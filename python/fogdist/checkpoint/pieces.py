"""A piece of a checkpoint: the state of one rank as a checkpoint of torch.distributed.checkpoint in a folder of its own.

A rank writes and reads its piece without a word to the others, so what one rank does cannot hold up or confuse another
one, and a piece can be read on any number of ranks, also by torch.distributed.checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The entry with all that is no tensor. It is a tuple, because torch.distributed.checkpoint would take a dict apart.
_REST = "fog"
# The key of the dict that stands in the tree for a tensor; its value is the tensor's name.
_TENSOR = "fog tensor"


@dataclass(frozen=True)
class Shape:
    """Of a saved tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.size}"


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns a state dict with names in place of its tensors, which are added to `tensors`.

    Args:
        value: A tensor, a container, or anything else, which stays.
        name: The name of the value, such as "optimizer"; those within it follow after a dot.
        tensors: The tensors by name.
    """
    if isinstance(value, Tensor):
        while name in tensors:
            name += "'"
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {key: take_apart(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [take_apart(item, f"{name}.{place}", tensors) for place, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def put_together(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the state dict that `take_apart` was given, without the tensors that are not in `tensors`."""
    if isinstance(tree, dict):
        if set(tree) == {_TENSOR}:
            return tensors[tree[_TENSOR]]
        return {key: put_together(item, tensors) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [put_together(item, tensors) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def write(folder: Path, tensors: Mapping[str, Tensor], rest: Any) -> None:
    """Writes a piece into a new folder; its files are on the disk when this returns.

    Args:
        folder: The piece's folder, which must not exist.
        tensors: By name; a name has its part of the state before its first dot, as in "model.layer.weight".
        rest: All else, of any types that can be pickled.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    state: dict[str, Any] = {_REST: (rest,)}
    for name, tensor in tensors.items():
        part, _, inner = name.partition(".")
        state.setdefault(part, {})[inner] = tensor
    # The steps of `torch.distributed.checkpoint.save`, without its exchanges.
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    writer.set_up_storage_writer(True)
    planner.set_up_planner(state, writer.storage_meta(), True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


class Piece:
    """A piece that was written before.

    Args:
        folder: The piece's folder.

    Attributes:
        shapes: Of its tensors, by name.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        entries = self._metadata.state_dict_metadata
        self.shapes = {
            name: Shape(entry.properties.dtype, tuple(entry.size))
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def rest(self) -> Any:
        """Reads all that is no tensor."""
        return self._read({_REST: None})[_REST][0]

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Reads tensors, into the memory of the host."""
        shapes = {name: self.shapes[name] for name in names}
        wanted = {
            name: torch.empty(shape.size, dtype=shape.dtype, device="cpu") for name, shape in shapes.items()
        }
        return self._read(wanted)

    def _read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        # The steps of `torch.distributed.checkpoint.load`, without its exchanges.
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(wanted, self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
        read: dict[str, Any] = planner.state_dict
        return read
