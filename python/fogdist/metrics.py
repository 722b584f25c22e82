"""Metrics of training: how far ranks are apart, how old neighbors' values are, what each peer costs in bytes and in time.

metrics = fogdist.metrics.Metrics(model)
for step, batch in enumerate(progress := tqdm(batches)):
    ...
    if step % 100 == 0:
        metrics.collect()
        progress.set_postfix(metrics.postfix())
        metrics.write(writer, step)  # torch.utils.tensorboard.SummaryWriter
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from fog_pg import _extension
from fogdist.consensus import consensus_distance
from fogdist.context import current
from fogdist.training.pace import staleness_of

__all__ = ["Metrics", "Writer"]


class Writer(Protocol):
    """What `Metrics.write` needs of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        """Adds a number."""


class Metrics:
    """Counts what this rank exchanges from now on, and asks how training goes.

    While an object lives, each operation looks at the clock when it begins and when a message comes: below 1 us an operation.

    Args:
        model: Whose consensus distance is reported, as in `fogdist.consensus_distance`; by default none.
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
        _extension.load().observe(True)
        self._open = True
        self._since = time.monotonic()
        self._before = self._traffic()

    def close(self) -> None:
        """Counts nothing more. An object that is dropped does the same."""
        if self._open:
            self._open = False
            _extension.load().observe(False)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()

    def collect(self, *, distance: bool = True) -> dict[str, float]:
        """Returns what happened since the last call, or since the object was made.

        Args:
            distance: Whether the consensus distance is computed, which is collective and moves twice the model's bytes;
                not without a model.

        Returns:
            Numbers by name:

            - "consensus_distance": see `fogdist.consensus_distance`;
            - "seconds": how long the time is that the others are about;
            - "sent_bytes", "received_bytes": of data, in operations of this group and its windows;
            - "wait_fraction": the part of the time for which an operation waited for its last message while it had all
              others; operations that overlap count each;
            - "slowest_peer": the rank that this rank waited for longest so, -1 if for none;
            - "staleness": by how many exchanges the neighbor's news that is oldest is behind, where ranks go at their own pace;
            - "peer/R/sent_bytes", "peer/R/received_bytes", "peer/R/wait_seconds", "peer/R/staleness": the same for rank R.
              Its "wait_seconds" are those for which its message alone was missing.

        Raises:
            RuntimeError: After `fogdist.shutdown` or `close`; torch.distributed.DistBackendError if the consensus distance
                fails in flight.
        """
        if not self._open:
            raise RuntimeError("these metrics are closed")
        now = time.monotonic()
        traffic = self._traffic()
        values: dict[str, float] = {"seconds": now - self._since, "sent_bytes": 0, "received_bytes": 0}
        waits: dict[int, float] = {}
        for rank, numbers in sorted(traffic.items()):
            change = {name: number - self._before[rank][name] for name, number in numbers.items()}
            for name in ("sent_bytes", "received_bytes"):
                values[name] += change[name]
                values[f"peer/{rank}/{name}"] = change[name]
            waits[rank] = values[f"peer/{rank}/wait_seconds"] = change["waited_last"]
        self._since, self._before = now, traffic
        values["wait_fraction"] = sum(waits.values()) / values["seconds"] if values["seconds"] > 0 else 0.0
        values["slowest_peer"] = max(waits, key=lambda rank: waits[rank]) if any(waits.values()) else -1
        staleness = staleness_of(self._context)
        for rank, exchanges in staleness.items():
            values[f"peer/{rank}/staleness"] = exchanges
        if staleness:
            values["staleness"] = max(staleness.values())
        if distance and self._model is not None:
            values["consensus_distance"] = consensus_distance(self._model, group=self._group)
        self._values = values
        return dict(values)

    def postfix(self) -> dict[str, str]:
        """What `collect` returned last, in the few words that fit behind a progress bar (``tqdm.set_postfix``)."""
        words = {}
        if "consensus_distance" in self._values:
            words["apart"] = f"{self._values['consensus_distance']:.2g}"
        if "wait_fraction" in self._values:
            words["wait"] = f"{self._values['wait_fraction']:.0%}"
            if self._values["slowest_peer"] >= 0:
                words["slowest"] = f"rank {self._values['slowest_peer']:.0f}"
        if "staleness" in self._values:
            words["stale"] = f"{self._values['staleness']:.0f}"
        return words

    def write(self, writer: Writer, step: int, *, prefix: str = "fog") -> None:
        """Writes what `collect` returned last as scalars ``prefix/name``.

        Args:
            writer: ``torch.utils.tensorboard.SummaryWriter``, or what has its `add_scalar`.
            step: The step that the scalars are of.
            prefix: Put before their names.
        """
        for name, value in self._values.items():
            writer.add_scalar(f"{prefix}/{name}", value, step)

    def _traffic(self) -> dict[int, dict[str, Any]]:
        zeros = {"sent_bytes": 0, "received_bytes": 0, "waited_last": 0.0}
        traffic: dict[int, dict[str, Any]] = defaultdict(lambda: dict(zeros))
        for rank, numbers in self._context.backend.traffic.items():
            traffic[rank] = {name: numbers[name] for name in zeros}
        return traffic
