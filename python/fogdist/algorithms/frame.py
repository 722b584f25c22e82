"""The frame of all algorithms: local steps of the user's optimizer, and what is done between them."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fogdist.agreement import check_same_everywhere, gather_numbers
from fogdist.algorithms.flats import Flats
from fogdist.algorithms.mixing import Mixing, MixingLike, Nobody, as_mixing
from fogdist.arguments import plain
from fogdist.buckets import on_device
from fogdist.context import Context, current
from fogdist.optim.parameter_average import NeighborWeights
from fogdist.optim.wrapper import (
    DistributedOptimizer,
    Models,
    closure_of,
    evaluated,
    only_makes_state,
    reject_lbfgs,
    setting,
    wrap,
)

if TYPE_CHECKING:
    from typing_extensions import Self

# What a state dict holds of an algorithm stands beside what the optimizer keeps, under names that begin so.
_PREFIX = "fog_"
_NAME, _STEPS, _ROUNDS = f"{_PREFIX}algorithm", f"{_PREFIX}steps", f"{_PREFIX}rounds"


class Algorithm(DistributedOptimizer):
    """Base of the algorithms: ``x+ = W (x + step(grad f(x)))`` every `local_steps` steps. Collective to make.

    A subclass says what its recursion does otherwise, by overriding `_fog_adapt` (a local step),
    `_fog_combine` (what follows every `local_steps` of them) or `_fog_advance` (both), and what it remembers
    of each element of the parameters, in `_fog_buffers`. All three work on flat vectors without gradients
    being recorded.

    The object is a view of the optimizer it was made of, and an instance of its class: learning-rate
    schedulers, gradient scalers and hooks see the user's optimizer. `state_dict` holds the algorithm's state
    too, and training goes on from it bit for bit; it can be loaded into the plain optimizer as well.

    Args:
        optimizer: Any torch optimizer that evaluates its closure once a step; it keeps its state.
        model: The model, or a list of models, that hold its parameters. All trained parameters take part,
            buffers do not. Ranks should start from the same parameters (`fogdist.broadcast_parameters`): a
            UserWarning on all ranks says if they do not.
        mixing: Whom to average with, the same on all ranks. A `fogdist.topology.Topology`: its rounds, one
            after the other. A `networkx.DiGraph`: it, with its weights, in all rounds. None: the
            attributes `self_weight`, `src_weights` and `dst_weights`, which can be set before each step for a
            dynamic topology, and as long as they are None the group's topology. Or `AllRanks()` or `Nobody()`.
        local_steps: J: ranks communicate in every J-th step, counted in calls of `step`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: `optimizer` is an LBFGS, is distributed already or has a parameter that is not in the
            model; two parameters have the same name; another living optimizer or wrapper has one; a number
            is out of its range; a topology of another number of ranks; ranks disagree on the algorithm, its
            options or the parameters' shapes (on all ranks alike); before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if a rank does not come.
    """

    _public: ClassVar[frozenset[str]] = frozenset(
        {"self_weight", "src_weights", "dst_weights", "enable_topo_check"}
    )
    # Whether the recursion has the learning rate in it.
    _fog_needs_rates: ClassVar[bool] = False
    # Names of flat vectors that are kept from step to step, and of numbers.
    _fog_buffers: ClassVar[tuple[str, ...]] = ()
    _fog_numbers: ClassVar[Mapping[str, float]] = {}
    # Asks a gradient scaler to call step() whether gradients overflowed or not: neighbors wait for this rank.
    _step_supports_amp_scaling = True

    self_weight: float | None = setting(None)
    src_weights: Mapping[int, float] | None = setting(None)
    dst_weights: Iterable[int] | Mapping[int, float] | None = setting(None)
    enable_topo_check: bool = setting(False)

    def __new__(cls, optimizer: Optimizer, model: Models, *args: Any, **options: Any) -> Self:
        return wrap(cls, optimizer, model, 1)

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        mixing: MixingLike = None,
        local_steps: int = 1,
    ) -> None:
        self._fog_begin(optimizer, mixing, local_steps)

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Makes a step of the algorithm.

        Where a gradient scaler finds an overflow, the rank leaves out its own local step, but counts the step and
        communicates.

        Args:
            *arguments: A closure, evaluated once, before anything is done; or nothing.
            **options: The closure as `closure`, and what else the optimizer's own step takes.

        Returns:
            What the closure returned, else what the optimizer's own step returns.
        """
        if only_makes_state(self._fog_wrapped, arguments, options):
            return self._fog_wrapped.step(**options)
        closure, self._fog_step_options = closure_of(arguments, options)
        loss = evaluated(closure)
        with self._fog_scaler_forgotten_on_error(), torch.no_grad():
            self._fog_overflowed = self._fog_unscale()
            self._fog_refresh()
            result = self._fog_advance()
        return result if closure is None else loss

    # --- for subclasses ---

    def _fog_begin(
        self, optimizer: Optimizer, mixing: MixingLike, local_steps: int, **options: object
    ) -> None:
        """Sets the algorithm up; `options` are what else all ranks must have given alike."""
        context = current()
        reject_lbfgs(optimizer)
        if self._fog_needs_rates and not all("lr" in group for group in optimizer.param_groups):
            raise ValueError(
                f"optimizer must have a learning rate 'lr' in each group for {self._fog_algorithm}, got "
                f"{type(optimizer).__name__} with {sorted(set(optimizer.param_groups[0]) - {'params'})}"
            )
        check_count(local_steps, "local_steps")
        self._fog_mixing = as_mixing(mixing)
        described = {"local_steps": local_steps, **options}
        items = [*self._fog_mixing.items(), *(f"{name}={value!r}" for name, value in described.items())]
        self._fog_local_steps = local_steps
        self._fog_is_alone = context.is_alone
        self._fog_step_count = 0
        self._fog_rounds = 0
        self._fog_numbers_now = dict(self._fog_numbers)
        self._fog_flats = Flats(self._fog_trained(), self._fog_names, self)
        self._fog_has_state = False
        self._fog_state: dict[str, list[Tensor]] = {name: [] for name in self._fog_buffers}
        self._fog_loaded: dict[str, dict[Tensor, Tensor]] = {}
        with self._fog_flats.released_on_error():
            _check_same_start(context, self, items, self._fog_parameters())

    def _fog_advance(self) -> Any:
        """One step: adapts, and combines if it is due."""
        result = self._fog_adapt()
        if self._fog_count():
            self._fog_combine()
            self._fog_rounds += 1
        return result

    def _fog_adapt(self) -> Any:
        """A local step, unless gradients overflowed; returns what the optimizer's own step returns."""
        return None if self._fog_overflowed else self._fog_wrapped.step(**self._fog_step_options)

    def _fog_combine(self) -> None:
        """What follows every `local_steps` local steps."""
        self._fog_average(self._fog_flats.values, in_place=True)

    def _fog_initial(self, name: str) -> list[Tensor]:
        """The first values of a buffer, before the first step with these parameters."""
        return self._fog_flats.zeros()

    def _fog_count(self) -> bool:
        """Counts a step and returns whether ranks are to communicate in it."""
        self._fog_step_count += 1
        return self._fog_step_count % self._fog_local_steps == 0

    def _fog_average(
        self, tensors: Sequence[Tensor], mixing: Mixing | None = None, *, in_place: bool = False
    ) -> list[Tensor]:
        """Returns this round's weighted averages, by the algorithm's own mixing or another one."""
        chosen = self._fog_mixing if mixing is None else mixing
        if self._fog_is_alone:
            chosen = Nobody()
        return chosen.start(tensors, self._fog_rounds, self._fog_weights(), self._fog_name, in_place)()

    def _fog_weights(self) -> NeighborWeights:
        return NeighborWeights(self.self_weight, self.src_weights, self.dst_weights, self.enable_topo_check)

    @property
    def _fog_name(self) -> str:
        return f"fogdist.algorithm.{self._fog_number}"

    def _fog_rates(self) -> list[float]:
        """The learning rate that each flat vector has now."""
        groups = self._fog_wrapped.param_groups
        return [float(groups[place]["lr"]) for place in self._fog_flats.group_of]

    def _fog_step_along(self, directions: Sequence[Tensor]) -> Any:
        """The optimizer's own step with `directions` in place of the gradients, which are there again after
        it.

        A parameter without a gradient, whose direction is zero, stays without one: nothing decays it.

        Args:
            directions: Flat vectors; the optimizer may overwrite them.
        """
        pairs = list(self._fog_flats.views(directions))
        kept = [(parameter, parameter.grad) for parameter, _ in pairs]
        missing = [direction for parameter, direction in pairs if parameter.grad is None]
        moves = iter(_have_nonzero(missing))
        for parameter, direction in pairs:
            if parameter.grad is not None or next(moves):
                parameter.grad = direction
        try:
            return self._fog_wrapped.step(**self._fog_step_options)
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _fog_refresh(self) -> None:
        """Takes up parameters that were added, unfrozen or replaced, and forgets those that were frozen.

        The algorithm's state begins here too, at the first step: not before the user has loaded or broadcast
        what ranks start from.
        """
        groups = self._fog_trained()
        is_known = self._fog_flats.hold(groups)
        if is_known:
            self._fog_flats.rehome()
            if self._fog_has_state:
                return
        # What was loaded, or what was remembered of the parameters that are still here.
        known = self._fog_loaded or self._fog_pieces()
        if not is_known:
            self._fog_flats = Flats(groups, self._fog_names, self)
        for name in self._fog_buffers:
            self._fog_state[name] = self._fog_initial(name)
            for parameter, piece in self._fog_flats.views(self._fog_state[name]):
                if parameter in known.get(name, {}):
                    piece.copy_(known[name][parameter])
        self._fog_loaded = {}
        self._fog_has_state = True

    def _fog_trained(self) -> list[list[Tensor]]:
        """The parameters of each group that are not frozen now."""
        return [
            [parameter for parameter in group["params"] if parameter.requires_grad]
            for group in self._fog_wrapped.param_groups
        ]

    def _fog_pieces(self) -> dict[str, dict[Tensor, Tensor]]:
        if self._fog_loaded:
            return self._fog_loaded
        return {name: dict(self._fog_flats.views(flats)) for name, flats in self._fog_state.items() if flats}

    def _is_own(self, name: str) -> bool:
        # Also for an optimizer that knows scalers: algorithms read gradients, which it would unscale within its step.
        return name in self._scaler_marks or super()._is_own(name)

    # --- state dicts ---

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state dict with the algorithm's state beside what the optimizer keeps.

        The state of each parameter, and the first parameter group, have entries that begin with "fog_".
        """
        saved = self._fog_wrapped.state_dict()
        state = {
            key: dict(value) if isinstance(value, dict) else value for key, value in saved["state"].items()
        }
        order = [parameter for group in self._fog_wrapped.param_groups for parameter in group["params"]]
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        key_of = dict(zip(order, keys, strict=True))
        for name, pieces in self._fog_pieces().items():
            for parameter, piece in pieces.items():
                state.setdefault(key_of[parameter], {})[_PREFIX + name] = piece
        groups = [dict(group) for group in saved["param_groups"]]
        groups[0].update({_PREFIX + name: value for name, value in self._fog_numbers_now.items()})
        groups[0].update(
            {_NAME: self._fog_algorithm, _STEPS: self._fog_step_count, _ROUNDS: self._fog_rounds}
        )
        return {**saved, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this algorithm, or of the plain optimizer: the algorithm then begins anew.

        The parameters and the algorithm's state belong together: load both, of the same step.

        Raises:
            ValueError: It is another algorithm's, or as `load_state_dict` of the optimizer.
        """
        saved_groups = state_dict["param_groups"]
        numbers = {
            key: value
            for group in saved_groups[:1]
            for key, value in group.items()
            if key.startswith(_PREFIX)
        }
        if numbers.get(_NAME, self._fog_algorithm) != self._fog_algorithm:
            raise ValueError(
                f"state_dict must be of {self._fog_algorithm} or of a plain optimizer, got one of "
                f"{numbers[_NAME]}"
            )
        order = [parameter for group in self._fog_wrapped.param_groups for parameter in group["params"]]
        keys = [key for group in saved_groups for key in group["params"]]
        state = {key: _without_prefix(value) for key, value in state_dict["state"].items()}
        # A parameter of which only the algorithm knew something has no state for the optimizer.
        state = {key: value for key, value in state.items() if value or not state_dict["state"][key]}
        self._fog_wrapped.load_state_dict(
            {**state_dict, "state": state, "param_groups": [_without_prefix(group) for group in saved_groups]}
        )
        self._fog_has_state = False
        self._fog_state = {name: [] for name in self._fog_buffers}
        self._fog_loaded = {
            name: {
                parameter: state_dict["state"][key][_PREFIX + name].clone()
                for parameter, key in zip(order, keys, strict=True)
                if _PREFIX + name in state_dict["state"].get(key, {})
            }
            for name in self._fog_buffers
        }
        self._fog_step_count = numbers.get(_STEPS, 0)
        self._fog_rounds = numbers.get(_ROUNDS, 0)
        self._fog_numbers_now = {
            name: numbers.get(_PREFIX + name, value) for name, value in self._fog_numbers.items()
        }

    @property
    def _fog_algorithm(self) -> str:
        # The class itself is named as the user's optimizer, see `wrap`.
        return type(self).__mro__[1].__name__


def check_count(value: int, argument: str) -> None:
    """Raises TypeError unless `value` is an int, ValueError unless it is at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{argument} must be at least 1, got {value}")


def check_factor(value: float, argument: str, *, below: float = math.inf, positive: bool = False) -> float:
    """Returns a number that is at least 0 and below `below`, as a float.

    Raises:
        TypeError: Not a real number.
        ValueError: Out of this range, or 0 where it must be positive.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be a number, got {type(value).__name__}")
    if not 0.0 <= value < below or (positive and value == 0.0):
        least = "more than 0" if positive else "at least 0"
        most = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{argument} must be {least}{most}, got {value}")
    return float(value)


def _have_nonzero(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each tensor has an element that is not 0; the host waits for each device once at most."""
    answers = [tensor.any() for tensor in tensors]
    of_device: dict[torch.device, list[int]] = {}
    for place, answer in enumerate(answers):
        of_device.setdefault(answer.device, []).append(place)
    result = [False] * len(answers)
    for places in of_device.values():
        found = torch.stack([answers[place] for place in places]).tolist()
        for place, value in zip(places, found, strict=True):
            result[place] = value
    return result


def _without_prefix(entries: Any) -> Any:
    if not isinstance(entries, dict):
        return entries
    return {
        key: value for key, value in entries.items() if not (isinstance(key, str) and key.startswith(_PREFIX))
    }


def _check_same_start(
    context: Context, algorithm: Algorithm, options: Sequence[str], parameters: Sequence[Tensor]
) -> None:
    """Raises ValueError if ranks do not run the same algorithm, warns if they do not start from one point."""
    if context.size == 1:
        return
    items = [algorithm._fog_algorithm, *options]
    items += [
        f"parameter {place}: {p.dtype} of shape {tuple(p.shape)}{on_device(p)}"
        for place, p in enumerate(parameters)
    ]
    check_same_everywhere(context.backend, "algorithm", items)
    versions: dict[int, list[int]] = {}
    for rank, (number,) in enumerate(gather_numbers(context.backend, [_digest(parameters)])):
        versions.setdefault(number, []).append(rank)
    if len(versions) > 1:
        warnings.warn(
            f"ranks start from {len(versions)} different sets of parameters, rank 0 from that of the ranks "
            f"{next(iter(versions.values()))}; broadcast_parameters(dict(model.named_parameters()), 0) gives "
            "them one",
            stacklevel=4,
        )


def _digest(tensors: Sequence[Tensor]) -> int:
    """Returns 63 bits that stand for the values of tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        values: Any = plain(tensor.detach()).reshape(-1).view(torch.uint8).cpu().numpy()
        digest.update(values)
    return int.from_bytes(digest.digest(), "big") >> 1
