"""Exchanges of parameters in flat buckets, one per round: each begins before a forward pass and ends before a step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fogdist.observe.timeline import shown_as
from fogdist.training.buckets import FlatBuckets
from fogdist.training.mixing import Finish, Mixing, Round
from fogdist.warn import warn_user


class Mixer:
    """Successive exchanges of flat buckets.

    Neighbors read buckets on the CPU in place, so these must not change between `begin` and `finish`; buckets on a device
    become the averages. The tensors get the average in `finish`.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, Finish] = {}
        self._versions: list[tuple[int, int]] | None = None  # of the values that are sent
        self._has_warned = False
        self._buckets: FlatBuckets | None = None
        self._round: Round | None = None

    @property
    def left_out(self) -> list[int]:
        """The neighbors without whom the last exchange was completed."""
        return []

    @shown_as("begin of an exchange")
    @torch.no_grad()
    def begin(self, buckets: FlatBuckets, mixing: Mixing, round: Round) -> int:
        """Begins the exchange of all buckets, with the values that the tensors have now; raises as `Mixing.begin`.

        Returns:
            The number of the round: the given one, or a later one where this rank was left out of rounds.
        """
        for number in buckets.sending_order:
            self.add(buckets, number, mixing, round)
        self._buckets, self._round = buckets, round
        self.accept_changes()
        return round.number

    @torch.no_grad()
    def add(self, buckets: FlatBuckets, number: int, mixing: Mixing, round: Round) -> None:
        """Begins the exchange of one bucket, as `begin` does for all of them. The order of the buckets is free."""
        if mixing.exchanges:
            buckets.load(number)
            flat = buckets.flats[number]
            self._in_flight[number] = mixing.begin([flat], round.part(number), in_place=not flat.is_cpu)
        self._buckets, self._round = buckets, round

    @shown_as("end of an exchange")
    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the exchange in flight and writes the average into the tensors.

        Raises:
            torch.distributed.DistBackendError: The exchange failed; the tensors keep their values.
        """
        buckets = self._buckets
        averages = self._arrive()
        if buckets is None:
            return
        # Checked only now, because neighbors read the values until the exchange is complete.
        self._warn_of_changes(buckets)
        buckets.write_back(averages)

    def discard(self) -> None:
        """Waits for the exchange in flight, and drops its result."""
        self._versions = None
        self._arrive()

    def restart(self) -> None:
        """Makes the next exchange begin anew, whatever the numbers of rounds were: call it on all ranks alike."""

    def renew(self) -> None:
        """Called after ranks were lost, on all that are left."""

    def close(self) -> None:
        """Tells the neighbors that no exchange follows."""

    def accept_changes(self) -> None:
        """Accepts the changes of parameters since `begin`, so that `finish` does not warn of them."""
        if self._buckets is not None:
            self._versions = self._buckets.versions()

    def _warn_of_changes(self, buckets: FlatBuckets) -> None:
        """Warns once of parameters that have changed since the values were sent, before an average replaces them."""
        versions, self._versions = self._versions, None
        if versions is None or versions == (now := buckets.versions()) or self._has_warned:
            return
        self._has_warned = True
        tensors = [each for number in range(len(buckets.flats)) for each in buckets.tensors_of(number)]
        changed = next(t for t, old, new in zip(tensors, versions, now, strict=True) if old != new)
        warn_user(
            f"{buckets.label_of(changed)} was changed between the forward pass and step(); the average of the values "
            "that it had before replaces them. Change parameters after step()."
        )

    def _arrive(self) -> dict[int, torch.Tensor]:
        in_flight, self._in_flight = self._in_flight, {}
        # In one order on all ranks, because exchanges that are repeated after a loss begin again in this order.
        order = [] if self._buckets is None else self._buckets.sending_order
        finishing = {number: in_flight[number] for number in order if number in in_flight}
        self._buckets, round, self._round = None, self._round, None
        averages: dict[int, torch.Tensor] = {}
        failure: Exception | None = None
        for number, finish in finishing.items():
            try:
                (averages[number],) = finish()
            except Exception as error:
                failure = failure or error
        if isinstance(failure, dist.DistBackendError) and round is not None:
            raise dist.DistBackendError(f"in round {round.number} of {round.name}: {failure}") from failure
        if failure is not None:
            raise failure
        return averages
