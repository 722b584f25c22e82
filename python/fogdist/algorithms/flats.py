"""Parameters as a few flat vectors: what algorithms compute with, and what they exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fogdist.buckets import Bucket, flatten, make_buckets, unflatten


class Flats:
    """Flat vectors with the elements of parameters, each of one parameter group, dtype and device.

    Args:
        groups: The parameters of each parameter group.

    Attributes:
        group_of: The parameter group of each flat vector, by its place.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._groups = [list(group) for group in groups]
        self._parts: list[tuple[Bucket, list[Tensor]]] = []
        self.group_of: list[int] = []
        for place, group in enumerate(self._groups):
            for bucket in make_buckets(group):
                self._parts.append((bucket, group))
                self.group_of.append(place)

    def hold(self, groups: Sequence[Sequence[Tensor]]) -> bool:
        """Returns whether these are the parameters of exactly these groups."""
        return len(groups) == len(self._groups) and all(
            len(now) == len(then) and all(p is q for p, q in zip(now, then, strict=True))
            for now, then in zip(groups, self._groups, strict=True)
        )

    def read(self) -> list[Tensor]:
        """Returns the values that the parameters have now, in memory of the caller's own."""
        return [flatten(bucket, group) for bucket, group in self._parts]

    def write(self, flats: Sequence[Tensor]) -> None:
        """Gives the parameters these values."""
        for (bucket, group), flat in zip(self._parts, flats, strict=True):
            unflatten(bucket, flat, group)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients, in memory of the caller's own; zeros for parameters without one.

        Raises:
            ValueError: A gradient is not dense.
        """
        return [
            torch.cat([_gradient(group[place]).reshape(-1) for place in bucket.places])
            for bucket, group in self._parts
        ]

    def zeros(self) -> list[Tensor]:
        """Returns zeros for all elements."""
        return [
            torch.zeros(
                sum(group[place].numel() for place in bucket.places), dtype=bucket.dtype, device=bucket.device
            )
            for bucket, group in self._parts
        ]

    def views(self, flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each parameter and its elements in `flats`, in its shape."""
        for (bucket, group), flat in zip(self._parts, flats, strict=True):
            pieces = torch.split(flat, [group[place].numel() for place in bucket.places])
            for place, piece in zip(bucket.places, pieces, strict=True):
                yield group[place], piece.view(group[place].shape)


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.layout is not torch.strided:
        raise ValueError(f"gradients must be dense for this algorithm, got layout {gradient.layout}")
    return gradient
