"""Averages of the gradients over all ranks, for BlueFog's name. New scripts take torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fogdist.agreement import check_same_everywhere
from fogdist.bluefog.backward_passes import BackwardPasses
from fogdist.context import current
from fogdist.observe.flight_record import count_step
from fogdist.observe.timeline import shown_as
from fogdist.packing import are_same, cap_bytes, flatten, make_buckets, signature_of, unflatten
from fogdist.shards import is_sharded
from fogdist.training.algorithm import WEIGHTS, check_count
from fogdist.training.continuing import check_joinable
from fogdist.training.ownership import Ownership
from fogdist.training.view import (
    DistributedOptimizer,
    Models,
    closure_of,
    only_makes_state,
    reject_lbfgs,
    wrap,
)
from fogdist.warn import warn_user

if TYPE_CHECKING:
    from typing_extensions import Self

# The backend remembers each name that it has seen, so the numbers in names repeat after this many steps.
_NUMBERS = 64


class GradientAllreduce(DistributedOptimizer):
    """Parallel SGD: ``x+ = x + d(x)`` with the mean of all ranks' gradients. Collective to make.

    `step` averages the gradients, and waits; the backward pass does not hide it, as that of torch's
    DistributedDataParallel does. A parameter without a gradient on some rank counts as zero there; a parameter without a
    gradient on every rank does not change. (As Horovod: Sergeev and Del Balso, 2018.)

    Use a gradient scaler as in one process. Its `step` looks for overflows in the averaged gradients, so an overflow
    on one rank appears on all ranks: all ranks skip the same steps, and their scales stay the same. To clip
    gradients, call `synchronize` first, then the scaler's `unscale_` if there is one, then clip.

    As with every `Algorithm`, a distributed optimizer that is made of the same parameters later takes over: the hooks
    of this one go, and `step` raises.

    Args:
        optimizer: Any torch optimizer that evaluates its closure once a step; it keeps its state.
        model: The model, or a list of models, that hold its parameters.
        local_steps: J: the least number of backward passes that accumulate gradients before a step; their sum is
            averaged. A step after fewer passes is local: it takes this rank's own gradients, after which the ranks'
            parameters differ, and warns once.
        bucket_cap_mb: MiB of gradients in one message, as in `Algorithm`. A larger gradient is one by itself.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: `optimizer` is an LBFGS, is distributed already, has an attribute that this has too, or a
            parameter that is not in the model; two parameters have the same name; a living wrapper has one;
            `local_steps` is below 1, or `bucket_cap_mb` not above 0; ranks hold different parameters (on all ranks
            alike); before `init`.
        RuntimeError: After `shutdown`.
    """

    local_steps: int
    _bucket_bytes: int | None
    _group: dist.ProcessGroup | None
    _counter: BackwardPasses
    _ownership: Ownership
    _is_synchronized: bool
    _scaler_synchronized: bool
    _numbers: tuple[int, int]  # of this step, and of the averages in it
    _has_warned_local: bool
    _is_alone: bool

    def __new__(cls, optimizer: Optimizer, model: Models, *args: Any, **options: Any) -> Self:
        return wrap(cls, optimizer, model)

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        local_steps: int = 1,
        bucket_cap_mb: float | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        context = current(group)
        reject_lbfgs(optimizer)
        check_count(local_steps, "local_steps")
        check_joinable(group, False, "GradientAllreduce")  # parameters are equal on all ranks, at each step
        self.local_steps = local_steps
        self._is_alone = context.is_alone
        self._is_synchronized = self._scaler_synchronized = False
        self._has_warned_local = False
        self._bucket_bytes, self._group, self._numbers = cap_bytes(bucket_cap_mb), group, (0, 0)
        self._fog_title = f"fogdist.GradientAllreduce {context.next_number()}"
        self._counter = BackwardPasses(self._after_gradient)
        self._ownership = Ownership(self)
        if not self._is_alone:
            self._hold(self._fog_parameters())
            self._counter.watch(self._fog_parameters())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in WEIGHTS:
            raise AttributeError(
                f"GradientAllreduce has no attribute {name!r}: all ranks' gradients weigh alike"
            )
        super().__setattr__(name, value)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A gradient scaler's step() reads this attribute before it checks the gradients for overflows, and no other
        # code of this class runs between the backward pass and that check. The scaler must check the average, because
        # the result determines the next scale, which must be the same on all ranks.
        if not (self._is_alone or self._is_synchronized) and self._counter.passes_of_step >= self.local_steps:
            self.synchronize()
            self._scaler_synchronized = True
        return True

    @shown_as("step")
    def step(self, *arguments: Any, **options: Any) -> Any:
        """Averages the gradients, unless `synchronize` did, and makes the optimizer's step.

        Args:
            *arguments: A closure, evaluated once, before the gradients are averaged; or nothing.
            **options: The closure as `closure`, and other options of the optimizer's own step.

        Returns:
            The result of the closure if there is one, otherwise the result of the optimizer's own step.

        Raises:
            RuntimeError: A gradient scaler's `unscale_` was called without `synchronize` before it; another distributed
                optimizer has taken over the model.
        """
        self._fog_check_not_replaced()
        closure, others = closure_of(arguments, options)
        loss = self._fog_evaluated(closure)
        self._check_scaler()
        if not (self._is_alone or only_makes_state(self._fog_wrapped, arguments, options)):
            self._average_if_due()
        result = self._fog_local_step(**others)
        count_step()
        return result if closure is None else loss

    def synchronize(self) -> None:
        """Averages the gradients now; the next `step` uses the gradients as they are at that time. Collective.

        Raises:
            RuntimeError: Another distributed optimizer has taken over the model.
        """
        self._fog_check_not_replaced()
        if self._is_alone:
            return
        parameters = self._fog_parameters()
        if not are_same(self._ownership.tensors, parameters):
            self._hold(parameters)
        self._average(parameters)
        self._counter.reset()
        self._counter.watch(parameters)
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A block for a `step` after `synchronize`, as scripts for Horovod and BlueFog use it.

        `step` knows by itself that the gradients are averaged, so this only checks that they are.

        Raises:
            RuntimeError: `synchronize` was not called after the last backward pass.
        """
        if not self._is_synchronized and not self._is_alone:
            raise RuntimeError(
                "skip_synchronize() needs a call of synchronize() after the last backward pass"
            )
        yield

    def _fog_give_up(self) -> None:
        """Also stops counting backward passes."""
        super()._fog_give_up()
        self._counter.stop()
        self._ownership.release()

    def _hold(self, parameters: list[Tensor]) -> None:
        """Takes the parameters over from their previous owner, if any. Collective, because ranks compare them."""
        for parameter in parameters:
            if is_sharded(parameter):
                raise TypeError(
                    f"{self._fog_names[parameter]!r} must be an ordinary tensor for its gradient to be averaged over all "
                    "ranks, got a DTensor"
                )
        names = {parameter: repr(self._fog_names[parameter]) for parameter in parameters}
        ownership = Ownership(self._fog_view(), takes_over=True)
        with ownership.released_on_error():
            ownership.take(names)
            check_same_everywhere(
                current(self._group).backend,
                "model",
                [f"{n}: {name}, {signature_of(each)}" for n, (each, name) in enumerate(names.items())],
            )
            ownership.take_over()
        self._ownership = ownership

    def _average(self, parameters: list[Tensor]) -> None:
        """Averages the gradients. A parameter that has one on any rank has one on all of them afterwards."""
        step, number = self._numbers
        self._numbers = step, (number + 1) % _NUMBERS
        # The number of the step makes a rank that averages once more within it than the others raise an error, instead of
        # taking the values of the next step.
        name, backend = f"{self._fog_title}.{step}.{number}", current(self._group).backend
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device="cpu")
        backend.allreduce_named(present, dist.ReduceOp.SUM, name=f"{name}.present").wait()
        gradients = []
        for parameter, count in zip(parameters, present.tolist(), strict=True):
            if count == 0:  # as with a single process, a parameter without a gradient is not updated
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout is not torch.strided:
                raise ValueError(
                    f"gradients must be dense to be averaged, got layout {parameter.grad.layout} for a parameter "
                    f"of shape {tuple(parameter.shape)}; an embedding has sparse=False"
                )
            gradients.append(parameter.grad)
        buckets = make_buckets(gradients, self._bucket_bytes)
        flats = [flatten(bucket, gradients) for bucket in buckets]
        works = [
            backend.allreduce_named(flat, dist.ReduceOp.AVG, name=f"{name}.{place}")
            for place, flat in enumerate(flats)
        ]
        for bucket, flat, work in zip(buckets, flats, works, strict=True):
            work.wait()
            unflatten(bucket, flat, gradients)

    def _check_scaler(self) -> None:
        came_late, self._scaler_synchronized = self._scaler_synchronized, False
        # A scaler that has already unscaled the gradients sets no scale.
        was_unscaled = (
            getattr(self, "found_inf", None) is not None and getattr(self, "grad_scale", None) is None
        )
        if came_late and was_unscaled:
            self._is_synchronized = False
            self._fog_forget_scaler()
            raise RuntimeError(
                "a gradient scaler's unscale_() needs a call of synchronize() before it: it has unscaled this rank's "
                "own gradients, and the average over all ranks is still scaled"
            )

    def _average_if_due(self) -> None:
        if not self._is_synchronized:
            passes = self._counter.count_step()
            if passes >= self.local_steps:
                self.synchronize()
            elif not self._has_warned_local:
                self._has_warned_local = True
                warn_user(
                    f"step() after {passes} of local_steps={self.local_steps} backward passes takes this rank's own "
                    "gradients; the parameters of the ranks differ from now on"
                )
        if self._is_synchronized:
            self._numbers = (self._numbers[0] + 1) % _NUMBERS, 0
        self._is_synchronized = False

    def _after_gradient(self, _: Tensor) -> None:
        if self._is_synchronized:  # assignments to a view take longer than all else here
            self._is_synchronized = False
