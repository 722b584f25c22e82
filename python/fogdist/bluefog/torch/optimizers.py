"""The optimizers of BlueFog under the names, and with the arguments, that they had in any version.

Each is an algorithm of `fogdist.algorithms`, with its methods, attributes and errors. BlueFog 0.1 took parameters by name and
no model. Without a model, forward passes cannot be noticed, so `step` makes the whole exchange and compute does not hide it.
The recursion is the same, as the gradient is that of the old parameters.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import Unpack

from fogdist.algorithms.asynchronous_diffusion import PullGet, WinPut
from fogdist.algorithms.decentralized_sgd import DecentralizedSGD
from fogdist.algorithms.window_push_sum import WindowPushSum
from fogdist.bluefog.adapt_then_combine import AdaptThenCombine
from fogdist.bluefog.deprecation import warn_once
from fogdist.bluefog.gradient_allreduce import GradientAllreduce
from fogdist.training.algorithm import Algorithm, AlgorithmOptions, check_count
from fogdist.training.mixing import DynamicWeights, GlobalAverage, Machines, Mixing, Neighbors, NoMixing
from fogdist.training.view import Models
from fogdist.warn import warn_user

# A module, several modules, or pairs as from `model.named_parameters()`.
_OnWindows = TypeVar("_OnWindows", WinPut, PullGet, WindowPushSum)
Given = Module | Iterable[Module] | Iterable[tuple[str, Tensor]]


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
    """An algorithm whose mixing is chosen by a `CommunicationType`; weights that this does not use are ignored, as in BlueFog."""

    saves_state: ClassVar[bool] = False

    def weights(self) -> DynamicWeights:
        """See `Algorithm.weights`."""
        return super().weights().taken_by(self.mixing)

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

    def __init__(self, optimizer: Optimizer, model: Models, **options: Unpack[AlgorithmOptions]) -> None:
        super().__init__(optimizer, model, order="awc", **options)
        self.counts_passes = True


class AdaptThenCombineOptimizer(_Communicating, AdaptThenCombine):
    """See `DistributedAdaptThenCombineOptimizer`, which makes it."""


def DistributedAdaptWithCombineOptimizer(
    optimizer: Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    bucket_cap_mb: float | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> AdaptWithCombineOptimizer:
    """Returns an optimizer that adapts with combine: ``w+ = Avg(w) - step(grad f(w))``.

    It is `fogdist.algorithms.DecentralizedSGD` with ``order="awc"``, overlapped as in BlueFog (Ying et al. 2021). The
    exchange of the current parameters starts with a forward pass and runs during the forward and the backward pass;
    `step` waits for it. If a gradient scaler finds an overflow, the rank skips its own step but not the average.

    Args:
        optimizer: As in `fogdist.algorithms.Algorithm`.
        model: As in `fogdist.algorithms.Algorithm`.
        communication_type: The ranks to average with.
        num_steps_per_communication: J: an average every J forward passes of the model. J = 3 gives one average for three
            passes, with one step or with a step after each pass.
        bucket_cap_mb: As in `fogdist.algorithms.Algorithm`.
        group: As in `fogdist.algorithms.Algorithm`.

    Returns:
        An instance of the optimizer's class with `step` as above, `synchronize`, `skip_synchronize`, and the
        attributes `self_weight`, `src_weights`, `dst_weights`, `src_machine_weights`, `dst_machine_weights`,
        `enable_topo_check`, `communication_type`.
    """
    return AdaptWithCombineOptimizer(
        optimizer,
        model,
        topology=_mixing_of(communication_type),
        local_steps=_checked(num_steps_per_communication),
        bucket_cap_mb=bucket_cap_mb,
        broadcast=False,
        group=group,
    )


def DistributedAdaptThenCombineOptimizer(
    optimizer: Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    bucket_cap_mb: float | None = None,
    step_in_backward: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> AdaptThenCombineOptimizer:
    """Returns an optimizer that adapts, then combines: ``w+ = Avg(w - step(grad f(w)))``.

    It is `fogdist.bluefog.adapt_then_combine.AdaptThenCombine`: `step` makes the optimizer's own step with the gradients as they are,
    after accumulation, clipping or unscaling, and then averages the parameters. LBFGS is allowed too.

    `step_in_backward` is as there; the other arguments, and the attributes, are those of
    `DistributedAdaptWithCombineOptimizer`, where J counts backward passes.
    """
    return AdaptThenCombineOptimizer(
        optimizer,
        model,
        step_in_backward=step_in_backward,
        topology=_mixing_of(communication_type),
        local_steps=_checked(num_steps_per_communication),
        bucket_cap_mb=bucket_cap_mb,
        broadcast=False,
        group=group,
    )


def DistributedGradientAllreduceOptimizer(
    optimizer: Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    bucket_cap_mb: float | None = None,
    *,
    backward_passes_per_step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> GradientAllreduce:
    """Returns an optimizer that makes its step with the gradients averaged over all ranks, as Horovod does.

    `fogdist.bluefog.gradient_allreduce.GradientAllreduce` has the arguments, methods and errors; J is
    `num_steps_per_communication`, which was `backward_passes_per_step` in BlueFog 0.2.2.
    """
    if backward_passes_per_step is not None:
        warn_once("backward_passes_per_step is called num_steps_per_communication now; the old name will go")
        num_steps_per_communication = backward_passes_per_step
    interval = _checked(num_steps_per_communication)
    return GradientAllreduce(optimizer, model, local_steps=interval, bucket_cap_mb=bucket_cap_mb, group=group)


def DistributedWinPutOptimizer(*arguments: Any, **options: Any) -> WinPut:
    """Returns an optimizer that averages with the last values of its neighbors: `fogdist.algorithms.WinPut`.

    Its arguments are those of there, the third and fourth `num_steps_per_communication` and `window_prefix`. `max_staleness`
    is 1 by default: BlueFog's ranks had cores of their own and stayed in pace. Ranks that share cores must wait for each
    other.
    """
    return _counting_passes(WinPut(**_of_windows(*arguments, **options)))


def DistributedPullGetOptimizer(*arguments: Any, **options: Any) -> PullGet:
    """As `DistributedWinPutOptimizer`, with the neighbors' present parameters: `fogdist.algorithms.PullGet`."""
    return _counting_passes(PullGet(**_of_windows(*arguments, **options)))


def DistributedPushSumOptimizer(*arguments: Any, **options: Any) -> WindowPushSum:
    """As `DistributedWinPutOptimizer`, by push-sum: `fogdist.algorithms.WindowPushSum`."""
    return _counting_passes(WindowPushSum(**_of_windows(*arguments, **options)))


def DistributedAllreduceOptimizer(
    optimizer: Optimizer,
    model: Given | None = None,
    num_steps_per_communication: int = 1,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
) -> Any:
    """Averages parameters over all ranks if it is given a model, as since BlueFog 0.2.2, else gradients, as in 0.1.

    With a model it is ``DistributedAdaptWithCombineOptimizer(optimizer, model, CommunicationType.allreduce)``, else
    ``DistributedGradientAllreduceOptimizer``. Arguments and errors are those of `DistributedNeighborAllreduceOptimizer`.
    """
    models, is_by_name = _models(optimizer, model, named_parameters, num_steps_per_communication)
    if is_by_name:
        return DistributedGradientAllreduceOptimizer(optimizer, models)
    return _choosable(optimizer, models, "allreduce", num_steps_per_communication)


def DistributedNeighborAllreduceOptimizer(
    optimizer: Optimizer,
    model: Given | None = None,
    num_steps_per_communication: int = 1,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
) -> Any:
    """As `DistributedAdaptWithCombineOptimizer`: ``w+ = Avg(w) - step(grad f(w))``.

    Args:
        optimizer: As there.
        model: As there.
        num_steps_per_communication: As there; with a model only.
        named_parameters: In place of a model; neither of both means all parameters of the optimizer.

    Raises:
        TypeError: As there; `model` and `named_parameters` are both given.
        ValueError: As there; `num_steps_per_communication` without a model.
        RuntimeError: As there.
    """
    models, _ = _models(optimizer, model, named_parameters, num_steps_per_communication)
    return _choosable(optimizer, models, "neighbor_allreduce", num_steps_per_communication)


DistributedConsensusOptimizer = DistributedNeighborAllreduceOptimizer


def DistributedHierarchicalNeighborAllreduceOptimizer(
    optimizer: Optimizer, model: Models, num_steps_per_communication: int = 1
) -> Any:
    """As `DistributedAdaptWithCombineOptimizer` between machines; arguments and errors of there."""
    return _choosable(optimizer, model, "hierarchical_neighbor_allreduce", num_steps_per_communication)


def DistributedBluefogOptimizer(
    optimizer: Optimizer,
    model: Given | None = None,
    num_steps_per_communication: int = 1,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    **options: Any,
) -> WinPut:
    """As `DistributedWinPutOptimizer`, or with `named_parameters` as `DistributedNeighborAllreduceOptimizer` has them."""
    models, _ = _models(optimizer, model, named_parameters, num_steps_per_communication)
    return DistributedWinPutOptimizer(optimizer, models, num_steps_per_communication, **options)


def _choosable(optimizer: Optimizer, models: Models, kind: str, interval: int) -> Any:
    """Returns AWC with the methods of BlueFog 0.2.2 that choose `communication_type`."""
    chosen = CommunicationType[kind]
    warn_user(
        f"it is DistributedAdaptWithCombineOptimizer with {chosen} since BlueFog 0.3",
        PendingDeprecationWarning,
    )
    combining = DistributedAdaptWithCombineOptimizer(optimizer, models, chosen, interval)
    this = weakref.ref(combining)
    for each in CommunicationType:
        name = "empty_function" if each is CommunicationType.empty else each.name
        setattr(combining, f"use_{name}_in_communication", partial(_choose, this, each))
    return combining


def _choose(reference: weakref.ref[Any], kind: CommunicationType) -> None:
    optimizer: Any = reference()  # the caller keeps it alive
    optimizer.communication_type = kind


class _Parameters(Module):
    """A module for parameters that were passed without their model."""

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._named = named

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[Any]:
        return iter(self._named)


def _models(
    optimizer: Optimizer,
    model: Given | None,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
    num_steps_per_communication: int,
) -> tuple[Module | list[Module], bool]:
    """Returns the modules that hold the parameters, and whether the parameters were passed by name."""
    if model is not None and named_parameters is not None:
        raise TypeError("model and named_parameters must not both be given")
    if isinstance(model, Module):
        return model, False
    given: list[Any] = list(named_parameters if model is None and named_parameters else model or ())
    if given and all(isinstance(each, Module) for each in given):
        return given, False
    if num_steps_per_communication != 1:
        raise ValueError(
            f"num_steps_per_communication must be 1 without a model, got {num_steps_per_communication}"
        )
    if model is None and named_parameters is None:
        for number, group in enumerate(optimizer.param_groups):
            given += [(f"parameter.{number}.{place}", tensor) for place, tensor in enumerate(group["params"])]
    for pair in given:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise TypeError(f"model must be a Module, Modules, or pairs of name and parameter, got {pair!r}")
    return _Parameters(given), True


def _of_windows(
    optimizer: Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    bucket_cap_mb: float | None = None,
    *,
    max_staleness: int | None = 1,
    **options: Any,
) -> dict[str, Any]:
    return {
        "optimizer": optimizer,
        "model": model,
        "local_steps": _checked(num_steps_per_communication),
        "window_prefix": window_prefix,
        "bucket_cap_mb": bucket_cap_mb,
        "max_staleness": max_staleness,
        "broadcast": False,
        **options,
    }


def _counting_passes(made: _OnWindows) -> _OnWindows:
    made.counts_passes = True
    return made


def _checked(num_steps_per_communication: int) -> int:
    check_count(num_steps_per_communication, "num_steps_per_communication")
    return num_steps_per_communication


def _mixing_of(kind: CommunicationType) -> Mixing:
    if not isinstance(kind, CommunicationType):
        allowed = ", ".join(f"CommunicationType.{each.name}" for each in CommunicationType)
        raise TypeError(f"communication_type must be one of {allowed}, got {kind!r}")
    return _MIXING[kind]()
