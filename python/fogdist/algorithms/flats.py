"""Parameters as a few flat vectors: what algorithms compute with, and what they exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from fogdist.flat_buckets import FlatBuckets
from fogdist.parameter_changes import ChangeWatch


class Flats:
    """Moves parameters into flat vectors, each of one parameter group, dtype and device.

    The parameters are views of them from then on, see `FlatBuckets`.

    Args:
        groups: The parameters of each parameter group.
        names: Of the parameters, for messages.
        owner: As of `FlatBuckets`.

    Attributes:
        group_of: The parameter group of each flat vector, by its place.

    Raises:
        TypeError: As `FlatBuckets`.
        ValueError: As `FlatBuckets`.
    """

    def __init__(
        self, groups: Sequence[Sequence[Tensor]], names: Mapping[Tensor, str], owner: object
    ) -> None:
        self._groups = [list(group) for group in groups]
        self._buckets = [
            FlatBuckets(group, names=[names[each] for each in group], owner=owner) for group in groups
        ]
        self._values = [flat for buckets in self._buckets for flat in buckets.flats]
        self._watches = [ChangeWatch() for _ in self._buckets]
        self.group_of = [place for place, buckets in enumerate(self._buckets) for _ in buckets.flats]

    def released_on_error(self) -> ExitStack:
        """As of `FlatBuckets`."""
        stack = ExitStack()
        for buckets in self._buckets:
            stack.enter_context(buckets.released_on_error())
        return stack

    def hold(self, groups: Sequence[Sequence[Tensor]]) -> bool:
        """Returns whether these are the parameters of exactly these groups."""
        return len(groups) == len(self._groups) and all(
            len(now) == len(then) and all(p is q for p, q in zip(now, then, strict=True))
            for now, then in zip(groups, self._groups, strict=True)
        )

    def rehome(self) -> None:
        """Takes up parameters whose data the user has replaced.

        Raises:
            ValueError: One has another dtype, device or shape now.
        """
        for buckets in self._buckets:
            buckets.rehome()

    @property
    def values(self) -> list[Tensor]:
        """The flat vectors themselves: what is written to them is in the parameters."""
        return list(self._values)

    def watch(self) -> None:
        """From now on parameters must not change until `end_watch`, as their values are on the way to other ranks."""
        for watch, buckets in zip(self._watches, self._buckets, strict=True):
            watch.begin(buckets)

    def end_watch(self) -> None:
        """Warns if they did, once."""
        for watch, buckets in zip(self._watches, self._buckets, strict=True):
            watch.end(buckets, stacklevel=5)

    def copies(self) -> list[Tensor]:
        """Returns the values that the parameters have now, in memory of the caller's own."""
        return [flat.clone() for flat in self._values]

    def write(self, flats: Sequence[Tensor]) -> None:
        """Gives the parameters these values."""
        for mine, flat in zip(self._values, flats, strict=True):
            mine.copy_(flat)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients, in memory of the caller's own; zeros for parameters without one.

        Raises:
            ValueError: A gradient is not dense.
        """
        flats = self.zeros()
        gradients, places = [], []
        for parameter, piece in self.views(flats):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise ValueError(f"gradients must be dense for this algorithm, got layout {gradient.layout}")
            gradients.append(gradient.detach())
            places.append(piece)
        if gradients:
            torch._foreach_copy_(places, gradients)
        return flats

    def zeros(self) -> list[Tensor]:
        """Returns zeros for all elements."""
        return [torch.zeros_like(flat) for flat in self._values]

    def views(self, flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each parameter and its elements in `flats`, in its shape and strides."""
        rest = iter(flats)
        for buckets in self._buckets:
            for place in range(len(buckets.flats)):
                yield from zip(buckets.tensors_of(place), buckets.views(next(rest), place), strict=True)
