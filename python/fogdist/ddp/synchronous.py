"""Mixing in step with the neighbors: one exchange per iteration, which runs during forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fogdist.context import Context
from fogdist.elastic.seat import Seat
from fogdist.training.buckets import FlatBuckets
from fogdist.training.continuing import Continuing, OnLoss, highest, take_seat
from fogdist.training.joining_state import MixingState, WrapperState
from fogdist.training.mixer import Mixer
from fogdist.training.mixing import Finish, GlobalAverage, Mixing, Round
from fogdist.training.patient_mixer import PatientMixer


class SynchronousMixing:
    """Exchanges of the parameters and buffers of a model, one after the other.

    Parameters must not change between `begin` and `mix`. Buffers do change in a forward pass: the change that mixing makes to
    the values that were sent is added to them.

    Args:
        context: The group.
        parameters: The parameters.
        buffers: The module's buffers to mix, if any.
        mixing: The peers and weights of each round.
        name: The same on all ranks, and unique among the mixings of the group.
        on_loss: "continue" to go on with the ranks that are left after a loss.
        patience: To leave late neighbors out (`PatientMixer`); there are no buffers then.
        state: What a process that joins gets in addition; None if none can.
    """

    def __init__(
        self,
        context: Context,
        parameters: FlatBuckets,
        buffers: FlatBuckets,
        mixing: Mixing,
        name: str,
        on_loss: OnLoss = "raise",
        patience: float | None = None,
        state: WrapperState | None = None,
    ) -> None:
        self._whole = context
        self._name = name
        # Averages of all ranks have a seat of their own: ranks may have begun different exchanges when they begin one.
        self._seats: tuple[Seat, Seat] | None = None
        self._is_patient = patience is not None
        if on_loss == "continue":
            joinable = None if state is None else MixingState(self, state)
            self._seats = take_seat(context.group, name, joinable), take_seat(context.group, f"{name} global")
        self._state = state
        self._mixing = self._continuing(mixing)
        self._next = 0  # the round of the next exchange
        self._begun = 0
        self._parameters = parameters
        self._buffers = buffers
        self._mixer = Mixer()
        if patience is not None:
            self._mixer = PatientMixer(name, patience, None if self._seats is None else self._seats[0])
            if self._seats is not None:
                self._seats[0].on_change(self._mixer.renew)
        self._sent: list[Finish] = []

    @property
    def context(self) -> Context:
        """The group, or what is left of it."""
        return self._whole if self._seats is None else self._seats[0].context

    def _continuing(self, mixing: Mixing) -> Mixing:
        if self._seats is None or self._is_patient:  # a patient mixer goes on by itself
            return mixing
        return Continuing(mixing, self._seats[0])

    @property
    def has_begun(self) -> bool:
        """Whether an exchange is in flight."""
        return self._mixer.has_begun

    @property
    def left_out(self) -> list[int]:
        """The neighbors that were left out of the last exchange."""
        return self._mixer.left_out

    @property
    def round(self) -> int:
        """The round of the next exchange."""
        return self._next

    @round.setter
    def round(self, value: int) -> None:
        self._next = value
        self._mixer.restart()

    @torch.no_grad()
    def begin(self, in_step: bool = False) -> None:
        """Starts the next round's exchange, with the current values."""
        if self._seats is not None and self._state is not None and self._seats[0].enter() and in_step:
            self._state.drop_gradients()
        round = Round.of(self.context, self._next, self._name)
        self._next = self._mixer.begin(self._parameters, self._mixing, round) + 1
        self._buffers.load()
        for place, flat in enumerate(self._buffers.flats):
            self._sent.append(self._mixing.begin([flat], round.part(-1 - place)))
        self._begun += 1

    @torch.no_grad()
    def mix(self) -> None:
        """Waits for the exchange in flight, or for a new one, and writes it into parameters and buffers."""
        if not self.has_begun:
            self.begin(in_step=True)
        sent, self._sent = self._sent, []
        try:
            self._mixer.finish()
        finally:
            averages = [finish()[0] for finish in sent]
        changes = [average.sub_(flat) for flat, average in zip(self._buffers.flats, averages, strict=True)]
        self._buffers.load()
        for flat, change in zip(self._buffers.flats, changes, strict=True):
            flat.add_(change)
        self._buffers.write_back()

    def finish(self) -> None:
        """Completes the exchange that this rank or only other ranks have begun, if any; collective."""
        # Ranks of whom some were left out of rounds have begun different numbers of them, and each completes its own.
        most = 0
        if not self._is_patient:
            # A rank that gives this up has learned of the others' exchanges by the meeting already.
            seat = None if self._seats is None else self._seats[1]
            most = highest(self._whole, seat, self._begun, f"{self._name}.begun")
        if self.has_begun:
            self.mix()
        # Ranks that have begun one exchange more than this rank cannot complete it alone.
        while self._begun < most:
            self.mix()

    def average_everywhere(self, flats: list[Tensor]) -> None:
        """Overwrites tensors with their averages over all ranks; collective."""
        mixing: Mixing = GlobalAverage()
        if self._seats is not None:
            mixing = Continuing(mixing, self._seats[1])
        mixing.begin(flats, Round(self.context, 0, f"{self._name} global"), in_place=True)()

    def accept_changes(self) -> None:
        """Accepts the changes of the parameters since the exchange began."""
        self._mixer.accept_changes()

    def discard(self) -> None:
        """Waits for the exchange in flight, if any, and drops its result."""
        self._mixer.discard()
        sent, self._sent = self._sent, []
        for finish in sent:
            finish()

    def follow(self, mixing: Mixing) -> None:
        """Uses another mixing from the next exchange on, which is its round 0."""
        self._mixing, self.round = self._continuing(mixing), 0

    def after_step(self) -> None:
        """Does nothing, because the next exchange begins at the next forward pass."""

    def staleness(self) -> dict[int, int | None]:
        """Returns an empty dict, because no values are stale."""
        return {}

    def pause(self) -> None:
        """Does nothing, because ranks make their steps together."""

    def close(self) -> None:
        """Waits for the exchange in flight, if any."""
        self.discard()
        self._mixer.close()

    def after_global_average(self) -> None:
        """Does nothing, because the next exchange sends the values that are current then."""

    def counts(self) -> dict[str, int]:
        """Returns the numbers that a process which joins begins with."""
        return {"next": self._next, "begun": self._begun}

    def set_counts(self, counts: dict[str, int]) -> None:
        """Sets these numbers to those of another rank."""
        self._next, self._begun = counts["next"], counts["begun"]
