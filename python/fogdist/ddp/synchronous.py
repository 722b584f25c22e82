"""Mixing in step with the neighbors: one exchange an iteration, on its way during forward and backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.agreement import gather_numbers
from fogdist.context import Context
from fogdist.flat_buckets import FlatBuckets
from fogdist.memory import empty_flat
from fogdist.rounds import Rounds

# Messages are named by their round too, so that a rank never mixes with what a neighbor sent in another one.
# The backend remembers every name, so they come again.
_SIGNS = 64


class SynchronousMixing:
    """Exchanges of the flat buffers of a model, one after the other.

    Parameters are sent from where they are, so they must not change between `begin` and `mix`. Buffers do
    change in a forward pass: they are sent from a copy, and what mixing changed in it is added to them.

    Args:
        context: The group.
        parameters: The parameters; an exchange's result may become their memory.
        buffers: Flat buffers of the module's buffers that are to be mixed, if any.
        rounds: Whom to exchange with.
        name: What all ranks call it; no other mixing of the group has the same.
    """

    def __init__(
        self,
        context: Context,
        parameters: FlatBuckets,
        buffers: list[Tensor],
        rounds: Rounds,
        name: str,
    ) -> None:
        self._context = context
        self._name = name
        self._rounds = rounds
        self.round = 0  # of the next exchange
        self._last = 0  # round of the last exchange
        self._begun = 0
        self._parameters = parameters
        self._buffers = buffers
        self._copies = [torch.empty_like(flat) for flat in self._buffers]
        self._results = [empty_flat(flat.numel(), flat.dtype, flat.device) for flat in self._sources]
        self._in_flight: list[dist.Work] = []

    @property
    def has_begun(self) -> bool:
        """Whether an exchange is in flight."""
        return bool(self._in_flight)

    @property
    def _sources(self) -> list[Tensor]:
        return [*self._parameters.flats, *self._copies]

    @torch.no_grad()
    def begin(self) -> None:
        """Starts the next round's exchange, of the values that there are now."""
        for copy, flat in zip(self._copies, self._buffers, strict=True):
            copy.copy_(flat)
        plan, sign = self._rounds.plan(self.round), self.round % _SIGNS
        self._last = self.round
        self.round += 1
        self._begun += 1
        for place, (source, result) in enumerate(zip(self._sources, self._results, strict=True)):
            name = f"{self._name}.{place} round {sign}"
            work = self._context.backend.neighbor_allreduce(source, plan, output=result, name=name)
            self._in_flight.append(work)

    def arrive(self) -> None:
        """Waits for the exchange in flight, if any: until then neighbors read what it sent."""
        failure = None
        for work in self._in_flight:
            try:
                work.wait()
            except dist.DistBackendError as error:
                failure = failure or error
        if failure is not None:
            self._in_flight = []
            raise dist.DistBackendError(f"in round {self._last} of {self._name}: {failure}") from failure

    @torch.no_grad()
    def mix(self) -> None:
        """Waits for the exchange in flight, or for a new one, and writes it into the flat buffers."""
        if not self._in_flight:
            self.begin()
        self.arrive()
        self._in_flight = []
        flats = self._parameters.flats
        for place, result in enumerate(list(self._results)):
            if place >= len(flats):
                flat, copy = (tensors[place - len(flats)] for tensors in (self._buffers, self._copies))
                flat.add_(result.sub_(copy))
            elif self._parameters.swap(place, result):
                self._results[place] = flats[place]
            else:
                flats[place].copy_(result)

    def finish(self) -> None:
        """Mixes if an exchange is in flight, here or on another rank only; collective."""
        numbers = gather_numbers(self._context.backend, [self._begun], f"{self._name}.begun")
        if self._in_flight:
            self.mix()
        # Those who have begun one more than this rank cannot end it alone.
        while [self._begun] < max(numbers):
            self.mix()

    def discard(self) -> None:
        """Waits for the exchange in flight, if any, and forgets what came."""
        self.arrive()
        self._in_flight = []

    def follow(self, rounds: Rounds) -> None:
        """Exchanges by other rounds from the next one on, which is their round 0."""
        self._rounds, self.round = rounds, 0

    def after_step(self) -> None:
        """Nothing: the next exchange begins at the next forward pass."""

    def staleness(self) -> dict[int, int | None]:
        """Nothing is stale."""
        return {}

    def pause(self) -> None:
        """Nothing: ranks take their steps together."""

    def close(self) -> None:
        """Waits for the exchange in flight, if any."""
        self.discard()

    def after_global_average(self) -> None:
        """Nothing: the next exchange sends what there is then."""
