"""The average of parameters that the combining optimizers take: with neighbors, or with all ranks."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fogdist.buckets import Bucket, BucketCache, flatten, unflatten
from fogdist.collectives import allreduce_nonblocking_, wait
from fogdist.neighbor_collectives import neighbor_allreduce_nonblocking


class CommunicationType(enum.Enum):
    """Whom parameters are averaged with."""

    neighbor_allreduce = "neighbor.allreduce"
    """The neighbors: those of the topology, or those of the optimizer's dynamic attributes."""
    allreduce = "allreduce"
    """All ranks."""
    empty = "empty"
    """Nobody: local training."""


@dataclass(frozen=True)
class NeighborWeights:
    """The dynamic attributes of an optimizer, as arguments of `neighbor_allreduce`."""

    self_weight: float | None
    src_weights: Mapping[int, float] | None
    dst_weights: Iterable[int] | Mapping[int, float] | None
    enable_topo_check: bool


class ParameterAverage:
    """Averages of one list of parameters, one after the other.

    Args:
        name: What all ranks call it; no other average in flight may have the same.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._cache = BucketCache()
        self._parameters: list[Tensor] = []
        self._in_flight: list[tuple[Bucket, int]] | None = None

    @property
    def is_started(self) -> bool:
        """Whether `start` was called without `finish`."""
        return self._in_flight is not None

    def start(self, parameters: Sequence[Tensor], kind: CommunicationType, weights: NeighborWeights) -> None:
        """Sends the values that the parameters have now; they may change while the average is in flight."""
        self._parameters = list(parameters)
        in_flight = []
        if kind is not CommunicationType.empty:
            for number, bucket in enumerate(self._cache.of(self._parameters)):
                flat = flatten(bucket, self._parameters)
                in_flight.append((bucket, _post(flat, kind, weights, f"{self._name}.{number}")))
        self._in_flight = in_flight

    def finish(self) -> None:
        """Waits for the average and writes it into the parameters. Without a `start` it does nothing."""
        in_flight, self._in_flight = self._in_flight or [], None
        for bucket, handle in in_flight:
            unflatten(bucket, wait(handle), self._parameters)
        self._parameters = []


def _post(flat: Tensor, kind: CommunicationType, weights: NeighborWeights, name: str) -> int:
    if kind is CommunicationType.allreduce:
        return allreduce_nonblocking_(flat, average=True, name=name)
    return neighbor_allreduce_nonblocking(
        flat,
        self_weight=weights.self_weight,
        src_weights=weights.src_weights,
        dst_weights=weights.dst_weights,
        enable_topo_check=weights.enable_topo_check,
        name=name,
    )
