"""Steps of an optimizer during a backward pass, for some of its parameters at a time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fogdist.streams import StreamJoin
from fogdist.training.buckets import FlatBuckets


def step_of(optimizer: Optimizer, parameters: Collection[Tensor]) -> Any:
    """Makes an optimizer's step for some of its parameters and returns its result.

    The other parameters are removed from their groups for this time. Options, order and identity of the groups stay.
    """
    groups = optimizer.param_groups
    held = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in parameters]
        return optimizer.step()
    finally:
        for group, all_of_it in zip(groups, held, strict=True):
            group["params"] = all_of_it


class BackwardSteps:
    """The steps of one backward pass, one bucket of parameters at a time.

    Args:
        buckets: The buckets that hold the parameters.
    """

    def __init__(self, buckets: FlatBuckets) -> None:
        self._buckets = buckets
        self._waiting_for = [set(buckets.tensors_of(number)) for number in range(len(buckets.flats))]
        self._joins = [StreamJoin(flat.device) for flat in buckets.flats]
        self._stepped: set[int] = set()
        # If all ranks must send in one order: the buckets that are still to be sent, the next one last.
        self._to_come = buckets.sending_order[::-1]
        self._applied: dict[Tensor, tuple[Tensor | None, int]] = {}

    @property
    def applied(self) -> Collection[Tensor]:
        """The parameters whose step has been made."""
        return self._applied.keys()

    @property
    def left(self) -> list[int]:
        """The buckets whose step has not been made."""
        return [number for number in self._buckets.sending_order if number not in self._stepped]

    def complete(self, parameter: Tensor) -> list[int]:
        """Records that a gradient is complete. Returns the buckets whose step can be made, in order.

        On the CPU this is the bucket that this gradient completes. On devices a bucket must also wait for those before
        it in `FlatBuckets.sending_order`, so one gradient can release several buckets.

        Raises:
            RuntimeError: The parameter's step has been made already.
        """
        if parameter in self._applied:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got more gradient after step_in_backward had made "
                "its step: call step() after num_steps_per_communication backward passes, in each of which a "
                "parameter gets its gradient once"
            )
        number = self._buckets.bucket_of(parameter)
        self._joins[number].add()
        self._waiting_for[number].discard(parameter)
        if not self._buckets.is_ordered:
            return [] if self._waiting_for[number] else [number]
        ready = []
        while self._to_come and not self._waiting_for[self._to_come[-1]]:
            ready.append(self._to_come.pop())
        return ready

    def step(self, optimizer: Optimizer, number: int) -> None:
        """Makes the step of a bucket's parameters."""
        parameters = self._buckets.tensors_of(number)
        self._stepped.add(number)
        self._joins[number].join()
        step_of(optimizer, set(parameters))
        for parameter in parameters:
            gradient = parameter.grad
            self._applied[parameter] = gradient, 0 if gradient is None else gradient._version

    def check(self) -> None:
        """Raises RuntimeError if a gradient was changed after its use, for example by clipping or a gradient scaler."""
        for parameter, (gradient, version) in self._applied.items():
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version):
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was changed between backward() "
                    "and step(), as by clipping, zero_grad() or a gradient scaler, after step_in_backward had used "
                    "it; that needs step_in_backward=False"
                )
