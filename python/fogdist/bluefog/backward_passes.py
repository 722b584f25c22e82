"""The number of backward passes.

An exchange every J passes covers gradient accumulation (J backward passes, then one step) as well as local steps (a
backward pass and a step, J times).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class BackwardPasses:
    """Counts backward passes by hooks on the parameters' gradients.

    A pass counts once, regardless of the number of parameters that it reaches. A step() counts as a pass even without
    gradients on this rank, so that a rank without data for one step still takes part in the exchange.

    Args:
        on_gradient: A bound method, called with each parameter whose gradient was accumulated, after counting
            it. Its object is not kept alive.
    """

    def __init__(self, on_gradient: Callable[[Tensor], None]) -> None:
        self._until_last_step = 0
        self._since_last_step: dict[Tensor, int] = {}
        self._is_paused = False
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._lock = threading.RLock()  # autograd runs one thread per device
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._hooked: dict[Tensor, int] = {}  # the address of the contents when the hook was set
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Also counts the gradients of `parameters`, except those that it counts already."""
        for parameter in parameters:
            if parameter not in self._hooks:
                self._hooks[parameter] = _hook(parameter, self)
            elif self._hooked[parameter] != parameter._cdata:
                # `torch.utils.swap_tensors` keeps the list of hooks, but torch does not call them any more.
                parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
            self._hooked[parameter] = parameter._cdata

    def passes_of(self, parameter: Tensor) -> int:
        """Returns the passes since the last communication. Since the last step, only this parameter's passes count."""
        return self._until_last_step + self._since_last_step.get(parameter, 0)

    @property
    def passes_of_step(self) -> int:
        """The number of passes since the last communication if step() is called now."""
        return self._until_last_step + max(1, max(self._since_last_step.values(), default=0))

    def count_step(self) -> int:
        """Counts a step() and returns the number of passes since the last communication."""
        self._until_last_step = self.passes_of_step
        self._since_last_step.clear()
        return self._until_last_step

    def reset(self) -> None:
        """Sets the number of passes to 0 after a communication."""
        self._until_last_step = 0
        self._since_last_step.clear()

    def stop(self) -> None:
        """Removes the hooks from the parameters and stops counting."""
        _remove(self._hooks)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops counting within a block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def count(self, parameter: Tensor) -> None:
        """Counts one gradient; called by the parameters' hooks."""
        on_gradient = self._on_gradient()
        if self._is_paused or on_gradient is None:
            return
        with self._lock:
            self._since_last_step[parameter] = self._since_last_step.get(parameter, 0) + 1
            on_gradient(parameter)


def _hook(parameter: Tensor, counter: BackwardPasses) -> RemovableHandle:
    # The parameter may outlive its optimizer, so its hook must not keep the optimizer alive.
    reference = weakref.ref(counter)

    def count(accumulated: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.count(accumulated)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    return handle


def _remove(hooks: dict[Tensor, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()
