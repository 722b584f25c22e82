"""`DecentralizedDataParallel`: a module whose parameters mix with the neighbors' at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fogdist.agreement import check_same_everywhere
from fogdist.compression import Codec
from fogdist.context import current
from fogdist.ddp.drivers import AtOwnPace, InStep
from fogdist.shards import is_sharded
from fogdist.topology.validation import check_choice, check_int
from fogdist.training.continuing import OnLoss
from fogdist.training.mixing import Plans, TopologyLike, rounds_of
from fogdist.training.pace import MAX_STALENESS

if TYPE_CHECKING:
    from typing_extensions import Self

Mode: TypeAlias = Literal["sync", "async"]


class DecentralizedDataParallel(nn.Module):
    """A module whose parameters mix with the neighbors' parameters at each step.

    Use it like the module itself; the training loop stays as it is::

        model = fogdist.DecentralizedDataParallel(model, optimizer)
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()          # the user's own, which now also mixes
        model.average()

    Both modes are adapt-with-combine: ``x+ = Mix(x) - step(grad f(x))``, where the gradient is that of the old
    parameters. With mode "sync" all ranks make their steps together: the exchange of round t starts with the training
    forward pass (called as a function, gradients enabled, outside of ``torch.func``), runs during forward and backward,
    and the step waits for it. With "async" each rank goes at its own pace: a step mixes with the values that the
    neighbors put last, makes the optimizer's step and puts the result; see `staleness`. In between, with `patience` ranks of
    mode "sync" wait for each other, but not for late ones. (Sync: the scheme of Decent-DP,
    Wang et al., ICLR 2025, arXiv 2410.11998. Async: in the manner of AD-PSGD, Lian et al., ICML 2018, arXiv 1710.06952,
    with one-sided windows.)

    In mode "sync" each step is one exchange, and all ranks must make the same number of steps. A step without a forward
    pass exchanges at once. Forward passes and steps in `no_sync` do not exchange: put it around all but the last part of
    an accumulated gradient, or around whole iterations for local steps. If a GradScaler would skip a step on some rank,
    the scaler still calls it, and that rank's parameters become ``Mix(x)``; so the other ranks are not delayed. A
    training loop that skips a step after a forward pass must call `synchronize` in its place. Otherwise the next forward
    pass counts as one more part of the same step, and the neighbors wait, until the group's timeout. In mode "async" a
    skipped step is no iteration.

    The module stays an ordinary module, whose parameters keep their own memory: what is exchanged is a copy
    (`FlatBuckets`). So the optimizer, schedulers, clipping, GradScaler and closures work as before. In mode "sync"
    parameters must not be changed between forward pass and step, and a warning is issued if they are, because the mix
    replaces them. (If the forward pass itself changes them, by an embedding's `max_norm`, the exchange starts at its
    end.) Frozen parameters, and those that the optimizer does not hold, are not exchanged. Buffers stay each rank's own until
    `average`.

    As with torch's DistributedDataParallel, names in the wrapper begin with ``module.``, and `module` is the module, whose
    `state_dict` to save, and which is what to copy (``copy.deepcopy``, averaged models) and compile, before it is wrapped:
    ``module = torch.compile(module)``. The step that ``torch.distributed.checkpoint.state_dict`` makes on an optimizer
    without state, to save or load it, exchanges nothing. With one rank it is only the module. A fogdist optimizer or wrapper that
    is made of the same parameters later takes over, as with `fogdist.algorithms.Algorithm`.

    Args:
        module: The same on all ranks up to values, its parameters on devices of the same types.
        optimizer: A torch optimizer of the module's parameters that evaluates its closure once a step; or a
            function that makes one, given the list of the trained parameters.
        topology: As in `fogdist.DecentralizedOptimizer`, but no mixing. By default the group's topology: in mode "sync"
            that of each step (`fogdist.set_topology`), in "async" that of now.
        mode: "sync" or "async".
        group: As in `fogdist.algorithms.Algorithm`.
        bucket_cap_mb: As in `fogdist.algorithms.Algorithm`.
        broadcast: As in `fogdist.algorithms.Algorithm`.
        patience: For "sync": as in `fogdist.algorithms.DecentralizedSGD`; not with DTensors. Ranks may then have made
            different numbers of steps.
        max_staleness: For "async": as in `fogdist.algorithms.WinPut`.
        skip_lost: For "async": as in `fogdist.algorithms.WinPut`. By default a step raises, naming the rank.
        on_loss: As in `fogdist.algorithms.Algorithm`. In mode "async", a rank goes on without lost neighbors at once, and all
            ranks change to what is left of the topology when it would fall apart.
        compression: For "sync": a codec of `fogdist.compression`, as in `fogdist.algorithms.Neighbors`; not with `patience`.

    Attributes:
        module: The module.
        optimizer: The optimizer.
        round: The topology's round of the next exchange, in mode "async" of this rank's next iteration. It is
            part of no state dict: save it beside, and set it, on all ranks alike, before training goes on.
            Always 0 with one rank.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: As `fogdist.algorithms.Algorithm`; the module has nothing to train; options that do not go with the mode.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if a rank does not come. In
            training: if an exchange fails.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
        topology: TopologyLike = None,
        mode: Mode = "sync",
        *,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        broadcast: bool = True,
        patience: float | None = None,
        max_staleness: int | None = MAX_STALENESS,
        skip_lost: bool = False,
        on_loss: OnLoss = "raise",
        compression: Codec | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        check_choice(mode, "mode", Mode)
        of_async = {
            "max_staleness": max_staleness != MAX_STALENESS,
            "skip_lost": skip_lost,
        }
        of_sync = {"patience": patience is not None, "compression": compression is not None}
        of_others = of_async if mode == "sync" else of_sync
        if any(of_others.values()):
            given = ", ".join(name for name, is_given in of_others.items() if is_given)
            raise ValueError(f"{given} must not be given in mode {mode!r}: it is for the other mode")
        self._context = current(group)
        self._mode = mode
        self.module = module
        rounds = self._plans_of(topology)
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        sharded = [name for name, parameter in trained.items() if is_sharded(parameter)]
        if sharded and (mode == "async" or patience is not None):
            how = "in mode 'async'" if mode == "async" else "with patience"
            raise TypeError(
                f"module must have ordinary parameters {how}, got the DTensor {sharded[0]!r}; mode 'sync' without "
                "patience and fogdist.algorithms take these"
            )
        if not trained:
            raise ValueError("module must have parameters that require gradients, got none")
        if not isinstance(optimizer, Optimizer) and not callable(optimizer):
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer or a function that makes one, got "
                f"{type(optimizer).__name__}"
            )
        self.optimizer = optimizer if isinstance(optimizer, Optimizer) else optimizer(list(trained.values()))
        self._is_alone = self._context.is_alone
        self._driver: InStep | AtOwnPace | None = None  # with several ranks, until `close`
        if self._is_alone:
            return
        options: dict[str, Any] = {
            "topology": rounds.topology,
            "group": group,
            "bucket_cap_mb": bucket_cap_mb,
            "on_loss": on_loss,
            "broadcast": broadcast,
        }
        if mode == "sync":
            options |= {"patience": patience, "compression": compression}
            self._driver = InStep(self.optimizer, module, **options)
        else:
            self._driver = AtOwnPace(self.optimizer, module, max_staleness=max_staleness, **options)
            self._driver.skip_lost = skip_lost

    @property
    def round(self) -> int:
        """The topology's round of the next exchange; see the class."""
        driver = self._driver
        return 0 if driver is None else driver.rounds + driver.is_in_round

    @round.setter
    def round(self, value: int) -> None:
        check_int(value, "round", minimum=0)
        if self._driver is None:
            return
        if self._driver.is_in_round:
            raise RuntimeError("round must be set before a forward pass, got it with an exchange in flight")
        self._driver.set_round(value)

    # --- training ---

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict of a wrapper; as `torch.nn.Module.load_state_dict`.

        Raises:
            RuntimeError: It is one of the module, so load it into `module`; and as of torch's.
        """
        if state_dict and not any(name.startswith("module.") for name in state_dict):
            raise RuntimeError(
                "state_dict must have names that begin with 'module.', as that of a wrapper, got "
                f"{next(iter(state_dict))!r}; load a state dict of the module by wrapper.module.load_state_dict"
            )
        return super().load_state_dict(state_dict, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; raises RuntimeError if another optimizer or wrapper has taken over, and as the class."""
        if self._driver is not None:
            self._driver._fog_check_not_replaced()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disables the exchanges of forward passes and steps in a block, for gradient accumulation or local steps."""
        with nullcontext() if self._driver is None else self._driver.no_sync():
            yield

    def set_topology(self, topology: TopologyLike) -> None:
        """Mixes along another topology from the next exchange on, which is its round 0. Collective.

        Call it between the same two steps on all ranks; in mode "async" at any step of each.

        Args:
            topology: As in the constructor.

        Raises:
            TypeError: As the constructor.
            ValueError: As the constructor; ranks were given different ones (on all ranks alike).
            RuntimeError: After `close`; torch.distributed.DistBackendError if a rank does not come.
        """
        rounds = self._plans_of(topology)
        if self._is_alone:
            return
        driver = self._opened("set_topology")
        check_same_everywhere(driver.context.backend, "topology", rounds.items())
        driver.follow(rounds)

    @torch.no_grad()
    def average(self, buffers: bool = True) -> None:
        """Gives the models of all ranks the mean of their trained parameters and floating-point buffers. Collective.

        In mode "sync", if some rank has begun an exchange by a training forward pass without a step, all ranks complete
        this exchange first. In mode "async" a rank that waits here for others is paused for its neighbors, see `pause`.
        With `patience` too all ranks wait for a late one here, up to the group's timeout: its values belong to the average.

        Args:
            buffers: False to leave buffers as each rank has them.

        Raises:
            RuntimeError: After `close`; torch.distributed.DistBackendError if a rank does not come.
        """
        if not self._is_alone:
            self._opened("average").average(buffers)

    def synchronize(self) -> None:
        """Mixes without a step, for a training loop that skips `step` after a training forward pass.

        It does nothing in mode "async", or if there was no such pass since the last step.
        """
        if isinstance(self._driver, InStep):
            self._driver.synchronize()

    def pause(self) -> None:
        """Tells the neighbors to continue without this rank until its next step; for mode "async".

        The neighbors no longer use its values and do not wait for it (`max_staleness`). Call it where a rank ends early
        or stops to validate; its process may even end then. `average` calls it by itself. Not collective.
        """
        if isinstance(self._driver, AtOwnPace):
            self._driver.pause()

    def staleness(self) -> dict[int, int | None]:
        """Returns how old the values are that this rank would mix with now, for each in-neighbor.

        The staleness is the number of iterations that this rank has made, less the number that the neighbor had made
        when it put the last values that have arrived. It is negative if the neighbor is ahead, and None if no values
        have arrived yet or the neighbor is paused or lost. Values that arrive during the call may be newer than the
        result says. The dict is empty in mode "sync", where no values are stale.
        """
        return self._driver.staleness() if isinstance(self._driver, AtOwnPace) else {}

    def late_neighbors(self) -> list[int]:
        """Returns the in-neighbors that were left out of the last exchange; none without `patience`."""
        return self._driver.late_neighbors() if isinstance(self._driver, InStep) else []

    def close(self) -> None:
        """Ends mixing: module and optimizer continue alone.

        Collective among neighbors in mode "async", and among all ranks that are left with ``on_loss="continue"``.
        A program need not call it at its end.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.__exit__(kind, error, traceback)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a DecentralizedDataParallel cannot be copied or pickled; copy its attribute `module`"
        )

    # --- inside ---

    def _plans_of(self, topology: TopologyLike) -> Plans:
        rounds = Plans(topology, self._context)
        if self._mode == "async":
            rounds.topology = rounds_of(rounds.topology, self._context, "in mode 'async'")
        return rounds

    def _opened(self, method: str) -> InStep | AtOwnPace:
        if self._driver is None:
            raise RuntimeError(f"{method}() was called after close()")
        return self._driver
