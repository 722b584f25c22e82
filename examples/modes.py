"""The ways to train together that the training examples offer as --mode, behind one interface.

A mode takes a model and a function that makes its optimizer, and gives everything that a training loop needs: a module to
call, an optimizer to step, and functions to call before each iteration and after the last one. Everything else,
the loop above all, is the same in all modes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import fogdist
import torch.distributed as dist
from fogdist import algorithms
from fogdist.topology import Topology
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

OptimizerFunction = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Setup:
    """The ingredients of a mode.

    Attributes:
        model: On each rank the same model, up to values.
        make_optimizer: Returns the optimizer of one rank by itself.
        sequence: The graphs of the iterations in turn; None for the group's topology in all of them.
        local_steps: Of the modes that have local steps: ranks communicate in every so many-th one.
        group: For `ddp`; by default the default group.
    """

    model: nn.Module
    make_optimizer: OptimizerFunction
    sequence: Topology | None = None
    local_steps: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Trainer:
    """The objects that a training loop calls.

    Attributes:
        module: Called as a function; its parameters are those of the model.
        optimizer: Stepped after the backward pass; an instance of the class that it was made of.
        prepare: Called before iteration t.
        finish: Called after the last iteration, by all ranks: leaves one model, the average, on all of them.
    """

    module: nn.Module
    optimizer: Optimizer
    prepare: Callable[[int], None] = lambda t: None
    finish: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Mode:
    """An entry of MODES.

    Attributes:
        make: Makes its trainer; collective.
        summary: A few words.
        is_asynchronous: Whether ranks go at their own pace.
        follows_topology: Whether it averages with neighbors.
        can_be_dynamic: Whether it takes one graph an iteration.
        topology: A suitable one of fogdist.topology.TOPOLOGY_NAMES.
        local_steps: A suitable number; None if it has none.
        takes_adamw_only: Whether it is a form of AdamW.
    """

    make: Callable[[Setup], Trainer]
    summary: str
    is_asynchronous: bool = False
    follows_topology: bool = True
    can_be_dynamic: bool = True
    topology: str = "exp2"
    local_steps: int | None = None
    takes_adamw_only: bool = False


def average(model: nn.Module) -> None:
    """Replaces the parameters and buffers of a model by their averages over all ranks. Collective."""
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fogdist.allreduce_parameters({name: t for name, t in named.items() if t.is_floating_point()})


def _alone(setup: Setup) -> Trainer:
    return Trainer(setup.model, setup.make_optimizer(setup.model.parameters()))


def _ddp(setup: Setup) -> Trainer:
    module = DistributedDataParallel(setup.model, process_group=setup.group)
    return Trainer(module, setup.make_optimizer(setup.model.parameters()))


def _ddp_with_gossip(setup: Setup) -> Trainer:
    # Else all ranks wait for rank 0 in each forward pass. Torch 2.13 gave the argument another name.
    names = inspect.signature(DistributedDataParallel).parameters
    argument = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    # Small buckets hide behind the backward pass, and gradients that are views of them are not copied.
    options: dict[str, Any] = {argument: False, "bucket_cap_mb": 4, "gradient_as_bucket_view": True}
    module = DistributedDataParallel(setup.model, process_group=setup.group, **options)
    module.register_comm_hook(fogdist.GossipState(setup.sequence), fogdist.gossip_hook)
    optimizer = setup.make_optimizer(setup.model.parameters())
    return Trainer(module, optimizer, finish=lambda: average(setup.model))


def _wrapper(mode: Any) -> Callable[[Setup], Trainer]:
    def make(setup: Setup) -> Trainer:
        module = fogdist.DecentralizedDataParallel(setup.model, setup.make_optimizer, setup.sequence, mode)
        return Trainer(module, module.optimizer, finish=lambda: module.average(buffers=True))

    return make


def _win_put(setup: Setup) -> Trainer:
    """The optimizer over windows, which takes the graph of an iteration by an attribute."""
    optimizer = algorithms.WinPut(setup.make_optimizer(setup.model.parameters()), setup.model)

    def prepare(t: int) -> None:
        if setup.sequence is not None and fogdist.size() > 1:
            optimizer.dst_weights = setup.sequence.peers(fogdist.rank(), t)["dst_weights"]

    def finish() -> None:
        optimizer.close()
        average(setup.model)

    return Trainer(setup.model, optimizer, prepare, finish)


def _algorithm(
    make_algorithm: Callable[..., Any],
    *,
    has_mixing: bool = True,
    has_local_steps: bool = False,
    **options: Any,
) -> Callable[[Setup], Trainer]:
    """A class of fogdist.algorithms."""

    def make(setup: Setup) -> Trainer:
        given = dict(options)
        if has_mixing and setup.sequence is not None:
            given["topology"] = setup.sequence
        if has_local_steps:
            given["local_steps"] = setup.local_steps
        optimizer = make_algorithm(setup.make_optimizer(setup.model.parameters()), setup.model, **given)

        def finish() -> None:
            optimizer.close()
            average(setup.model)

        return Trainer(setup.model, optimizer, finish=finish)

    return make


MODES: dict[str, Mode] = {
    "none": Mode(_alone, "no communication", follows_topology=False, can_be_dynamic=False),
    "ddp": Mode(_ddp, "torch's DistributedDataParallel", follows_topology=False, can_be_dynamic=False),
    "gossip_hook": Mode(_ddp_with_gossip, "torch's DistributedDataParallel with fogdist.gossip_hook"),
    "awc": Mode(
        _algorithm(algorithms.DecentralizedSGD, order="awc"), "adapt with combine, hidden behind the passes"
    ),
    "atc": Mode(_algorithm(algorithms.DecentralizedSGD), "adapt then combine"),
    "win_put": Mode(_win_put, "puts to neighbors, optimizer", is_asynchronous=True),
    "push_sum": Mode(_algorithm(algorithms.PushSumSGD, order="awc"), "push-sum, hidden behind the passes"),
    "ddp_sync": Mode(_wrapper("sync"), "DecentralizedDataParallel"),
    "ddp_async": Mode(
        _wrapper("async"), "DecentralizedDataParallel, each rank at its own pace", is_asynchronous=True
    ),
    "decentralized_sgd": Mode(
        _algorithm(algorithms.DecentralizedSGD, has_local_steps=True),
        "decentralized SGD, adapt then combine",
        local_steps=1,
    ),
    "decentralized_adamw": Mode(
        _algorithm(algorithms.DecentralizedAdamW),
        "AdamW with averages of its moments too, for train_gpt.py",
        takes_adamw_only=True,
    ),
    "exact_diffusion": Mode(
        _algorithm(algorithms.ExactDiffusion), "exact diffusion", topology="ring", can_be_dynamic=False
    ),
    "gradient_tracking": Mode(_algorithm(algorithms.GradientTracking), "gradient tracking"),
    "push_sum_sgd": Mode(_algorithm(algorithms.PushSumSGD), "push-sum SGD, in step"),
    "asynchronous_gossip": Mode(
        _algorithm(algorithms.AsynchronousGossip, has_mixing=False),
        "gossip in the manner of AD-PSGD, each rank at its own pace",
        is_asynchronous=True,
        can_be_dynamic=False,
        topology="ring",
    ),
    "local_sgd": Mode(
        _algorithm(algorithms.LocalSGD, has_mixing=False, has_local_steps=True),
        "local SGD: local steps, then the exact average",
        follows_topology=False,
        can_be_dynamic=False,
        local_steps=8,
    ),
    "diloco": Mode(
        _algorithm(algorithms.DiLoCo, has_local_steps=True),
        "DiLoCo: local steps, outer Nesterov momentum",
        local_steps=16,
    ),
    "gasloc": Mode(
        _algorithm(algorithms.GASLoC, has_local_steps=True),
        "GASLoC: DiLoCo in random pairs",
        local_steps=16,
    ),
}
