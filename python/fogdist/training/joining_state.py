"""The state of an algorithm or a wrapper that a process gets when it joins (`fogdist.membership.Joinable`)."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Protocol

import torch


class Stateful(Protocol):
    """What an `Algorithm` has that a process gets."""

    steps: int
    rounds: int
    numbers: dict[str, Any]
    rank_numbers: ClassVar[tuple[str, ...]]
    _fog_models: tuple[torch.nn.Module, ...]

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer and the algorithm."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse."""

    def refresh(self) -> None:
        """After the parameters were changed."""


class AlgorithmState:
    """The models, the optimizer and the algorithm's own state, and its numbers of steps and rounds.

    Args:
        algorithm: The algorithm, which this does not keep alive.
    """

    def __init__(self, algorithm: Stateful) -> None:
        self._reference = weakref.ref(algorithm)

    @property
    def _algorithm(self) -> Stateful:
        algorithm = self._reference()
        assert algorithm is not None  # the seat belongs to it
        return algorithm

    def save(self) -> dict[str, Any]:
        """See `Joinable`."""
        algorithm = self._algorithm
        models = [model.state_dict() for model in algorithm._fog_models]
        return {"models": models, "optimizer": algorithm.state_dict()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """See `Joinable`."""
        algorithm = self._algorithm
        for model, values in zip(algorithm._fog_models, state["models"], strict=True):
            model.load_state_dict(values)
        algorithm.load_state_dict(state["optimizer"])
        algorithm.refresh()

    def counts(self) -> dict[str, int]:
        """See `Joinable`."""
        algorithm = self._algorithm
        numbers = {name: int(algorithm.numbers[name]) for name in algorithm.rank_numbers}
        return {"steps": algorithm.steps, "rounds": algorithm.rounds, **numbers}

    def set_counts(self, counts: dict[str, int]) -> None:
        """See `Joinable`."""
        algorithm = self._algorithm
        algorithm.steps, algorithm.rounds = counts["steps"], counts["rounds"]
        algorithm.numbers.update({name: counts[name] for name in algorithm.rank_numbers})


class WrapperState(Protocol):
    """What a wrapper has besides its mixing."""

    def save(self) -> dict[str, Any]:
        """Returns the values; tensors may change later."""

    def load(self, state: dict[str, Any]) -> None:
        """Takes the values that another rank has saved."""

    def drop_gradients(self) -> None:
        """Forgets the gradients, which are of parameters that it had before it joined."""


class Counting(Protocol):
    """What a wrapper's mixing has that a process gets."""

    def counts(self) -> dict[str, int]:
        """See `Joinable`."""

    def set_counts(self, counts: dict[str, int]) -> None:
        """See `Joinable`."""


class MixingState:
    """The state of a wrapper, and the numbers of its mixing.

    Args:
        mixing: The mixing, which this does not keep alive.
        state: The wrapper's.
    """

    def __init__(self, mixing: Counting, state: WrapperState) -> None:
        self._reference = weakref.ref(mixing)
        self._state = state

    @property
    def _mixing(self) -> Counting:
        mixing = self._reference()
        assert mixing is not None  # the seat belongs to it
        return mixing

    def save(self) -> dict[str, Any]:
        """See `Joinable`."""
        return self._state.save()

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """See `Joinable`."""
        self._state.load(state)

    def counts(self) -> dict[str, int]:
        """See `Joinable`."""
        return self._mixing.counts()

    def set_counts(self, counts: dict[str, int]) -> None:
        """See `Joinable`."""
        self._mixing.set_counts(counts)
