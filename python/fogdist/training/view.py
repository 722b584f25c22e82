"""A distributed optimizer as a view of the user's optimizer.

The user's object stays the only holder of parameter groups, state, options and hooks, and its `step` makes
every local update, whatever algorithm it is. The view adds communication around that, and is an instance of
the user's optimizer class too, so that schedulers, gradient scalers and isinstance checks take it for what it
wraps.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fogdist.observe import timeline

Models = Module | Sequence[Module]

_View = TypeVar("_View", bound="DistributedOptimizer")


class DistributedOptimizer(Optimizer):
    """Base of the distributed optimizers; made by `wrap` only.

    Attributes that a subclass declares in its body, and names that begin with ``_fog``, live in the view. All others are
    read from, written to and deleted in the wrapped optimizer, which must have those that are set, unless their names are
    private. An optimizer that already has an attribute of such a name is refused: its own methods, called on the view,
    would read the view's attribute.

    Frameworks such as Lightning wrap a view in an object of a class that they derive from the view's class, so the
    methods here run on that object too. Attributes that it sets are its own, except those that live in the view.
    """

    # The names that subclasses declare, with or without a value.
    _fog_declared: ClassVar[frozenset[str]] = frozenset()
    # Set by learning-rate schedulers, which wrap `step` of their optimizer in a counter.
    _scheduler_marks: ClassVar[frozenset[str]] = frozenset({"step", "_opt_called"})
    # Set by gradient scalers. An optimizer that does not support them must not see them.
    _scaler_marks: ClassVar[frozenset[str]] = frozenset({"grad_scale", "found_inf"})

    _fog_view: ClassVar[weakref.ref[DistributedOptimizer]]  # wrappers' derived classes have it too
    _fog_wrapped: Optimizer
    _fog_models: tuple[Module, ...]
    _fog_names: dict[Tensor, str]
    _fog_marks: Any  # a PassMarks, or None; its module imports torch._dynamo
    _fog_title: str  # for messages
    _fog_ended: str  # why it makes no more steps; empty while it does

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        values = {name for name, value in vars(cls).items() if not inspect.isfunction(value)}
        own = values.union(inspect.get_annotations(cls))
        inherited = [base._fog_declared for base in cls.__bases__ if issubclass(base, DistributedOptimizer)]
        declared = {name for name in own if not name.startswith("__")}
        cls._fog_declared = frozenset(declared).union(*inherited)

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that neither the view nor its classes have.
        view = self._fog_view()
        if view is not self:
            return getattr(view, name)
        if name.startswith("_fog"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._fog_wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        holder = self._fog_holder(name)
        if holder is self:
            object.__setattr__(self, name, value)
        elif holder is self._fog_wrapped and not name.startswith("_") and not hasattr(holder, name):
            names = f"neither {type(self).__mro__[1].__name__} nor the {type(holder).__name__} that it wraps"
            raise AttributeError(f"{names} has an attribute {name!r}, so setting it would have no effect")
        else:
            setattr(holder, name, value)

    def __delattr__(self, name: str) -> None:
        holder = self._fog_holder(name)
        if holder is self:
            object.__delattr__(self, name)
        else:
            delattr(holder, name)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a distributed optimizer cannot be copied or pickled; use its state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of the wrapped optimizer's class, distributed or not."""
        self._fog_wrapped.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group whose parameters belong to the model, as it is now.

        Raises:
            ValueError: A parameter is not in the model.
            RuntimeError: Another distributed optimizer has taken over the model.
        """
        self._fog_check_not_replaced()
        self._fog_wrapped.add_param_group(param_group)
        try:
            self._fog_names.update(names(self._fog_models))
            check_ownership(self._fog_wrapped, self._fog_names)
        except ValueError:
            self._fog_wrapped.param_groups.pop()
            raise

    def turn_on_timeline(self) -> None:
        """Marks training passes in the traces of ``torch.profiler`` and in the timeline from now on.

        An optimizer that is made while there is a timeline (`fogdist.timeline`) does so by itself.

        A range "fogdist.forward" is a forward pass of a model, "fogdist.gradient" goes from its end to the
        step. Exchanges ("fog:neighbor_allreduce" and others) and the optimizer's step are in the traces always.
        """
        if self._fog_marks is None:
            from fogdist.training.pass_watch import PassMarks

            self._fog_marks = PassMarks(self._fog_models)
            # The models outlive their optimizer.
            weakref.finalize(self, self._fog_marks.remove).atexit = False

    def turn_off_timeline(self) -> None:
        """Ends what `turn_on_timeline` began."""
        if self._fog_marks is not None:
            self._fog_marks.remove()
            self._fog_marks = None

    def _fog_evaluated(self, closure: Callable[[], Any] | None) -> Any:
        """Returns the result of a step's closure, if it has one. From then on the gradients are there."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._fog_marks is not None:
            self._fog_marks.end()
        return loss

    def _fog_give_up(self) -> None:
        """Releases the parameters to another owner. A subclass also removes its hooks from the model."""
        self._fog_ended = (
            "was replaced: another distributed optimizer was made of its model's parameters; call that one"
        )
        self.turn_off_timeline()

    def _fog_check_not_replaced(self) -> None:
        if self._fog_ended:
            raise RuntimeError(f"{self._fog_title} {self._fog_ended}")

    def _fog_holder(self, name: str) -> Optimizer:
        """Returns the object to write an attribute to: this one, the view that it wraps, or the user's optimizer."""
        view = self._fog_view()
        assert view is not None  # an object that wraps the view keeps it alive
        if view is self:
            return self if self._is_own(name) else self._fog_wrapped
        for copied in [each for each in vars(self) if self._fog_is_declared(each)]:
            del vars(self)[copied]  # a wrapper that copies attributes would otherwise see an outdated value
        return view if self._fog_is_declared(name) or name in self._scaler_marks else self

    def _is_own(self, name: str) -> bool:
        # A scaler's marks even if the optimizer supports scalers: it would unscale within its step, but algorithms read the
        # gradients before it.
        return self._fog_is_declared(name) or name in self._scheduler_marks or name in self._scaler_marks

    def _fog_is_declared(self, name: str) -> bool:
        return name.startswith("_fog") or name in self._fog_declared

    def _fog_unscale(self) -> bool:
        """Divides gradients by the scale of a gradient scaler, if one called `step`. Returns whether they overflowed.

        A scaler stores scale and overflow in attributes of an optimizer that has ``_step_supports_amp_scaling``, and
        always calls `step`. So a rank whose gradients overflowed skips only its own update and still sends to its
        neighbors.
        """
        scale, overflow = self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")
        if scale is not None:
            _unscale(self._fog_wrapped, scale)
        return overflow is not None and float(overflow) != 0

    def _fog_forget_scaler(self) -> None:
        """Removes the attributes of a gradient scaler, which removes them itself only if `step` returns.

        It would multiply the next scale by them.
        """
        for mark in self._scaler_marks:
            if hasattr(self, mark):
                delattr(self, mark)


def wrap(view: type[_View], optimizer: Optimizer, model: Models) -> _View:
    """Returns a distributed optimizer of class `view` around `optimizer`.

    Args:
        view: A subclass of DistributedOptimizer.
        optimizer: The user's optimizer.
        model: The model, or models, that hold its parameters.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: `optimizer` is distributed already, has an attribute that `view` has too, or a parameter that is
            not in the model; two parameters have the same name.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, DistributedOptimizer):
        raise ValueError(
            f"optimizer must not be distributed already, got {type(optimizer).__mro__[1].__name__}; give the torch "
            "optimizer itself. In a notebook, make both in one cell, so that it can run again"
        )
    if hidden := _hidden(view, optimizer):
        raise ValueError(
            f"optimizer must have no attributes of its own that {view.__name__} has too, got a "
            f"{type(optimizer).__name__} with {', '.join(map(repr, hidden))}; give them other names"
        )
    models = (model,) if isinstance(model, Module) else model
    if not isinstance(models, (list, tuple)) or not all(isinstance(each, Module) for each in models):
        raise TypeError(f"model must be a torch.nn.Module or a list of them, got {type(model).__name__}")
    held = names(models)
    check_ownership(optimizer, held)
    kind = type(optimizer)
    # It has the name of the user's class, which its repr and logs should show.
    body = {"__module__": view.__module__, "__doc__": view.__doc__}
    made: type[_View] = type(kind.__name__, (view, kind), body)
    distributed = object.__new__(made)  # without the __init__ of the user's class
    made._fog_view = weakref.ref(distributed)
    distributed._fog_wrapped = optimizer
    distributed._fog_models = tuple(models)
    distributed._fog_names = held
    distributed._fog_marks = None
    distributed._fog_ended = ""
    if timeline.is_on():
        distributed.turn_on_timeline()
    return distributed


def _hidden(view: type[DistributedOptimizer], optimizer: Optimizer) -> list[str]:
    """Returns the attributes of an optimizer or its classes that `view` would hide from its users and methods."""
    own = set(vars(optimizer)).union(*(vars(base) for base in type(optimizer).__mro__))
    ours = view._fog_declared.union(*(vars(base) for base in view.__mro__))
    # A view is meant to override the attributes that every torch optimizer has.
    expected = {*dir(Optimizer), "_step_supports_amp_scaling"}
    return sorted(name for name in own & ours - expected if not name.startswith("__"))


def only_makes_state(optimizer: Optimizer) -> bool:
    """Returns whether a step of a plain optimizer, which is called as ``step(closure=None)``, would only make its state.

    ``torch.distributed.checkpoint`` makes such a call on an optimizer without state that it saves or loads, with learning
    rates and gradients of zero. It is not a training step, and other ranks may not make it, so it must not exchange anything.
    """
    if optimizer.state:
        return False
    if any(float(group.get("lr", 1)) != 0 for group in optimizer.param_groups):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return len(gradients) > 0 and all(each is not None and not each.any() for each in gradients)


def names(models: Iterable[Module]) -> dict[Tensor, str]:
    """Returns the name of each parameter of models; the first one for shared parameters.

    Raises:
        ValueError: Two different parameters have the same name.
    """
    name_of: dict[Tensor, str] = {}
    parameter_of: dict[str, Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter_of.setdefault(name, parameter) is not parameter:
                raise ValueError(
                    f"model must have one name for each parameter, got {name!r} in several models"
                )
            name_of.setdefault(parameter, name)
    return name_of


def check_ownership(optimizer: Optimizer, held: Collection[Tensor]) -> None:
    """Raises ValueError for a parameter of the optimizer that no model has."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in held:
                raise ValueError(
                    f"optimizer must hold parameters of the model only, got parameter {place} of group "
                    f"{number}, of shape {tuple(parameter.shape)}, which model.named_parameters() lacks"
                )


@torch.no_grad()
def _unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divides an optimizer's gradients by a gradient scaler's scale, which stays on its device."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    # The arithmetic of torch's scaler, without waiting for the device.
    inverse = scale.double().reciprocal().float()
    of_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        of_device.setdefault(gradient.device, []).append(values)
    for device, values in of_device.items():
        torch._foreach_mul_(values, inverse.to(device, non_blocking=device.type != "cpu"))
