"""The optimizers of BlueFog under their BlueFog names; each is an algorithm of `fogdist.algorithms`."""

from __future__ import annotations

import enum
from typing import Any, ClassVar, TypedDict

import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import Unpack

from fogdist.algorithms.adapt_then_combine import AdaptThenCombine
from fogdist.algorithms.asynchronous_diffusion import PullGet, WinPut
from fogdist.algorithms.decentralized_sgd import DecentralizedSGD
from fogdist.algorithms.window_push_sum import WindowPushSum
from fogdist.compression import Codec
from fogdist.gradient_allreduce import GradientAllreduce
from fogdist.training.algorithm import Algorithm, AlgorithmOptions, check_count
from fogdist.training.mixing import DynamicWeights, GlobalAverage, Machines, Mixing, Neighbors, NoMixing
from fogdist.training.view import Models, setting


class CommunicationType(enum.Enum):
    """The ranks that parameters are averaged with."""

    neighbor_allreduce = "neighbor.allreduce"
    """The neighbors: those of the topology, or those of the optimizer's dynamic attributes."""
    hierarchical_neighbor_allreduce = "hierarchical.neighbor.allreduce"
    """All ranks of this machine and of the neighbor machines: those of the machine topology, or those of the
    optimizer's dynamic attributes for machines."""
    allreduce = "allreduce"
    """All ranks."""
    empty = "empty"
    """No other ranks: local training."""


_MIXING: dict[CommunicationType, type[Mixing]] = {
    CommunicationType.neighbor_allreduce: Neighbors,
    CommunicationType.hierarchical_neighbor_allreduce: Machines,
    CommunicationType.allreduce: GlobalAverage,
    CommunicationType.empty: NoMixing,
}


class _Communicating(Algorithm):
    """An algorithm whose mixing is chosen by a `CommunicationType`."""

    ignores_weights: bool = setting(False)
    """Whether weights that the mixing does not use are ignored, as BlueFog did, instead of raising an error."""

    def weights(self) -> DynamicWeights:
        """See `Algorithm.weights`."""
        weights = super().weights()
        return weights.taken_by(self.mixing) if self.ignores_weights else weights

    @property
    def communication_type(self) -> CommunicationType:
        """The ranks that parameters are averaged with. It may be set between iterations, to the same value on all ranks."""
        kinds = [kind for kind, mixing in _MIXING.items() if type(self.mixing) is mixing]
        if not kinds:
            raise AttributeError(
                f"communication_type has no name for topology={self.mixing!r}, which was set"
            )
        return kinds[0]

    @communication_type.setter
    def communication_type(self, value: CommunicationType) -> None:
        self.mixing = _mixing_of(value)


class AdaptWithCombineOptimizer(_Communicating, DecentralizedSGD):
    """See `DistributedAdaptWithCombineOptimizer`, which makes it."""

    saves_state: ClassVar[bool] = False

    def __init__(self, optimizer: Optimizer, model: Models, **options: Unpack[AlgorithmOptions]) -> None:
        super().__init__(optimizer, model, order="awc", **options)
        self.counts_passes = True


class AdaptThenCombineOptimizer(_Communicating, AdaptThenCombine):
    """See `DistributedAdaptThenCombineOptimizer`, which makes it."""

    saves_state: ClassVar[bool] = False


def DistributedAdaptWithCombineOptimizer(
    optimizer: Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    local_steps: int = 1,
    bucket_cap_mb: float | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    num_steps_per_communication: int | None = None,
) -> AdaptWithCombineOptimizer:
    """Returns an optimizer that adapts with combine: ``w+ = Avg(w) - step(grad f(w))``.

    It is `fogdist.algorithms.DecentralizedSGD` with ``order="awc"``, overlapped as in BlueFog (Ying et al. 2021). The
    exchange of the current parameters starts with a forward pass and runs during the forward and the backward pass;
    `step` waits for it. If a gradient scaler finds an overflow, the rank skips its own step but not the average.

    Args:
        optimizer: As in `fogdist.algorithms.Algorithm`.
        model: As in `fogdist.algorithms.Algorithm`.
        communication_type: The ranks to average with.
        local_steps: J: an average every J forward passes of the model. J = 3 gives one average for three passes, with
            one step or with a step after each pass.
        bucket_cap_mb: As in `fogdist.algorithms.Algorithm`.
        group: As in `fogdist.algorithms.Algorithm`.
        num_steps_per_communication: BlueFog's name of `local_steps`.

    Returns:
        An instance of the optimizer's class with `step` as above, `synchronize`, `skip_synchronize`, and the
        attributes `self_weight`, `src_weights`, `dst_weights`, `src_machine_weights`, `dst_machine_weights`,
        `enable_topo_check`, `communication_type`.

    Raises:
        TypeError: As `Algorithm`; `local_steps` and `num_steps_per_communication` are both given.
        ValueError: As `Algorithm`.
        RuntimeError: As `Algorithm`.
    """
    return AdaptWithCombineOptimizer(
        optimizer,
        model,
        topology=_mixing_of(communication_type),
        local_steps=_interval(local_steps, num_steps_per_communication),
        bucket_cap_mb=bucket_cap_mb,
        broadcast=False,
        group=group,
    )


def DistributedAdaptThenCombineOptimizer(
    optimizer: Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    local_steps: int = 1,
    bucket_cap_mb: float | None = None,
    step_in_backward: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
    num_steps_per_communication: int | None = None,
) -> AdaptThenCombineOptimizer:
    """Returns an optimizer that adapts, then combines: ``w+ = Avg(w - step(grad f(w)))``.

    It is `fogdist.algorithms.AdaptThenCombine`: `step` makes the optimizer's own step with the gradients as they are,
    after accumulation, clipping or unscaling, and then averages the parameters.

    Args:
        optimizer: As in `fogdist.algorithms.AdaptThenCombine`; LBFGS is allowed too.
        model: As in `fogdist.algorithms.AdaptThenCombine`.
        communication_type: The ranks to average with.
        local_steps: As in `fogdist.algorithms.AdaptThenCombine`: J backward passes.
        bucket_cap_mb: As in `fogdist.algorithms.AdaptThenCombine`.
        step_in_backward: As in `fogdist.algorithms.AdaptThenCombine`.
        group: As in `fogdist.algorithms.AdaptThenCombine`.
        num_steps_per_communication: BlueFog's name of `local_steps`.

    Returns:
        An instance of the optimizer's class with `step` as above and the attributes of
        `DistributedAdaptWithCombineOptimizer`.

    Raises:
        TypeError: As `Algorithm`; `local_steps` and `num_steps_per_communication` are both given.
        ValueError: As `AdaptThenCombine`.
        RuntimeError: As `Algorithm`.
    """
    return AdaptThenCombineOptimizer(
        optimizer,
        model,
        step_in_backward=step_in_backward,
        topology=_mixing_of(communication_type),
        local_steps=_interval(local_steps, num_steps_per_communication),
        bucket_cap_mb=bucket_cap_mb,
        broadcast=False,
        group=group,
    )


def DistributedGradientAllreduceOptimizer(
    optimizer: Optimizer,
    model: Models,
    local_steps: int = 1,
    bucket_cap_mb: float | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    num_steps_per_communication: int | None = None,
) -> GradientAllreduce:
    """Returns an optimizer that makes its step with the gradients averaged over all ranks, as Horovod does.

    `fogdist.gradient_allreduce.GradientAllreduce` has the arguments, methods and errors. `num_steps_per_communication` is
    BlueFog's name of `local_steps`. New scripts take torch's DistributedDataParallel, which averages while the backward
    pass goes on.
    """
    interval = _interval(local_steps, num_steps_per_communication)
    return GradientAllreduce(optimizer, model, local_steps=interval, bucket_cap_mb=bucket_cap_mb, group=group)


class WindowOptions(TypedDict, total=False):
    """Keywords of the three optimizers on windows; see `fogdist.training.WindowAlgorithm`."""

    max_staleness: int | None
    compression: Codec | None
    """Not of `DistributedPullGetOptimizer`."""
    group: dist.ProcessGroup | None
    num_steps_per_communication: int
    """BlueFog's name of `local_steps`."""


def DistributedWinPutOptimizer(
    optimizer: Optimizer,
    model: Models,
    local_steps: int = 1,
    window_prefix: str | None = None,
    bucket_cap_mb: float | None = None,
    **options: Unpack[WindowOptions],
) -> WinPut:
    """Returns an optimizer that averages with the last values of its neighbors: ``w+ = mean(w, slots) - step(grad f(w))``.

    It is `fogdist.algorithms.WinPut`, which has the arguments, methods, attributes and errors.
    """
    made = WinPut(optimizer, model, **_of_windows(local_steps, window_prefix, bucket_cap_mb, options))
    made.counts_passes = True
    return made


def DistributedPullGetOptimizer(
    optimizer: Optimizer,
    model: Models,
    local_steps: int = 1,
    window_prefix: str | None = None,
    bucket_cap_mb: float | None = None,
    **options: Unpack[WindowOptions],
) -> PullGet:
    """Returns an optimizer that averages with its neighbors' present parameters: ``w+ = mean(w, w_j) - step(grad f(w))``.

    It is `fogdist.algorithms.PullGet`, which has the arguments, methods, attributes and errors.
    """
    made = PullGet(optimizer, model, **_of_windows(local_steps, window_prefix, bucket_cap_mb, options))
    made.counts_passes = True
    return made


def DistributedPushSumOptimizer(
    optimizer: Optimizer,
    model: Models,
    local_steps: int = 1,
    window_prefix: str | None = None,
    bucket_cap_mb: float | None = None,
    **options: Unpack[WindowOptions],
) -> WindowPushSum:
    """Returns an optimizer that averages by push-sum, which is exact on directed graphs.

    It is `fogdist.algorithms.WindowPushSum`, which has the arguments, methods, attributes and errors.
    """
    made = WindowPushSum(optimizer, model, **_of_windows(local_steps, window_prefix, bucket_cap_mb, options))
    made.counts_passes = True
    return made


def _of_windows(
    local_steps: int, window_prefix: str | None, bucket_cap_mb: float | None, options: WindowOptions
) -> dict[str, Any]:
    others = dict(options)
    interval = _interval(local_steps, options.get("num_steps_per_communication"))
    others.pop("num_steps_per_communication", None)
    return {
        "local_steps": interval,
        "window_prefix": window_prefix,
        "bucket_cap_mb": bucket_cap_mb,
        "broadcast": False,
        **others,
    }


def _interval(local_steps: int, num_steps_per_communication: int | None) -> int:
    if num_steps_per_communication is None:
        return local_steps
    if local_steps != 1:
        raise TypeError("local_steps and num_steps_per_communication must not both be given: they are one")
    check_count(num_steps_per_communication, "num_steps_per_communication")
    return num_steps_per_communication


def _mixing_of(kind: CommunicationType) -> Mixing:
    if not isinstance(kind, CommunicationType):
        allowed = ", ".join(f"CommunicationType.{each.name}" for each in CommunicationType)
        raise TypeError(f"communication_type must be one of {allowed}, got {kind!r}")
    return _MIXING[kind]()
