"""The average of parameters that the combining optimizers take: with neighbors, or with all ranks."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from fogdist.agreement import check_same_everywhere
from fogdist.buckets import are_same
from fogdist.collectives import allreduce_nonblocking_, wait
from fogdist.context import current
from fogdist.flat_buckets import FlatBuckets
from fogdist.hierarchical import hierarchical_neighbor_allreduce_nonblocking
from fogdist.memory import empty_flat
from fogdist.neighbor_collectives import neighbor_allreduce_nonblocking
from fogdist.parameter_changes import ChangeWatch


class CommunicationType(enum.Enum):
    """Whom parameters are averaged with."""

    neighbor_allreduce = "neighbor.allreduce"
    """The neighbors: those of the topology, or those of the optimizer's dynamic attributes."""
    hierarchical_neighbor_allreduce = "hierarchical.neighbor.allreduce"
    """All ranks of this machine and of the neighbor machines: those of the machine topology, or those of the
    optimizer's dynamic attributes for machines."""
    allreduce = "allreduce"
    """All ranks."""
    empty = "empty"
    """Nobody: local training."""


@dataclass(frozen=True)
class NeighborWeights:
    """The dynamic attributes of an optimizer, as arguments of the two neighbor operations."""

    self_weight: float | None
    src_weights: Mapping[int, float] | None
    dst_weights: Iterable[int] | Mapping[int, float] | None
    enable_topo_check: bool
    src_machine_weights: Mapping[int, float] | None = None
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None


class ParameterAverage:
    """Averages of parameters that live side by side in flat buffers, one average after the other.

    Args:
        name: What all ranks call it; no other average in flight may have the same.
        names: Of the parameters, for messages.
        bucket_bytes: What a flat buffer takes, or one parameter that is larger.
    """

    def __init__(self, name: str, names: Mapping[Tensor, str], bucket_bytes: int) -> None:
        self._name = name
        self._names = names
        self._bucket_bytes = bucket_bytes
        self._buckets: FlatBuckets | None = None
        self._in_flight: list[tuple[int, Tensor, int]] | None = None
        self._changes = ChangeWatch()

    @property
    def is_started(self) -> bool:
        """Whether something was sent that `finish` has not waited for."""
        return self._in_flight is not None

    def hold(self, parameters: Sequence[Tensor]) -> FlatBuckets:
        """Moves parameters into flat buffers, and back where their `data` was replaced; returns the buffers.

        Collective when they are others than the last time.

        Raises:
            TypeError: As `FlatBuckets`.
            ValueError: As `FlatBuckets`; ranks hold different ones (on all ranks alike).
        """
        if self._buckets is not None and are_same(self._buckets.tensors, parameters):
            self._buckets.rehome()
            return self._buckets
        names = [self._names[parameter] for parameter in parameters]
        buckets = FlatBuckets(parameters, self._bucket_bytes, names=names, owner=self)
        with buckets.released_on_error():
            check_same_everywhere(current().backend, "model", buckets.layout())
        self._buckets = buckets
        return buckets

    def start(
        self,
        parameters: Sequence[Tensor],
        kind: CommunicationType,
        weights: NeighborWeights,
    ) -> None:
        """Sends the values that the parameters have now, from where they are.

        They must not change until `finish`, and keep their values until then.

        Args:
            parameters: What is averaged.
            kind: With whom.
            weights: For neighbors.

        Raises:
            TypeError: As the operation.
            ValueError: As the operation and `hold`.
        """
        buckets = self.hold(parameters)
        for number in buckets.sending_order:
            self.add(number, kind, weights)
        self._changes.begin(buckets)
        self._in_flight = self._in_flight or []

    def add(self, number: int, kind: CommunicationType, weights: NeighborWeights) -> None:
        """Sends one of the buckets that `hold` gave, as `start` does with all of them; in any order."""
        assert self._buckets is not None
        if kind is not CommunicationType.empty:
            flat = self._buckets.flats[number]
            handle = _post(flat, kind, weights, f"{self._name}.{number}")
            self._in_flight = [*(self._in_flight or []), (number, flat, handle)]

    def finish(self) -> None:
        """Waits for what was sent, after which the parameters have the average."""
        in_flight, self._in_flight = self._in_flight, None
        if not in_flight or self._buckets is None:
            return
        averages, failure = [], None
        for _, _, handle in in_flight:
            try:
                averages.append(wait(handle))
            except dist.DistBackendError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        # Not before: neighbors read the values that were sent until then.
        self._changes.end(self._buckets, stacklevel=3)
        for (number, flat, _), average in zip(in_flight, averages, strict=True):
            if not self._buckets.swap(number, average):
                flat.copy_(average)


def _post(flat: Tensor, kind: CommunicationType, weights: NeighborWeights, name: str) -> int:
    if kind is CommunicationType.allreduce:
        # A copy in shared memory, which may become the parameters'.
        copy = empty_flat(flat.numel(), flat.dtype, flat.device)
        return allreduce_nonblocking_(copy.copy_(flat), average=True, name=name)
    if kind is CommunicationType.hierarchical_neighbor_allreduce:
        return hierarchical_neighbor_allreduce_nonblocking(
            flat,
            self_weight=weights.self_weight,
            src_machine_weights=weights.src_machine_weights,
            dst_machine_weights=weights.dst_machine_weights,
            enable_topo_check=weights.enable_topo_check,
            name=name,
        )
    return neighbor_allreduce_nonblocking(
        flat,
        self_weight=weights.self_weight,
        src_weights=weights.src_weights,
        dst_weights=weights.dst_weights,
        enable_topo_check=weights.enable_topo_check,
        name=name,
    )
