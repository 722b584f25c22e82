"""Decentralized SGD: averages with neighbors after, beside or before the local step; and local SGD."""

from __future__ import annotations

import weakref
from typing import Any, Literal, get_args

import torch
from torch.nn import Module
from torch.optim import Optimizer

from fogdist.algorithms.flats import Flats
from fogdist.algorithms.frame import Algorithm
from fogdist.algorithms.mixing import AllRanks, Finish, MixingLike
from fogdist.optim.wrapper import Models

Order = Literal["atc", "awc", "cta"]


class DecentralizedSGD(Algorithm):
    """Decentralized SGD (D-PSGD, diffusion) around any optimizer; d(x) is the optimizer's step at x.

    - "atc", adapt then combine: ``x+ = W (x + d(x))``.
    - "awc", adapt with combine: ``x+ = W x + d(x)``; the exchange starts with the forward pass and is hidden
      behind it and the backward pass.
    - "cta", combine then adapt: ``y = W x``, ``x+ = y + d(y)``; y is in the model from the beginning of the
      forward pass on, x after `step`.

    (Chen and Sayed, IEEE Transactions on Signal Processing 60, 2012, and Sayed, Foundations and Trends in
    Machine Learning 7, 2014, for the three orders; Lian et al., "Can Decentralized Algorithms Outperform
    Centralized Algorithms?", NeurIPS 2017, arXiv 1705.09056, for awc as D-PSGD.)
    `DistributedAdaptThenCombineOptimizer` and `DistributedAdaptWithCombineOptimizer` are atc and awc by the
    names of BlueFog.

    Only forward passes in training mode with gradients enabled count, and the model must be called as a
    function; in a step without any, the exchange is done in `step`. If W is not doubly stochastic, ranks
    agree on a weighted mean: `PushSumSGD` corrects that.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        order: "atc", "awc" or "cta".
        mixing: As in `Algorithm`.
        local_steps: As in `Algorithm`: without averages, the three orders are one.

    Raises:
        ValueError: `order` is none of the three; and as `Algorithm`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        order: Order = "atc",
        mixing: MixingLike = None,
        local_steps: int = 1,
    ) -> None:
        if order not in get_args(Order):
            raise ValueError(f"order must be one of {', '.join(map(repr, get_args(Order)))}, got {order!r}")
        self._fog_order = order
        # Of the step that comes next: its exchange in flight (awc), and whether it has been begun (cta).
        self._fog_in_flight: tuple[Flats, Finish] | None = None
        self._fog_has_begun = False
        self._fog_begin(optimizer, mixing, local_steps, order=order)
        if order != "atc":
            from fogdist.optim.forward_hook import ForwardHook, register_before_forward

            for each in self._fog_models:
                hook = ForwardHook(self._fog_before_step)
                register = register_before_forward if order == "awc" else Module.register_forward_pre_hook
                handle = register(each, hook)
                weakref.finalize(self, handle.remove).atexit = False

    def _fog_advance(self) -> Any:
        if self._fog_order == "atc":
            return super()._fog_advance()
        self._fog_before_step()
        self._fog_arrive()
        self._fog_has_begun = False
        result = self._fog_adapt()
        self._fog_rounds += self._fog_count()
        return result

    def _fog_before_step(self) -> None:
        """Begins what precedes the next step, once: by the model's forward pass, or else by the step."""
        if self._fog_has_begun:
            return
        self._fog_begin_step()
        self._fog_has_begun = True  # not before: weights that were refused may be mended

    def _fog_begin_step(self) -> None:
        """Begins the exchange that is due with the next step, or makes it (cta)."""
        # In the step that completes a round, as with atc.
        if (self._fog_step_count + 1) % self._fog_local_steps != 0 or self._fog_is_alone:
            return
        with torch.no_grad():
            self._fog_refresh()
            if self._fog_order == "cta":
                self._fog_average(self._fog_flats.values, in_place=True)
                return
            # Not in place: the model computes with these values meanwhile.
            finish = self._fog_mixing.start(
                self._fog_flats.values, self._fog_rounds, self._fog_weights(), self._fog_name
            )
            self._fog_in_flight = (self._fog_flats, finish)
            self._fog_flats.watch()

    def _fog_arrive(self) -> None:
        if self._fog_in_flight is not None:
            # Of the parameters that it began with, whatever was frozen or added since.
            (flats, finish), self._fog_in_flight = self._fog_in_flight, None
            average = finish()
            flats.end_watch()
            flats.write(average)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`; an exchange in flight is waited for first."""
        self._fog_arrive()
        self._fog_has_begun = False
        super().load_state_dict(state_dict)


class LocalSGD(Algorithm):
    """Local SGD: J local steps, then the exact average: ``x+ = mean_j(x_j + d_1 + ... + d_J)``.

    (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767; also post-local
    SGD, parallel restarted SGD or federated averaging with all clients.) With a topology as `mixing` it is
    decentralized local SGD (Koloskova et al., ICML 2020, arXiv 2003.10422).

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        mixing: As in `Algorithm`; by default `AllRanks()`.
        local_steps: J.

    Raises:
        ValueError: As `Algorithm`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        mixing: MixingLike = None,
        local_steps: int = 8,
    ) -> None:
        self._fog_begin(optimizer, AllRanks() if mixing is None else mixing, local_steps)
