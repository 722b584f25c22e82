"""`bluefog.torch.ddp` of asyncddp: a wrapper that makes the steps itself, and batches for ranks at their own pace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

import fogdist

OPTIM_FN_TYPE = Callable[[list[tuple[str, Tensor]]], Optimizer]
LR_SCHEDULER_FN_TYPE = Callable[[Optimizer], LRScheduler]


class DecentralizedDataParallel(fogdist.DecentralizedDataParallel):
    """`fogdist.DecentralizedDataParallel` that makes a step at the end of each backward pass. ::

        model = DecentralizedDataParallel(model, optim_fn_adam, topology=graph)
        for x, y in batches:
            loss(model(x), y).backward()
        model.global_avg()

    ``x+ = Mix(x) - step(grad f(x))``, with the neighbors' parameters of the same iteration (`sync`) or with those
    that they put last. A step clips, updates, resets the gradients and advances the scheduler, in both modes.
    Parameters that a backward pass does not reach are left as they are. `param_as_bucket_view` and
    `_local_world_size` are not used.

    Args:
        optim_fn: Given pairs of name and parameter, makes the optimizer.
        lr_scheduler_fn: Given the optimizer, makes its scheduler, which goes on once a step.
        topology: As there, or ``{"topology": graph, "name": ...}``. Weights are used once: those of the edges that
            come in must sum to 1 with the rank's own.
        sync: True for mode "sync" of there, False for "async".
        scaler: A gradient scaler, with which the script scales its losses; it is updated here.
        grad_clip_norm: The 2-norm that all gradients together are clipped to; 0 for no clipping.
        sync_buffer_in_global_avg: Whether `global_avg` averages buffers of floating-point dtypes too.
    """

    def __init__(
        self,
        model: nn.Module,
        optim_fn: OPTIM_FN_TYPE,
        lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None = None,
        topology: Any = None,
        sync: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        grad_clip_norm: float = 0.0,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        bucket_size_in_mb: float = 25,
        _local_world_size: int | None = None,
    ) -> None:
        for argument, given in (("optim_fn", optim_fn), ("lr_scheduler_fn", lr_scheduler_fn)):
            if not callable(given) and (given is not None or argument == "optim_fn"):
                raise TypeError(f"{argument} must be callable, got {type(given).__name__}")
        if not grad_clip_norm >= 0:
            raise ValueError(f"grad_clip_norm must be at least 0, got {grad_clip_norm}")
        names = {p: name for name, p in model.named_parameters()} if isinstance(model, nn.Module) else {}
        super().__init__(
            model,
            lambda parameters: optim_fn([(names[p], p) for p in parameters]),
            _graph(topology),
            "sync" if sync else "async",
            bucket_cap_mb=bucket_size_in_mb,
        )
        scheduler = None if lr_scheduler_fn is None else lr_scheduler_fn(self.optimizer)
        self.sync = sync
        self._averages_all_buffers = sync_buffer_in_global_avg
        self._accumulation = ExitStack()
        self._step_of_backward = _StepOfBackward(self.optimizer, scheduler, scaler, grad_clip_norm)
        trained = [p for p in model.parameters() if p.requires_grad]
        after_gradient = self._step_of_backward.after_gradient
        hooks = [p.register_post_accumulate_grad_hook(after_gradient) for p in trained]  # type: ignore[no-untyped-call]
        # The model may outlive the wrapper, so the hooks must go with it.
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks]).atexit = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        self._step_of_backward.is_queued = False  # reset after a backward pass that raised
        return super().forward(*args, **kwargs)

    # The attributes of asyncddp that scripts have read.
    _model = property(lambda self: self.module)
    _optims = property(lambda self: [self.optimizer])

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As there; the names may begin with "_model.", as asyncddp saved them."""
        named = {f"module.{name.split('.', 1)[1]}": value for name, value in state_dict.items()}
        return super().load_state_dict(named, strict, assign)

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """With True backward passes only add to the gradients. Turn it off before the last forward pass of a step."""
        self._accumulation.close()
        if enable:
            self._accumulation.enter_context(self.no_sync())
        self._step_of_backward.is_accumulating = enable

    def set_topology(self, topology: Any) -> None:
        """Mixes along another topology from now on; collective. As there, or ``{"topology": graph, "name": ...}``."""
        super().set_topology(_graph(topology))

    def global_avg(self) -> None:
        """Overwrites the trained parameters, and buffers if asked for, with their average over all ranks. Collective."""
        self.average(buffers=self._averages_all_buffers)


class LocalStepRandomBatchSampler(Sampler[list[int]]):
    """Batches of indices of the whole dataset, in an order of each rank's own, round after round.

    A round is a permutation, drawn with the seed ``base_seed + 10000 * rank + round``. Iterating goes on in the round in which
    it was left, so how often a `DataLoader` starts anew does not matter, nor how many steps other ranks have made. With
    `drop_last` a last batch of a round that is smaller is left out. `local_step` counts the batches that it has given.
    """

    def __init__(
        self, dataset: Sized, batch_size: int, base_seed: int, rank: int = 0, drop_last: bool = False
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.local_step = 0
        self._size, self._batch_size, self._seed = len(dataset), batch_size, base_seed + 10000 * rank
        self._batches = self._size // batch_size if drop_last else -(-self._size // batch_size)
        if self._batches == 0:
            raise ValueError(f"dataset must have a batch of {batch_size} samples, got {self._size}")

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        round_, first = divmod(self.local_step, self._batches)
        generator = torch.Generator().manual_seed(self._seed + round_)
        order = torch.randperm(self._size, generator=generator).tolist()
        for batch in range(first, self._batches):
            self.local_step += 1
            yield order[batch * self._batch_size : (batch + 1) * self._batch_size]


@dataclass
class _StepOfBackward:
    """The step at the end of a backward pass, however many parameters got a gradient in it."""

    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler | None
    max_norm: float
    is_accumulating: bool = False
    is_queued: bool = False

    def after_gradient(self, _: Tensor) -> None:
        if not (self.is_queued or self.is_accumulating):
            self.is_queued = True
            # torch's own data-parallel modules use the same callback for the end of a backward pass.
            torch.autograd.Variable._execution_engine.queue_callback(self._step)

    def _step(self) -> None:
        self.is_queued = False
        optimizer, scaler = self.optimizer, self.scaler
        if self.max_norm > 0:
            if scaler is not None:
                scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()


def _graph(topology: Any) -> Any:
    is_named = isinstance(topology, Mapping) and not isinstance(topology, nx.Graph)
    return topology["topology"] if is_named else topology
