"""Algorithms of many local steps, which exchange the model in fragments, one after the other, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from fogdist.observe.timeline import shown_as
from fogdist.topology.validation import check_choice
from fogdist.training.algorithm import Algorithm, AlgorithmOptions, check_count, check_factor
from fogdist.training.buckets import FlatBuckets
from fogdist.training.continuing import highest
from fogdist.training.mixing import Round
from fogdist.training.view import Models

FragmentOrder: TypeAlias = Literal["interleaved", "in-order"]
# A function that waits for a fragment's exchange and returns what its parameters become; None if they stay as they are.
Arrive: TypeAlias = Callable[[], "list[Tensor] | None"]


class FragmentOptions(AlgorithmOptions, total=False):
    """The options of the algorithms that exchange fragments; see `FragmentedAlgorithm`."""

    fragments: int
    fragment_order: FragmentOrder
    delay: int
    local_share: float


@dataclass(frozen=True)
class _InFlight:
    """An exchange in flight: the buckets, how it ends, and the number of steps after which it is applied."""

    places: Sequence[int]
    arrive: Arrive
    due: int


class FragmentedAlgorithm(Algorithm):
    """Base of the algorithms that make many local steps, and then exchange the model, or one fragment of it after the other.

    Let H be `local_steps` and P `fragments`. Every H / P steps (rounded up) the exchange of the next fragment begins, so
    each fragment is exchanged every H steps, and links carry one fragment at a time. It travels during the next `delay` local
    steps. After these, with y what the algorithm makes of the values that were sent, and x the parameters then::

        x+ = local_share x + (1 - local_share) y       x+ = y without delay

    (Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025, arXiv
    2501.18512, where local_share is 0.5. With one fragment and no delay an algorithm is as it was published without fragments.)

    A fragment consists of whole layers. A layer is what a name has up to its first number, as "blocks.3" in
    "blocks.3.attention.weight", or else the module of the parameter. In each order all fragments have about as many bytes.

    A topology's rounds are counted for each fragment: in its t-th exchange it takes round t.

    `settle`, `average`, `close` and a change of the trained parameters end the exchange in flight before its time, so all ranks
    make them at the same step. A state dict has nothing of it: without `settle` before, this exchange is left out when
    training continues from there. A process joins where an exchange begins.

    A subclass overrides `begin`.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        fragments: P: at most `local_steps`, and at most the number of layers.
        fragment_order: "interleaved" puts neighboring layers into different fragments, "in-order" into the same one.
        delay: At most H / P (rounded down), so that the next exchange begins after this one has ended. 0 to wait for it.
        local_share: At least 0 and below 1; counts with a delay only.
        **options: As in `Algorithm`.

    Raises:
        TypeError: As `Algorithm`; an argument is of a wrong type.
        ValueError: As `Algorithm`; a number is out of its range.
    """

    compared: ClassVar[tuple[str, ...]] = ("fragments", "fragment_order", "delay", "local_share")

    fragments: int
    fragment_order: FragmentOrder
    delay: int
    local_share: float
    _in_flight: _InFlight | None

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        fragments: int = 1,
        fragment_order: FragmentOrder = "interleaved",
        delay: int = 0,
        local_share: float = 0.5,
        **options: Any,
    ) -> None:
        self._in_flight = None
        self.fragment_order = check_choice(fragment_order, "fragment_order", FragmentOrder)
        self.local_share = check_factor(local_share, "local_share", below=1.0)
        self._check_schedule(options.get("local_steps", 1), fragments, delay)
        self.fragments, self.delay = fragments, delay
        super().__init__(optimizer, model, **options)

    def begin(self, places: Sequence[int]) -> Arrive:
        """Begins the exchange of some buckets, whose values `buckets.flats` has; by default the average of the parameters.

        Args:
            places: Their indices in `buckets.flats`. These buffers do not change before the exchange has ended.

        Returns:
            A function that waits for it and returns what these parameters become, vectors like the buffers.
        """
        return self.begin_mix([self.buckets.flats[place] for place in places], in_place=True)

    def places_of(self, fragment: int) -> list[int]:
        """Returns the indices of a fragment's buckets."""
        return [place for place, number in enumerate(self.buckets.group_of) if number == fragment]

    def reschedule(
        self, *, local_steps: int | None = None, fragments: int | None = None, delay: int | None = None
    ) -> None:
        """Changes when fragments are exchanged, and ends the exchange in flight. Collective: the ranks compare what they want.

        A process that joins later is made with the arguments that the ranks' constructors had, and takes the present schedule.

        Args:
            local_steps: As in the constructor; None for no change, also of the others.
            fragments: As in the constructor.
            delay: As in the constructor.

        Raises:
            TypeError: An argument is of a wrong type.
            ValueError: A number is out of its range; ranks want different ones, or call it at different steps (on all ranks
                alike). Nothing has changed. torch.distributed.DistBackendError if a rank does not come.
        """
        wanted = (
            self.local_steps if local_steps is None else local_steps,
            self.fragments if fragments is None else fragments,
            self.delay if delay is None else delay,
        )
        self._check_schedule(*wanted)
        told = {"fragments": wanted[1], "delay": wanted[2]}
        if not self.by_samples:
            told |= {"local_steps": wanted[0], "the number of steps": self.steps}
        numbers = [*told.values(), *(-number for number in told.values())]
        most = highest(self.context, self._ends, numbers, f"{self.name} schedule") or numbers
        for name, largest, least in zip(told, most, most[len(told) :], strict=False):
            if largest != -least:
                raise ValueError(f"{name} must be the same on all ranks, got {-least} to {largest}")
        self.settle()
        self.local_steps, self.fragments, self.delay = wanted

    # --- when ---

    @property
    def overlaps(self) -> bool:
        """See `Algorithm.overlaps`: a round begins after the local step, when the one before has ended."""
        return True

    @property
    def mixes_before_step(self) -> bool:
        """See `Algorithm.mixes_before_step`."""
        return False

    def has_round(self, step: int) -> bool:
        """See `Algorithm.has_round`: at the end of the step the exchange of a fragment begins."""
        return step * self.fragments // self.local_steps > (step - 1) * self.fragments // self.local_steps

    @property
    def rounds_for_all(self) -> int:
        """See `Algorithm.rounds_for_all`."""
        return self.fragments

    def round_schedule(self) -> dict[str, int]:
        """See `Algorithm.round_schedule`."""
        shared = {"fragments": self.fragments, "delay": self.delay}
        return shared if self.by_samples else {"local_steps": self.local_steps, **shared}

    def this_round(self) -> Round:
        """See `Algorithm.this_round`."""
        return replace(super().this_round(), number=self.rounds // self.fragments)

    def advance(self) -> Any:
        """Makes a local step, ends the exchange in flight if it is time, and begins the next one if it is due."""
        result = self.adapt()
        is_due = self.count_step()
        # At once when the schedule was changed: one is in flight at a time.
        if self._in_flight is not None and (is_due or self.steps >= self._in_flight.due):
            self._end_exchange()
        if is_due:
            self.enter()
            self._begin_exchange()
            if self.delay == 0:
                self._end_exchange()
        return result

    @shown_as("begin of a fragment's exchange")
    def _begin_exchange(self) -> None:
        places = self.places_of(self.rounds % self.fragments)
        for place in places:
            self.buckets.load(place)
        self._in_flight = _InFlight(places, self.begin(places), self.steps + self.delay)
        self.rounds += 1

    @shown_as("end of a fragment's exchange")
    def _end_exchange(self, *, applies: bool = True) -> None:
        """Waits for the exchange in flight, and gives the parameters what comes of it, unless they are to be replaced."""
        ended, self._in_flight = self._in_flight, None
        if ended is None or (vectors := ended.arrive()) is None or not applies:
            return
        kept = self.local_share if self.delay else 0.0
        self.buckets.write_back(dict(zip(ended.places, vectors, strict=True)), kept=kept)

    # --- what ends an exchange before its time ---

    @torch.no_grad()
    def settle(self) -> None:
        """See `Algorithm.settle`."""
        self._end_exchange()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`. What is in flight arrives, and is dropped."""
        self._end_exchange(applies=False)
        super().load_state_dict(state_dict)

    def refresh(self) -> None:
        """See `Algorithm.refresh`."""
        if self._in_flight is not None and not self._holds(*self._trained()):
            self._end_exchange()
        super().refresh()

    def _fog_give_up(self) -> None:
        super()._fog_give_up()
        self._in_flight = None

    # --- what is in a fragment ---

    def _trained(self) -> tuple[list[Tensor], list[int]]:
        """See `Algorithm._trained`; the numbers are those of the fragments."""
        parameters, _ = super()._trained()
        sizes = self._layers(parameters)
        fragment_of = _divided(list(sizes.values()), self.fragments, self.fragment_order)
        number_of = dict(zip(sizes, fragment_of, strict=True))
        return parameters, [number_of[layer_of(self._fog_names[parameter])] for parameter in parameters]

    def _layers(self, parameters: Sequence[Tensor]) -> dict[str, int]:
        """Returns the bytes of each layer, in order."""
        sizes: dict[str, int] = {}
        for parameter in parameters:
            name = layer_of(self._fog_names[parameter])
            sizes[name] = sizes.get(name, 0) + parameter.numel() * parameter.element_size()
        return sizes

    def _agree_on(self, buckets: FlatBuckets) -> None:
        """See `Algorithm._agree_on`. On other fragments of the same parameters ranks have agreed in `reschedule`."""
        held: FlatBuckets | None = getattr(self, "buckets", None)
        if held is None or not held.holds(buckets.tensors):
            super()._agree_on(buckets)

    def _check_schedule(self, local_steps: int, fragments: int, delay: int) -> None:
        check_count(local_steps, "local_steps")
        check_count(fragments, "fragments")
        if fragments > local_steps:
            raise ValueError(f"fragments must be at most local_steps, {local_steps}, got {fragments}")
        layers = list(self._layers(super()._trained()[0]))
        if fragments > max(1, len(layers)):
            raise ValueError(
                f"fragments must be at most the number of layers, {len(layers)}, got {fragments}"
            )
        if not isinstance(delay, int) or isinstance(delay, bool):
            raise TypeError(f"delay must be an int, got {type(delay).__name__}")
        if not 0 <= delay <= local_steps // fragments:
            raise ValueError(
                f"delay must be at least 0 and at most {local_steps // fragments}, the steps between two exchanges with "
                f"local_steps={local_steps} and fragments={fragments}, got {delay}"
            )


def layer_of(name: str) -> str:
    """Returns the name of a parameter's layer: all up to the first number, or else the name of its module."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1])


def _divided(sizes: Sequence[int], count: int, order: FragmentOrder) -> list[int]:
    """Returns the fragment of each layer, given the layers' sizes: fragments of about the same size, none without a layer."""
    filled = [0] * count
    numbers: list[int] = []
    number, left = 0, sum(sizes)
    for place, size in enumerate(sizes):
        if order == "interleaved":
            number = min(range(count), key=lambda each: filled[each])
        else:
            # The next fragment begins where this one has its share of what is left, or each layer that is left needs its own.
            goal = (left + filled[number]) / (count - number)
            is_full = filled[number] + size / 2 > goal or len(sizes) - place < count - number
            if filled[number] and number < count - 1 and is_full:
                number += 1
        numbers.append(number)
        filled[number] += max(1, size)
        left -= size
    return numbers
