"""Metrics of training: the consensus distance, the staleness of neighbors' values, and bytes and wait time per peer.

metrics = fogdist.metrics.Metrics(model)
for step, batch in enumerate(batches):
    ...
    if step % 100 == 0:
        metrics.collect()
        metrics.write(writer, step)  # torch.utils.tensorboard.SummaryWriter
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from fog_pg import _extension
from fogdist.consensus import consensus_distance
from fogdist.context import Context, current
from fogdist.observe.export import Exporter

__all__ = ["Exporter", "Metrics", "Writer"]


class HasStaleness(Protocol):
    """An object that exchanges with ranks which go at their own pace."""

    context: Context

    def staleness(self) -> dict[int, int]:
        """Returns how many exchanges old the values of each in-neighbor are."""


# All such objects in use.
has_staleness: weakref.WeakSet[HasStaleness] = weakref.WeakSet()


class Writer(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that `Metrics.write` uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        """Adds a number."""


class Metrics:
    """Counts the bytes and times of this rank's exchanges from now on, and computes metrics of the training.

    While an object exists, each operation reads the clock when it begins and when a message arrives, which costs less
    than 1 us per operation.

    Args:
        model: The model whose consensus distance is reported, as in `fogdist.consensus_distance`; by default none.
        group: The group of ranks; by default that of `fogdist.init`.

    Raises:
        ValueError: Before `fogdist.init`.
    """

    def __init__(
        self,
        model: Module | Tensor | Sequence[Tensor] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._context = current(group)
        self._model = model
        self._group = group
        self._values: dict[str, float] = {}
        extension = _extension.load()
        extension.observe(True)
        self._counting = weakref.finalize(self, extension.observe, False)
        self._counting.atexit = False
        self._since = time.monotonic()
        self._before = self._traffic()

    def close(self) -> None:
        """Stops counting, which also happens when the object is garbage-collected."""
        self._counting()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def collect(self, *, distance: bool = True) -> dict[str, float]:
        """Returns the metrics of the time since the last call, or since the object was made.

        Args:
            distance: Whether to compute the consensus distance, which is collective and moves twice the model's bytes.
                Without a model it is never computed.

        Returns:
            Numbers by name:

            - "consensus_distance": see `fogdist.consensus_distance`;
            - "seconds": the length of the time that the metrics cover;
            - "sent_bytes", "received_bytes": bytes of data in operations of this group and its windows;
            - "wait_fraction": the fraction of the time in which an operation waited only for its last message; operations
              that overlap are all counted;
            - "slowest_peer": the rank that this rank waited for longest in this way, -1 if it waited for none;
            - "staleness": the largest staleness of an in-neighbor, in exchanges, where ranks go at their own pace;
            - "peer/R/sent_bytes", "peer/R/received_bytes", "peer/R/wait_seconds", "peer/R/staleness": the same for rank R.
              "wait_seconds" is the time in which only its message was missing.

        Raises:
            RuntimeError: After `fogdist.shutdown` or `close`; torch.distributed.DistBackendError if the consensus distance
                fails in flight.
        """
        if not self._counting.alive:
            raise RuntimeError("these metrics are closed")
        now = time.monotonic()
        traffic = self._traffic()
        values: dict[str, float] = {"seconds": now - self._since, "sent_bytes": 0, "received_bytes": 0}
        waits: dict[int, float] = {}
        for rank, numbers in sorted(traffic.items()):
            before = self._before.get(rank, {})
            change = {name: number - before.get(name, 0) for name, number in numbers.items()}
            for name in ("sent_bytes", "received_bytes"):
                values[name] += change[name]
                values[f"peer/{rank}/{name}"] = change[name]
            waits[rank] = values[f"peer/{rank}/wait_seconds"] = change["waited_last"]
        self._since, self._before = now, traffic
        values["wait_fraction"] = sum(waits.values()) / values["seconds"] if values["seconds"] > 0 else 0.0
        values["slowest_peer"] = max(waits, key=lambda rank: waits[rank]) if any(waits.values()) else -1
        staleness: dict[int, int] = {}
        for each in has_staleness:
            for rank, exchanges in each.staleness().items() if each.context is self._context else ():
                staleness[rank] = max(exchanges, staleness.get(rank, 0))
                values[f"peer/{rank}/staleness"] = staleness[rank]
        if staleness:
            values["staleness"] = max(staleness.values())
        if distance and self._model is not None:
            values["consensus_distance"] = consensus_distance(self._model, group=self._group)
        self._values = values
        return dict(values)

    def write(self, writer: Writer, step: int, *, prefix: str = "fog") -> None:
        """Writes the metrics of the last `collect` as scalars ``prefix/name``.

        Args:
            writer: A ``torch.utils.tensorboard.SummaryWriter``, or an object with its `add_scalar`.
            step: The step of the scalars.
            prefix: The prefix of their names.
        """
        for name, value in self._values.items():
            writer.add_scalar(f"{prefix}/{name}", value, step)

    def _traffic(self) -> dict[int, dict[str, Any]]:
        names = ("sent_bytes", "received_bytes", "waited_last")
        traffic = self._context.backend.traffic
        return {rank: {name: numbers[name] for name in names} for rank, numbers in traffic.items()}
