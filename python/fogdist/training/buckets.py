"""Copies of tensors side by side in flat buffers, which exchanges use in place.

`fogdist.packing` packs tensors for one message and unpacks them again; these buffers, and their order, stay.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fogdist.memory import empty_flat
from fogdist.packing import make_buckets, on_device
from fogdist.shards import copies_of, is_sharded, local_of

# Buckets that an owner has taken over. No weak references to tensors: `torch.utils.swap_tensors` refuses those that have any.
_owned: weakref.WeakSet[FlatBuckets] = weakref.WeakSet()


class Owner(Protocol):
    """What exchanges buckets, and releases them when another owner takes over."""

    def _fog_give_up(self) -> None: ...


class FlatBuckets:
    """Flat buffers for the values of tensors. The tensors keep their own memory, and stay what they are for others.

    `load` copies the values of the tensors into the buffers, and `write_back` copies those of the buffers into the tensors.
    Autograd sees this as a change of the tensors in place. CPU buffers are in memory that the host's other ranks can read
    (`fogdist.empty`), so exchanges of them copy nothing. For a DTensor, such as a parameter of FSDP2, the buffers hold this
    rank's shard, and a bucket has DTensors only that the same ranks have copies of: so the copies of a bucket are equal.

    Args:
        tensors: Dense tensors of any dtypes and devices, or DTensors of such. A tensor that is given several times
            counts once. Dense strides are kept (channels_last, transposed); others become contiguous in the buffers.
        max_bytes: The largest size of a bucket with more than one tensor; None as in `fogdist.packing.make_buckets`.
        names: Of the tensors, for messages; by default their places in the list.
        groups: A number for each tensor; a bucket has tensors of one number only. By default all have the same.
        owner: The object that exchanges the buffers. `take_over` ends other owners of the tensors, because both would mix
            them; the owner may put them into other buckets itself. None for no owner.

    Attributes:
        flats: The buffers, as they are: one-dimensional.
        group_of: The group number of each buffer's tensors, in the order of `flats`.

    Raises:
        TypeError: A tensor is sparse, or of a subclass with a layout of its own.
        ValueError: It is on the device meta or without a shape yet, or is expanded; there are more names than tensors, or fewer.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        max_bytes: int | None = None,
        *,
        names: Sequence[str] | None = None,
        groups: Sequence[int] | None = None,
        owner: Owner | None = None,
    ) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self.flats: list[Tensor] = []
        self.group_of: list[int] = []
        self._tensors: list[list[Tensor]] = []
        self._has_shards: list[bool] = []
        self._views: list[list[Tensor]] = []
        self._is_outdated = False  # whether tensors may have changed since the buffers had their values
        self._may_differ = False  # whether the buffers may have changed since the tensors had their values
        self._labels: dict[Tensor, str] = {}
        places = (f"tensors[{place}]" for place in range(len(tensors)))
        for tensor, label in zip(tensors, places if names is None else map(repr, names), strict=True):
            _check(tensor, label)
            self._labels.setdefault(tensor, label)
        distinct = self.tensors
        group_of = dict(zip(tensors, groups, strict=True)) if groups is not None else {}
        numbers = [group_of.get(tensor, 0) for tensor in distinct]
        keys = list(zip(numbers, map(copies_of, distinct), strict=True))
        for bucket in make_buckets([local_of(t) for t in distinct], max_bytes, groups=keys):
            members = [distinct[place] for place in bucket.places]
            self.group_of.append(numbers[bucket.places[0]])
            self._tensors.append(members)
            self._has_shards.append(any(map(is_sharded, members)))
            # With the strides that clone() would give: the tensor's own strides if they are dense.
            like = [torch.empty_like(local_of(member), device="meta") for member in members]
            self.flats.append(empty_flat(sum(each.numel() for each in like), bucket.dtype, bucket.device))
            self._views.append(_views(self.flats[-1], like))
        self.load()

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Calls `release` if an owner's construction fails; the error's traceback keeps the owner alive."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def take_over(self) -> None:
        """Ends the tensors' previous owners. Call it after ranks agree."""
        mine = None if self._owner is None else self._owner()
        for each in list(_owned):
            owner = None if each._owner is None else each._owner()
            if owner is not None and owner is not mine and not self._labels.keys().isdisjoint(each._labels):
                owner._fog_give_up()
        _owned.add(self)

    def release(self) -> None:
        """Ends the use of the tensors: another owner does not end this one."""
        _owned.discard(self)

    @property
    def sending_order(self) -> list[int]:
        """The indices of the buffers in `flats`, in the order in which ranks must send them.

        If all buffers are on the CPU, any order works because messages have names. On other devices it is the order in
        which a backward pass completes gradients, the last parameters first.
        """
        places = range(len(self.flats))
        return list(places if all(flat.is_cpu for flat in self.flats) else reversed(places))

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether a tensor is in one of the buckets."""
        return tensor in self._labels

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, each once, in the order of the arguments."""
        return list(self._labels)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether these are all tensors, in the order of the arguments."""
        return len(tensors) == len(self._labels) and all(map(operator.is_, tensors, self._labels))

    @property
    def labels(self) -> list[str]:
        """The quoted names of the tensors for messages, or their indices if they have no names, bucket by bucket."""
        return [self._labels[tensor] for members in self._tensors for tensor in members]

    def views(self, flat_like: Tensor, bucket: int) -> list[Tensor]:
        """Returns views of another buffer with the layout of the bucket's tensors.

        Args:
            flat_like: One-dimensional, contiguous, as long as the bucket's buffer; of any dtype and device.
            bucket: Index in `flats`.

        Raises:
            ValueError: `flat_like` has another shape, or is not contiguous.
        """
        length = self.flats[bucket].numel()
        if flat_like.shape != (length,) or not flat_like.is_contiguous():
            raise ValueError(
                f"flat_like must be contiguous of shape ({length},), got shape {tuple(flat_like.shape)} and "
                f"strides {flat_like.stride()}"
            )
        return _views(flat_like, self._views[bucket])

    def pieces(self, flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor with the view of its elements in vectors like `flats`, with its shape and strides."""
        for number, flat in enumerate(flats):
            yield from zip(self._tensors[number], self.views(flat, number), strict=True)

    def zeros(self) -> list[Tensor]:
        """Returns zeros for all elements of the buffers."""
        return [torch.zeros_like(flat) for flat in self.flats]

    def gradients(self) -> list[Tensor]:
        """Returns the tensors' gradients in vectors like `flats`; zeros for tensors without one.

        Raises:
            ValueError: A gradient is not dense.
        """
        flats = self.zeros()
        gradients, places = [], []
        for tensor, piece in self.pieces(flats):
            gradient = tensor.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise ValueError(f"gradients must be dense for this algorithm, got layout {gradient.layout}")
            gradients.append(local_of(gradient.detach()))
            places.append(piece)
        if gradients:
            torch._foreach_copy_(places, gradients)
        return flats

    def layout(self) -> list[str]:
        """Returns a line for each tensor; if the lines are the same on two ranks, the buffers have the same layout."""
        return [
            f"{self._labels[tensor]}: bucket {i} at {view.storage_offset() - flat.storage_offset()}, {tensor.dtype} "
            f"of shape {tuple(view.shape)} and strides {view.stride()}{on_device(local_of(tensor))}"
            for i, flat in enumerate(self.flats)
            for tensor, view in zip(self._tensors[i], self._views[i], strict=True)
        ]

    def versions(self) -> list[tuple[int, int]]:
        """Returns what changes with each tensor's values, or if its `data` is replaced, bucket by bucket."""
        numbers = range(len(self.flats))
        return [(each._version, each.data_ptr()) for number in numbers for each in self._locals(number)]

    # --- the values ---

    @torch.no_grad()
    def load(self, bucket: int | None = None) -> None:
        """Copies the values of all tensors, or of those of one bucket, into the buffers.

        Raises:
            ValueError: A tensor has another dtype, device or shape than before. Nothing is changed then.
        """
        numbers = range(len(self.flats)) if bucket is None else [bucket]
        self.check_kinds(numbers)
        for number in numbers:
            torch._foreach_copy_(self._views[number], self._locals(number))
        if bucket is None:
            self._is_outdated = self._may_differ = False

    @torch.no_grad()
    def write_back(self, vectors: Mapping[int, Tensor] | None = None, *, kept: float = 0.0) -> None:
        """Copies the values of the buffers, or of vectors like some of them by their indices, into the tensors.

        Args:
            vectors: The vectors, or None.
            kept: The share of the tensors' own values in their new ones: ``kept * own + (1 - kept) * given``.
        """
        for number in range(len(self.flats)) if vectors is None else vectors:
            vector = self.flats[number] if vectors is None else vectors[number]
            is_own = vector is self.flats[number]
            views = self._views[number] if is_own else self.views(vector, number)
            if kept:
                torch._foreach_lerp_(self._locals(number), views, 1.0 - kept)
            else:
                torch._foreach_copy_(self._locals(number), views)
        self._is_outdated = vectors is not None
        self._may_differ = False

    def values(self) -> list[Tensor]:
        """Returns the buffers with the values of the tensors. The caller may change them: `write_changes` follows."""
        if self._is_outdated:
            self.load()
        self._may_differ = True
        return list(self.flats)

    def copies(self) -> list[Tensor]:
        """Returns copies of the tensors' values."""
        if self._is_outdated:
            self.load()
        return [flat.clone() for flat in self.flats]

    def outdate(self) -> None:
        """Tells that tensors may have changed: `values` and `copies` copy theirs then."""
        self._is_outdated, self._may_differ = True, False

    def write_changes(self) -> None:
        """Copies the values of the buffers into the tensors if they may have changed."""
        if self._may_differ:
            self.write_back()

    def check_kinds(self, buckets: Sequence[int] | None = None) -> None:
        """Raises ValueError as `load`, for all buckets or for those with the given indices."""
        for number in range(len(self.flats)) if buckets is None else buckets:
            dtype, device = self.flats[number].dtype, self.flats[number].device
            for i, (local, view) in enumerate(zip(self._locals(number), self._views[number], strict=True)):
                if local.shape != view.shape or local.dtype != dtype or local.device != device:
                    raise ValueError(
                        f"{self._labels[self._tensors[number][i]]} must stay {_kind(view)}, as when "
                        f"it was put into its bucket; got {_kind(local)}. Convert a model before it is distributed"
                    )

    def _locals(self, number: int) -> list[Tensor]:
        tensors = self._tensors[number]
        return [local_of(tensor) for tensor in tensors] if self._has_shards[number] else tensors


def _check(tensor: Tensor, label: str) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{label} must have a shape, got a {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{label} must be dense (layout torch.strided), got layout {tensor.layout}")
    tensor = local_of(tensor)
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"{label} must be an ordinary tensor, got {type(tensor).__name__} of {tensor.dtype}")
    if tensor.device.type == "meta":
        raise ValueError(f"{label} must have memory, got one on the device meta")
    if any(step == 0 and length > 1 for length, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{label} must not be expanded, got strides {tensor.stride()}")


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of a flat tensor with the shapes and strides of others, side by side."""
    views, offset = [], flat.storage_offset()
    for each in like:
        views.append(flat.as_strided(each.shape, each.stride(), offset))
        offset += each.numel()
    return views


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
