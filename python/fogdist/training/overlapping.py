"""Algorithms whose exchange runs while the gradient is computed, from a forward pass to the step; and that exchange."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

from fogdist.observe.timeline import shown_as
from fogdist.training.algorithm import Algorithm
from fogdist.training.buckets import FlatBuckets
from fogdist.training.mixing import Finish, Mixing, Round
from fogdist.training.view import Models
from fogdist.warn import warn_user

# When a round begins: before a training forward pass, or after it if it changes parameters; always before; after.
When = Literal["with forward", "before forward", "after forward"]


class OverlappingAlgorithm(Algorithm):
    """Base of the algorithms that begin a round with a forward pass and end it in `step`.

    A subclass overrides `begin` and `finish`, between which the round is in flight. Only forward passes in training mode with
    gradients enabled count, outside of transforms of ``torch.func``, and the model must be called as a function: not by its
    `forward` method, and not within another function or module that ``torch.compile`` compiles. A step without any such pass
    does all of it. With a list of models the first one that is called begins the round of all.
    """

    is_in_round: bool
    _saw_forward: bool
    _watches: list[Any]  # of PassWatch, whose module imports torch._dynamo

    def __init__(self, optimizer: Optimizer, model: Models, **options: Any) -> None:
        self._saw_forward = self.is_in_round = False
        self._watches = []
        super().__init__(optimizer, model, **options)

    @property
    def overlaps(self) -> bool:
        """See `Algorithm.overlaps`; if not, `combine` follows the local steps, as in `Algorithm`."""
        return True

    def begin(self) -> None:
        """Begins the round."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for the round's exchange and writes the result into the parameters."""
        raise NotImplementedError

    def watch_forward(self, when: When) -> None:
        """Makes rounds begin with the models' forward passes. A subclass calls it at the end of its constructor."""
        if self.is_alone:
            return
        from fogdist.training.pass_watch import PassWatch

        for place, model in enumerate(self._fog_models):
            waits = when == "after forward" or (when == "with forward" and forward_changes_parameters(model))
            self._watches.append(PassWatch(model, "after" if waits else "before", self.notice_forward, place))

    def advance(self) -> Any:
        """Ends the round, if one is due, and makes the optimizer's step from its result."""
        if not self.overlaps:
            return super().advance()
        self.complete_round()
        return self.adapt()

    def complete_round(self) -> None:
        """Makes all that comes before the optimizer's step: ends the round that is due, and counts the step."""
        # A rank without data for this step still takes part in the round.
        if (
            not self._saw_forward and self.begin_if_due()
        ):  # it has just joined, and has gradients of other parameters
            self.overflowed = True
        self._saw_forward = False
        self.synchronize_now()
        self.steps += 1  # counted even if the step raises, because the neighbors count it too

    def synchronize(self) -> None:
        """Completes an exchange in flight and writes its result into the parameters; `step` does so by itself."""
        if self.is_in_round:
            with torch.no_grad():
                self.synchronize_now()
                self.buckets.write_changes()

    def settle(self) -> None:
        """See `Algorithm.settle`: it is `synchronize`."""
        self.synchronize()

    def refresh(self) -> None:
        """See `Algorithm.refresh`. The buckets do not change while a round is in flight."""
        if not self.is_in_round:
            super().refresh()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`. It completes a round in flight first."""
        self.synchronize()
        super().load_state_dict(state_dict)

    def synchronize_now(self) -> None:
        """Completes the round in flight, if any."""
        if self.is_in_round:
            self.is_in_round = False
            try:
                self.finish()
            finally:
                self.rounds += 1

    def _fog_give_up(self) -> None:
        """Leaves the models. An exchange in flight completes without being waited for here."""
        super()._fog_give_up()
        self.is_in_round = False
        for watch in self._watches:
            watch.remove()

    def notice_forward(self, place: int) -> None:
        """Called at each training pass of a model, given its place among them."""
        if self.is_syncing:
            self._saw_forward = True
            self.begin_if_due()

    def begin_if_due(self) -> bool:
        """Begins a round if one is due; returns whether this process has just joined the others."""
        if self.is_in_round or self.is_alone or not self.is_round_due():
            return False
        with torch.no_grad():
            self.refresh()
            # It may wait for other ranks.
            with nullcontext() if self.batches is None else self.batches.paused():
                has_joined = self.enter()
                self.begin()
        # Set only now: if `begin` raised for wrong weights, the user may correct them.
        self.is_in_round = True
        return has_joined


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
        self._buckets, self._round, self._in_flight = buckets, round, {}
        # In one order on all ranks, also because exchanges that are repeated after a loss begin again in this order.
        for number in buckets.sending_order if mixing.exchanges else ():
            buckets.load(number)
            flat = buckets.flats[number]
            self._in_flight[number] = mixing.begin([flat], round.part(number), in_place=not flat.is_cpu)
        self.accept_changes()
        return round.number

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

    def away(self) -> AbstractContextManager[object]:
        """Returns a context in which this rank makes no exchange, although neighbors may wait for one."""
        return nullcontext()

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
        changed = next(
            name for name, old, new in zip(buckets.labels, versions, now, strict=True) if old != new
        )
        warn_user(
            f"{changed} was changed between the forward pass and step(); the average of the values "
            "that it had before replaces them. Change parameters after step()."
        )

    def _arrive(self) -> dict[int, torch.Tensor]:
        in_flight, self._in_flight = self._in_flight, {}
        self._buckets, round, self._round = None, self._round, None
        averages: dict[int, torch.Tensor] = {}
        failure: Exception | None = None
        for number, finish in in_flight.items():
            try:
                (averages[number],) = finish()
            except Exception as error:
                failure = failure or error
        if isinstance(failure, dist.DistBackendError) and round is not None:
            raise dist.DistBackendError(f"in round {round.number} of {round.name}: {failure}") from failure
        if failure is not None:
            raise failure
        return averages


def forward_changes_parameters(model: Module) -> bool:
    """Returns whether a forward pass changes parameters, as embeddings with `max_norm` rescale rows."""
    return any(
        isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.max_norm is not None
        for module in model.modules()
    )
