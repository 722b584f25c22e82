"""The optimizers of BlueFog under the names, and with the arguments, that they had in any version.

Each is an algorithm of `fogdist.algorithms`, with its methods, attributes and errors. BlueFog 0.1 took parameters by name and
no model. Without a model, forward passes cannot be noticed, so `step` makes the whole exchange and compute does not hide it.
The recursion is the same, as the gradient is that of the old parameters.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fogdist.algorithms.decentralized_sgd import DecentralizedSGD, Order
from fogdist.algorithms.push_sum import PushSumSGD
from fogdist.algorithms.win_put import WinPut
from fogdist.bluefog.deprecation import warn_once
from fogdist.exchange import check_weight
from fogdist.shards import local_of, sharded_as
from fogdist.training.algorithm import Algorithm, check_count
from fogdist.training.mixing import DynamicWeights, GlobalAverage, Machines, Mixing, Neighbors, NoMixing
from fogdist.training.overlapping import OverlappingAlgorithm
from fogdist.training.view import Models
from fogdist.warn import warn_user

# A module, several modules, or pairs as from `model.named_parameters()`.
Given = Module | Iterable[Module] | Iterable[tuple[str, Tensor]]

# Attributes before BlueFog 0.3, and what they are called since.
_RENAMED = {
    "neighbor_weights": "src_weights",
    "send_neighbors": "dst_weights",
    "neighbor_machine_weights": "src_machine_weights",
    "send_neighbor_machines": "dst_machine_weights",
}
# Numbers in names repeat after so many steps.
_NUMBERS = 64


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


class _OldNames(Algorithm):
    """An algorithm as a script of BlueFog sees it: attributes have their old names too, and weights without use are ignored."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self, _RENAMED[name]) if name in _RENAMED else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _RENAMED:
            message = f"the attribute {name!r} is called {_RENAMED[name]!r} now; the old name will go"
            warn_user(message, DeprecationWarning)
        super().__setattr__(_RENAMED.get(name, name), value)

    def weights(self) -> DynamicWeights:
        """See `Algorithm.weights`."""
        return super().weights().taken_by(self.mixing)


class _CountingPasses(_OldNames, OverlappingAlgorithm):
    """An algorithm whose rounds begin every J forward passes: J passes with one step, or with a step after each."""

    _passes: list[int]

    def __init__(
        self, optimizer: Optimizer, model: Models, num_steps_per_communication: int, **options: Any
    ) -> None:
        check_count(num_steps_per_communication, "num_steps_per_communication")
        self._passes = [0] * len(self._fog_models)
        super().__init__(
            optimizer, model, local_steps=num_steps_per_communication, broadcast=False, **options
        )

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A block for a `step` after `synchronize`. It only checks that nothing is in flight, as `step` does."""
        if self.is_in_round:
            raise RuntimeError(
                "skip_synchronize() needs a call of synchronize() before it: an exchange is in flight"
            )
        yield

    def is_round_due(self) -> bool:
        """See `OverlappingAlgorithm.is_round_due`."""
        return max(self._passes) >= self.local_steps

    def notice_forward(self, place: int) -> None:
        """See `OverlappingAlgorithm.notice_forward`."""
        self._passes[place] += self.is_syncing
        super().notice_forward(place)

    def complete_round(self) -> None:
        """See `OverlappingAlgorithm.complete_round`. A step counts as a pass if there was none since the last one."""
        if not self._saw_forward:
            self._passes = [count + 1 for count in self._passes]
        super().complete_round()

    def synchronize_now(self) -> None:
        """See `OverlappingAlgorithm.synchronize_now`."""
        if self.is_in_round:
            self._passes = [0] * len(self._passes)
        super().synchronize_now()


class _Communicating(_CountingPasses, DecentralizedSGD):
    """AWC or ATC whose mixing is chosen by a `CommunicationType`."""

    saves_state: ClassVar[bool] = False
    _order: ClassVar[Order]

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
        num_steps_per_communication: int = 1,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        options |= {"order": self._order, "topology": _mixing_of(communication_type)}
        super().__init__(
            optimizer, model, num_steps_per_communication, bucket_cap_mb=bucket_cap_mb, **options
        )

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


class DistributedAdaptWithCombineOptimizer(_Communicating):
    """Adapts with combine: ``w+ = Avg(w) - step(grad f(w))``. See `fogdist.algorithms.DecentralizedSGD`, order "awc".

    `num_steps_per_communication` is J: an average every J forward passes of the model. J = 3 gives one average for
    three passes, with one step or with a step after each pass. It has `synchronize`, `skip_synchronize`, the
    attributes `self_weight`, `src_weights`, `dst_weights`, `src_machine_weights`, `dst_machine_weights`,
    `enable_topo_check`, `communication_type`, and the methods of BlueFog 0.2.2 that set this.
    """

    _order: ClassVar[Order] = "awc"

    def _use(self, kind: CommunicationType) -> None:
        """Averages with other ranks from now on."""
        self.communication_type = kind

    use_allreduce_in_communication = partialmethod(_use, CommunicationType.allreduce)
    use_neighbor_allreduce_in_communication = partialmethod(_use, CommunicationType.neighbor_allreduce)
    use_hierarchical_neighbor_allreduce_in_communication = partialmethod(
        _use, CommunicationType.hierarchical_neighbor_allreduce
    )
    use_empty_function_in_communication = partialmethod(_use, CommunicationType.empty)


class DistributedAdaptThenCombineOptimizer(_Communicating):
    """Adapts, then combines: ``w+ = Avg(w - step(grad f(w)))``. See `fogdist.algorithms.DecentralizedSGD`, order "atc".

    Arguments and attributes are those of `DistributedAdaptWithCombineOptimizer`. BlueFog counted backward passes, of which
    each has its forward pass.
    """

    _order: ClassVar[Order] = "atc"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.watch_forward("before forward")  # only to count the passes

    def count_step(self) -> bool:
        """See `Algorithm.count_step`."""
        self.steps += 1
        if not self._saw_forward:
            self._passes = [count + 1 for count in self._passes]
        self._saw_forward = False
        is_due = self.is_round_due()
        if is_due:
            self._passes = [0] * len(self._passes)
        return is_due

    def begin_if_due(self) -> bool:
        """Begins nothing: the average comes after the step."""
        return False


class DistributedWinPutOptimizer(_CountingPasses, WinPut):
    """Averages with the last values of its neighbors: `fogdist.algorithms.WinPut`.

    Its arguments are those of there, the third and fourth `num_steps_per_communication` and `window_prefix`. `max_staleness`
    is 1 by default and bounds the exchanges that a rank is ahead of an in-neighbor: BlueFog's ranks had cores of their own and
    stayed in pace. Ranks that share cores must wait for each other.
    """

    _bounds_lead: ClassVar[bool] = True

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        num_steps_per_communication: int = 1,
        window_prefix: str | None = None,
        bucket_cap_mb: float | None = None,
        *,
        max_staleness: int | None = 1,
        **options: Any,
    ) -> None:
        options |= {"window_prefix": window_prefix, "bucket_cap_mb": bucket_cap_mb}
        super().__init__(
            optimizer, model, num_steps_per_communication, max_staleness=max_staleness, **options
        )

    def unregister_window(self) -> None:
        """Frees the windows, as `close`."""
        self.close()


# BlueFog's got values that the neighbors now put: an average uses the last ones all the same.
DistributedPullGetOptimizer = DistributedWinPutOptimizer


class DistributedPushSumOptimizer(_CountingPasses, PushSumSGD):
    """Push-sum along the group's topology, in step: `fogdist.algorithms.PushSumSGD` with ``order="awc"``.

    It has no windows, so `window_prefix` and `force_barrier` are not used.

    Attributes:
        self_weight: The share that this rank keeps; by default 1 / (number of out-neighbors + 1).
        dst_weights: {out-neighbor: share}, by default the same for each; out-neighbors that are not in it get nothing. Set both
            before an iteration for a dynamic topology; they add up to 1.
    """

    force_barrier: bool

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        num_steps_per_communication: int = 1,
        window_prefix: str | None = None,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        self.force_barrier = True
        options |= {"order": "awc", "bucket_cap_mb": bucket_cap_mb}
        super().__init__(optimizer, model, num_steps_per_communication, **options)
        neighbors = self.context.topology.out_neighbors
        self.self_weight = 1.0 / (len(neighbors) + 1)
        self.dst_weights = dict.fromkeys(neighbors, self.self_weight)

    def unregister_window(self) -> None:
        """Ends it, as `close`."""
        self.close()

    def weights(self) -> DynamicWeights:
        """See `Algorithm.weights`: shares for all neighbors, so that each rank knows from whom it receives."""
        if not isinstance(self.dst_weights, Mapping):
            kind = type(self.dst_weights).__name__
            raise TypeError(f"dst_weights must be a dict of ranks to shares, got {kind}")
        kept = check_weight(cast("float", self.self_weight), "self_weight")
        given = {r: check_weight(w, f"dst_weights[{r}]") for r, w in self.dst_weights.items()}
        if kept <= 0.0 or min(given.values(), default=0.0) < 0.0:
            raise ValueError(f"self_weight must be above 0 and dst_weights not below, got {kept} and {given}")
        if not math.isclose(math.fsum([kept, *given.values()]), 1.0, abs_tol=1e-6):  # they may be of float32
            raise ValueError(f"self_weight and dst_weights must add up to 1, got {kept} and {given}")
        topology = self.context.topology
        if not given.keys() <= set(topology.out_neighbors):
            raise ValueError(
                f"dst_weights must name out-neighbors only, {sorted(topology.out_neighbors)}, got {sorted(given)}"
            )
        return DynamicWeights(
            kept,
            dict.fromkeys(topology.in_neighbors, 1.0),
            {rank: given.get(rank, 0.0) for rank in topology.out_neighbors},
        )


class DistributedGradientAllreduceOptimizer(_OldNames):
    """Parallel SGD: ``x+ = x + d(x)`` with the mean of all ranks' gradients, as Horovod does (Sergeev and Del Balso, 2018).

    `step` averages the gradients that passes have accumulated since the last one, and waits. A parameter without a gradient
    on some rank counts as zero there; a parameter without a gradient on every rank does not change.

    Use a gradient scaler as in one process. Its `step` looks for overflows in the averaged gradients, so an overflow on one
    rank appears on all ranks: all ranks skip the same steps, and their scales stay the same. To clip gradients, call
    `synchronize` first, then the scaler's `unscale_` if there is one, then clip, and `step` in `skip_synchronize`.
    `num_steps_per_communication` is not needed: each `step` averages, as in BlueFog, whose 0.2.2 called it
    `backward_passes_per_step`.
    """

    runs_alone: ClassVar[bool] = False
    saves_state: ClassVar[bool] = False

    _is_synchronized: bool
    _skips: bool  # within skip_synchronize()
    _was_averaged_for_scaler: bool
    _averages: int  # since the last step

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        num_steps_per_communication: int = 1,
        bucket_cap_mb: float | None = None,
        *,
        backward_passes_per_step: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if backward_passes_per_step is not None:
            warn_once(
                "backward_passes_per_step is called num_steps_per_communication now; the old name will go"
            )
            num_steps_per_communication = backward_passes_per_step
        check_count(num_steps_per_communication, "num_steps_per_communication")
        self._is_synchronized = self._skips = self._was_averaged_for_scaler = False
        self._averages = 0
        options: Any = {"bucket_cap_mb": bucket_cap_mb, "group": group, "broadcast": False}
        super().__init__(optimizer, model, topology=GlobalAverage(), **options)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # type: ignore[override]
        # A gradient scaler's step() reads this attribute before it checks the gradients for overflows, and no other
        # code of this class runs between the backward pass and that check. The scaler must check the average, because
        # the result determines the next scale, which must be the same on all ranks.
        if not (self._skips or self._is_synchronized):
            self.synchronize()
            self._was_averaged_for_scaler = self.is_running
        return True

    @torch.no_grad()
    def synchronize(self) -> None:
        """Averages the gradients now. `step` does so again, which changes nothing, or not in `skip_synchronize`."""
        self._fog_check_not_replaced()
        if self.is_running:
            self.refresh()
            self._average()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A block for a `step` after `synchronize`, which does not average the gradients again."""
        if not self._is_synchronized and not self.is_alone:
            raise RuntimeError("skip_synchronize() needs a call of synchronize() since the last step")
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Averages the gradients and makes the optimizer's step; as `Algorithm.step`."""
        was_averaged, self._was_averaged_for_scaler = self._was_averaged_for_scaler, False
        # A scaler that has already unscaled the gradients sets no scale.
        if was_averaged and getattr(self, "grad_scale", None) is None:
            self._is_synchronized = False
            self._fog_forget_scaler()
            raise RuntimeError(
                "a gradient scaler's unscale_() needs a call of synchronize() before it: it has unscaled this rank's "
                "own gradients, and the average over all ranks is still scaled"
            )
        self._skips = self._skips or was_averaged
        try:
            return super().step(*arguments, **options)
        finally:
            self._skips = self._skips and not was_averaged

    def advance(self) -> Any:
        """See the class."""
        if not self._skips:
            self._average()
        self._is_synchronized, self._averages = False, 0
        self.steps += 1
        return self.adapt()

    def _average(self) -> None:
        """Averages the gradients. A parameter that has one on any rank has one on all of them afterwards."""
        flats, backend = self.gradients(), self.context.backend
        # The number of the step makes a rank that averages once more within it than the others raise an error, instead of
        # taking the values of the next step. The backend remembers each name, so numbers repeat.
        name = f"{self.name}.{self.steps % _NUMBERS}.{self._averages % _NUMBERS}"
        self._averages += 1
        pieces = list(self.buckets.pieces(flats))
        present = torch.tensor([float(p.grad is not None) for p, _ in pieces], device="cpu")
        works = [
            backend.allreduce_named(each, dist.ReduceOp.AVG, name=f"{name}.{place}")
            for place, each in enumerate([present, *flats])
        ]
        for work in works:
            work.wait()
        for (parameter, piece), count in zip(pieces, present.tolist(), strict=True):
            if parameter.grad is not None:
                local_of(parameter.grad).copy_(piece)
            elif count:  # as with a single process, a parameter without a gradient is not updated
                parameter.grad = sharded_as(parameter, piece)


def _before_3(name: str, kind: str, meaning: str) -> Callable[..., Any]:
    """Returns what makes an optimizer that has another name since BlueFog 0.3."""

    def make(
        optimizer: Optimizer,
        model: Given | None = None,
        num_steps_per_communication: int = 1,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        **options: Any,
    ) -> Any:
        models, is_by_name = _models(optimizer, model, named_parameters, num_steps_per_communication)
        if kind == "win_put":
            return DistributedWinPutOptimizer(optimizer, models, num_steps_per_communication, **options)
        if kind == "allreduce" and is_by_name:
            return DistributedGradientAllreduceOptimizer(optimizer, models, **options)
        chosen = CommunicationType[kind]
        warn_user(
            f"it is DistributedAdaptWithCombineOptimizer with {chosen} since BlueFog 0.3",
            PendingDeprecationWarning,
        )
        return DistributedAdaptWithCombineOptimizer(
            optimizer, models, chosen, num_steps_per_communication, **options
        )

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"""{meaning}

    `named_parameters` stand in place of a model; neither of both means all parameters of the optimizer.
    `num_steps_per_communication` must be 1 without a model.
    """
    return make


DistributedAllreduceOptimizer = _before_3(
    "DistributedAllreduceOptimizer",
    "allreduce",
    "Averages parameters over all ranks if it is given a model, as since BlueFog 0.2.2, else gradients, as in 0.1.",
)
DistributedNeighborAllreduceOptimizer = _before_3(
    "DistributedNeighborAllreduceOptimizer",
    "neighbor_allreduce",
    "As `DistributedAdaptWithCombineOptimizer`: ``w+ = Avg(w) - step(grad f(w))``.",
)
DistributedConsensusOptimizer = DistributedNeighborAllreduceOptimizer
DistributedHierarchicalNeighborAllreduceOptimizer = _before_3(
    "DistributedHierarchicalNeighborAllreduceOptimizer",
    "hierarchical_neighbor_allreduce",
    "As `DistributedAdaptWithCombineOptimizer` between machines.",
)
DistributedBluefogOptimizer = _before_3(
    "DistributedBluefogOptimizer", "win_put", "As `DistributedWinPutOptimizer`, also with `named_parameters`."
)


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


def _mixing_of(kind: CommunicationType) -> Mixing:
    if not isinstance(kind, CommunicationType):
        allowed = ", ".join(f"CommunicationType.{each.name}" for each in CommunicationType)
        raise TypeError(f"communication_type must be one of {allowed}, got {kind!r}")
    return _MIXING[kind]()
