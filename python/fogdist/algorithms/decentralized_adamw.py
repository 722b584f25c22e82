"""Decentralized AdamW: ranks also average their moments, and divide by an estimate for the mean gradient."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import Unpack

from fogdist.shards import local_of, sharded_as
from fogdist.training.algorithm import Algorithm, AlgorithmOptions
from fogdist.training.saved_state import keys_of
from fogdist.training.view import Models


class DecentralizedAdamW(Algorithm):
    """AdamW whose moments are averaged along the graph, as the parameters are.

    With g a rank's gradient, n ranks, learning rate a and decay d, and without the bias corrections, which are AdamW's::

        m+ = W (beta1 m + (1 - beta1) g)
        v+ = W (beta2 v + (1 - beta2) g^2)
        s+ = beta2 s + (1 - beta2) (m+)^2                    stays local
        x+ = W (x - a d x - a m+ / (sqrt(v+ / n + (1 - 1/n) s+) + eps))

    Where each rank divides by its own second moment, as with `DecentralizedSGD` around AdamW, that is the mean of
    squares of one rank's gradients, and AdamW on the mean gradient divides by less. The mean of v over the ranks is
    ``mu^2 + sigma^2``, for gradients of mean mu and variance sigma^2; the second moment of the mean of n gradients is
    ``mu^2 + sigma^2 / n``, which s, about ``mu^2``, and v give together. (Averages of the second moment, without that
    correction: Chen, Karimi, Zhao and Li, "On the Convergence of Decentralized Adaptive Gradient Methods", ACML 2022, arXiv
    2109.03194, as decentralized AMSGrad; there was no gain by it where this was measured. The correction is this
    library's own. docs/measurements/training.md has the numbers.) With `by_samples` it is the same: a gradient of n_i samples
    has the variance ``sigma^2 / n_i``, so the weighted mean of all v has n times the variance of the weighted mean gradient.

    It sends three times the bytes of `DecentralizedSGD`, in two exchanges a round; in local steps W is I. A parameter without
    a gradient on this rank is moved by averages only. The bias corrections count this rank's updates, so a parameter that
    is unfrozen late begins with moments that they do not correct. Parameters are real.

    It takes up the state of an optimizer that was trained before, or loaded, and gives it back when it is closed; it estimates
    s by the square of the first moment then.

    Args:
        optimizer: A torch.optim.AdamW or Adam (then without weight decay), whose learning rates, betas, eps and weight
            decay are taken from its groups in each step. Its own step is not made, but hooks of it are called: around the
            average of the moments and the move, before the parameters' average.
        model: As in `Algorithm`.
        **options: As in `Algorithm`.

    Raises:
        TypeError: `optimizer` is of another class; and as `Algorithm`.
        ValueError: It is of a subclass, or has amsgrad or maximize set; a parameter is complex; and as `Algorithm`. In
            `step`: a gradient is sparse.
    """

    takes_compression: ClassVar[bool] = False  # a second moment that is off could become negative
    state_vectors: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment", "mean_square")
    state_numbers: ClassVar[dict[str, float]] = {"updates": 0.0}
    needs_rates: ClassVar[bool] = True
    can_be_joined: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    def __init__(self, optimizer: Optimizer, model: Models, **options: Unpack[AlgorithmOptions]) -> None:
        if not isinstance(self._fog_wrapped, Adam):
            raise TypeError(
                f"optimizer must be a torch.optim.AdamW or Adam, got {type(self._fog_wrapped).__name__}"
            )
        if refusal := refusal_of(self._fog_wrapped):
            raise ValueError(f"optimizer must {refusal}")
        super().__init__(optimizer, model, **options)

    def plain_state_dict(self) -> dict[str, Any]:
        """See `Algorithm.plain_state_dict`: a plain AdamW continues with the averaged moments."""
        saved = super().plain_state_dict()
        own = self._plain_state()
        for parameter, key in keys_of(saved, self._fog_wrapped).items():
            if parameter in own:
                saved["state"][key] = own[parameter]
        return saved

    def refresh(self) -> None:
        """See `Algorithm.refresh`: begins with the moments of the plain optimizer, where it has some."""
        if not self._has_state and not self._loaded:
            self._loaded = self._state_of_plain()
        super().refresh()

    def _plain_state(self) -> dict[Tensor, dict[str, Tensor]]:
        """Returns the state from which a plain AdamW continues, for each parameter; empty before the first step."""
        pieces = self._pieces()
        found = {}
        for parameter, first in pieces.get("first_moment", {}).items():
            moments = {"exp_avg": first, "exp_avg_sq": pieces["second_moment"][parameter]}
            found[parameter] = {"step": torch.tensor(self.numbers["updates"], device="cpu")}
            found[parameter].update((key, sharded_as(parameter, value)) for key, value in moments.items())
        return found

    def _state_of_plain(self) -> dict[str, dict[Tensor, Tensor]]:
        """Returns this algorithm's state, as far as the plain optimizer's state tells it."""
        found: dict[str, dict[Tensor, Tensor]] = {name: {} for name in self.state_vectors}
        for group in self._fog_wrapped.param_groups:
            for parameter in group["params"]:
                own = self._fog_wrapped.state.get(parameter, {})
                if (updates := float(own.get("step", 0.0))) == 0.0:
                    continue
                beta1, beta2 = group["betas"]
                first = local_of(own["exp_avg"])
                found["first_moment"][parameter] = first.clone()
                found["second_moment"][parameter] = local_of(own["exp_avg_sq"]).clone()
                mean = first / (1 - beta1**updates)
                found["mean_square"][parameter] = mean.square().mul_(1 - beta2**updates)
                self.numbers["updates"] = max(self.numbers["updates"], updates)
        return found

    def _fog_give_up(self) -> None:
        for parameter, own in self._plain_state().items():
            self._fog_wrapped.state[parameter] = {name: value.clone() for name, value in own.items()}
        super()._fog_give_up()

    def advance(self) -> Any:
        """See `Algorithm.advance`."""
        if self._step_options:
            raise TypeError(
                f"step() takes nothing but a closure, got {', '.join(sorted(self._step_options))}"
            )
        is_due = self.count_step()
        if not self.overflowed:
            # In place of the optimizer's own step: its hooks are called, and schedulers count it.
            if hasattr(self._fog_wrapped.step, "_wrapped_by_lr_sched"):
                vars(self._fog_wrapped)["_opt_called"] = (
                    True  # a scheduler's wrapper of `step` sets the same mark
                )
            Optimizer.profile_hook_step(lambda _: self._adapt(is_due))(self._fog_wrapped)
            self.buckets.outdate()
        elif is_due:
            self._average_moments()
        if is_due:
            self.mix(self.values, in_place=True)
            self.rounds += 1

    def _adapt(self, is_due: bool) -> None:
        """Updates the moments with the gradients, averages them if ranks communicate, and updates the parameters."""
        self.buckets.outdate()  # a hook may have changed parameters
        groups = [self._fog_wrapped.param_groups[place] for place in self.buckets.group_of]
        moments = self.vectors["first_moment"], self.vectors["second_moment"]
        self.numbers["updates"] += 1
        for m, v, g, group in zip(*moments, self.gradients(), groups, strict=True):
            beta1, beta2 = group["betas"]
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if is_due:
            self._average_moments()
        self._move(groups)
        self.buckets.write_changes()

    def _average_moments(self) -> None:
        self.mix([*self.vectors["first_moment"], *self.vectors["second_moment"]], in_place=True)

    def _move(self, groups: list[dict[str, Any]]) -> None:
        """Updates the parameters with the current moments."""
        ranks = self.context.size
        changes = []
        vectors = (self.values, *(self.vectors[name] for name in self.state_vectors), groups)
        for x, m, v, s, group in zip(*vectors, strict=True):
            (beta1, beta2), rate = group["betas"], float(group["lr"])
            updates = self.numbers["updates"]
            of_first, of_second = 1 - beta1**updates, 1 - beta2**updates
            mean = m / of_first
            s.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            square = (v / ranks).add_(s, alpha=1 - 1 / ranks).div_(of_second)
            change = mean.div_(square.sqrt_().add_(group["eps"])).mul_(-rate)
            changes.append(change.add_(x, alpha=-rate * group["weight_decay"]))
        for parameter, piece in self.buckets.pieces(changes):
            if parameter.grad is None:
                piece.zero_()
        torch._foreach_add_(self.values, changes)


def refusal_of(optimizer: Adam) -> str:
    """Returns what `DecentralizedAdamW` asks of an optimizer that this one is not; empty if it takes it."""
    if type(optimizer) not in (Adam, AdamW):
        return f"be no subclass, whose step would not be made, got {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        if any(parameter.is_complex() for parameter in group["params"]):
            return "have real parameters, got a complex one"
        if group.get("amsgrad") or group.get("maximize"):
            return "have neither amsgrad nor maximize set, got one that has"
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            return "be an AdamW if it has weight decay, got an Adam"
    return ""
