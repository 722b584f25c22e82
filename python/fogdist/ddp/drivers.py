"""What `DecentralizedDataParallel` drives: algorithms around steps that the user's optimizer makes by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fogdist.algorithms.decentralized_sgd import DecentralizedSGD
from fogdist.algorithms.win_put import WinPut
from fogdist.compression import Codec
from fogdist.streams import wait_until_complete
from fogdist.training.algorithm import Algorithm
from fogdist.training.mixing import Neighbors, Plans
from fogdist.training.overlapping import When, forward_changes_parameters

# The attribute by which an optimizer asks a gradient scaler to leave unscaling to it.
_TAKES_SCALER = "_step_supports_amp_scaling"


class Driver(Algorithm):
    """Base of both. It takes the place of the `step` of the user's optimizer, which the script calls as before.

    Args:
        optimizer: The user's.
        module: The wrapped module.
        **options: As in `Algorithm`.
    """

    mode: ClassVar[str]
    compared: ClassVar[tuple[str, ...]] = ("mode",)
    mixes_after_overflow: ClassVar[bool] = True
    """Whether a gradient scaler calls `step` even if gradients overflowed, because neighbors wait for this rank."""

    is_in_round: bool
    # Where the module has parameters: part, attribute, tensor, name.
    _places: list[tuple[nn.Module, str, Tensor, str]]
    _plain_step: Callable[..., Any]
    _undo: Callable[[], object]

    def __init__(self, optimizer: Optimizer, module: nn.Module, **options: Any) -> None:
        self._places = [
            (part, key, tensor, f"{path}.{key}".lstrip("."))
            for path, part in module.named_modules()
            for key, tensor in part._parameters.items()
            if tensor is not None and tensor.requires_grad
        ]
        super().__init__(optimizer, module, **options)
        self._plain_step = optimizer.step
        self._undo = undo = weakref.finalize(self, self._take_place())
        undo.atexit = False

    @property
    def algorithm_name(self) -> str:
        """See `Algorithm.algorithm_name`."""
        return "DecentralizedDataParallel"

    @property
    def is_running(self) -> bool:
        """See `Algorithm.is_running`: within `no_sync` steps are local, unless an exchange has begun before."""
        return super().is_running and (self.is_syncing or self.is_in_round)

    def step(self, *arguments: Any, **options: Any) -> Any:
        """See `Algorithm.step`. A gradient scaler sets its attributes on the user's optimizer, and deletes them itself."""
        held = vars(self._fog_wrapped)
        marks = {name: held.pop(name) for name in self._scaler_marks if name in held}
        vars(self).update(marks)
        result = super().step(*arguments, **options)
        for name, value in marks.items():
            del vars(self)[name]
            held[name] = value
        return result

    def refresh(self) -> None:
        """See `Algorithm.refresh`. Raises RuntimeError for replaced parameters, which mixing would not reach."""
        for part, key, tensor, name in self._places:
            # Looking here takes a fraction of the time of getattr(part, key); a scripted module's has no `get`.
            if key not in part._parameters or part._parameters[key] is not tensor:
                raise RuntimeError(
                    f"{name!r} must stay the tensor that it was when the module was wrapped, got another "
                    "one. Change it in place, or wrap the module anew"
                )
        super().refresh()

    def set_round(self, value: int) -> None:
        """Sets the round of the next exchange."""
        self.rounds = value

    def _take_place(self) -> Callable[[], None]:
        """Makes the `step` of the user's optimizer, of this object only, that of this driver; returns what undoes it."""
        # The optimizer may outlive this driver, which it does not keep alive.
        reference, optimizer, plain = weakref.ref(self), self._fog_wrapped, self._plain_step
        own = vars(optimizer)
        before = {name: own[name] for name in ("step", _TAKES_SCALER) if name in own}

        @wraps(plain)
        def step(_: Optimizer, *arguments: Any, **options: Any) -> Any:
            driver = reference()
            if driver is None or driver._fog_ended:
                return plain(*arguments, **options)
            if hasattr(plain, "_wrapped_by_lr_sched"):
                # As a scheduler's wrapper of `step` does, which is not called if gradients overflow.
                own["_opt_called"] = True
            return driver.step(*arguments, **options)

        made = MethodType(step, optimizer)
        own["step"] = made
        if self.mixes_after_overflow:
            own[_TAKES_SCALER] = True

        def undo() -> None:
            own.pop(_TAKES_SCALER, None)
            if own.get("step") is made:  # else a scheduler has wrapped it
                del own["step"]
            own.update({name: value for name, value in before.items() if name != "step" or "step" not in own})

        return undo

    def _check_syncing(self) -> None:
        pass

    def _fog_own_step(self, **options: Any) -> Any:
        return self._plain_step(**options)

    def _fog_give_up(self) -> None:
        super()._fog_give_up()
        self._undo()


class InStep(Driver, DecentralizedSGD):
    """One exchange per iteration, which runs during forward and backward."""

    mode: ClassVar[str] = "sync"
    compared: ClassVar[tuple[str, ...]] = (*Driver.compared, *DecentralizedSGD.compared)

    _codec: Codec | None

    def __init__(self, optimizer: Optimizer, module: nn.Module, **options: Any) -> None:
        self._codec = options["compression"]
        super().__init__(optimizer, module, order="awc", **options)

    def is_joinable(self) -> bool:
        """See `Algorithm.is_joinable`: a backward pass needs the parameters that its forward pass has changed."""
        return super().is_joinable() and not forward_changes_parameters(self._fog_models[0])

    def synchronize(self) -> None:
        """Mixes in place of a step that would complete an exchange."""
        super().synchronize()
        self._saw_forward = False

    def set_round(self, value: int) -> None:
        """See `Driver.set_round`."""
        super().set_round(value)
        self._mixer.restart()

    @torch.no_grad()
    def settle(self) -> None:
        """Completes the exchange that this rank or only other ranks have begun, if any. Collective."""
        # Ranks of whom some were left out of rounds have begun different numbers of them, and each completes its own.
        most = begun = self.rounds + self.is_in_round
        if self.patience is None:
            # A rank that gives this up has learned of the others' exchanges by the agreement round already.
            most = self._fog_highest(begun, "begun")
        while self.is_in_round or self.rounds < most:
            self.complete_round()

    def follow(self, rounds: Plans) -> None:
        """Changes the topology; collective."""
        mixing = Neighbors(rounds.topology, compression=self._codec)
        # A patient mixer goes on by itself.
        self.mixing = self._fog_lasting(mixing) if self.patience is None else mixing
        self.rounds = -int(self.is_in_round)
        self._mixer.restart()

    def _fog_finish(self) -> None:
        if self.is_in_round:
            self._mixer.discard()
        self._mixer.close()


class AtOwnPace(Driver, WinPut):
    """`WinPut` whose values travel after each step, so that a neighbor gets them a pass earlier.

    A step mixes with the values that neighbors have put, makes the optimizer's step, and puts the result to the
    out-neighbors of its round.

    Args:
        optimizer: As in `Driver`.
        module: As in `Driver`.
        **options: As in `Driver` and `WinPut`.
    """

    mode: ClassVar[str] = "async"
    can_be_joined: ClassVar[bool] = True
    mixes_after_overflow: ClassVar[bool] = False

    def set_round(self, value: int) -> None:
        """See `Driver.set_round`."""
        super().set_round(value)
        if self._pace is not None:
            self._pace.advance(value)

    @property
    def overlaps(self) -> bool:
        """See `Algorithm.overlaps`. A step makes all of a round."""
        return False

    def watch_forward(self, when: When) -> None:
        """See `OverlappingAlgorithm.watch_forward`: passes begin nothing."""

    def refresh(self) -> None:
        """See `Algorithm.refresh`. The buckets do not change while they are sent."""
        self.discard()
        super().refresh()

    def advance(self) -> Any:
        """Mixes with the values that neighbors have put, waiting for those without news; makes the step, and puts the result."""
        if self._pace is not None and self._pace.is_paused:
            # The neighbors continued during the pause. They should not wait until this rank has caught up.
            self.rounds = self._pace.catch_up()
        self.finish()
        result = self.adapt()
        self.steps += 1
        self.rounds += 1
        self.buckets.load()
        self.begin()
        return result

    def destinations(self) -> list[tuple[int, float]]:
        """See `WinPut.destinations`: of the round that the step has completed."""
        return self._plans.plan(self.rounds - 1).destinations

    def settle(self) -> None:
        """Waits until the put values have left, and tells the neighbors to go on without this rank until its next step."""
        if self._pace is not None:
            self.discard()
            self._pace.pause()

    pause = settle

    @torch.no_grad()
    def average(self, buffers: bool = True) -> None:
        """See `Algorithm.average`. Then it puts to all out-neighbors, and sets all ranks' iterations to one number."""
        super().average(buffers)
        self._come_together()

    def staleness(self) -> dict[int, int | None]:
        """Returns, for each in-neighbor, how many iterations its last values are behind this rank's own."""
        neighbors = [] if self._pace is None else self._pace.in_neighbors
        puts = {rank: min(window.slot_p(rank) for window in self.windows) for rank in neighbors}
        return {
            rank: self.rounds - (int(put) - 1) if put > 0.0 and self._takes_part(rank) else None
            for rank, put in puts.items()
        }

    def follow(self, rounds: Plans) -> None:
        """Changes the topology; collective."""
        self._end()
        self._topology, self._closing = rounds.topology, None
        self.rounds = 0
        self._open()
        self._come_together()

    # --- inside ---

    def _fog_finish(self) -> None:
        self._end()

    def _come_together(self) -> None:
        """Puts to all out-neighbors, and sets all ranks' counts of iterations to one number. Collective."""
        self.rounds = self._fog_highest(self.rounds, "done")
        self.put_to_all()
        wait_until_complete(self._in_flight)
        self.discard()
        self._fog_highest(0, "all have put")
