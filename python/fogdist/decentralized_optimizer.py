"""The optimizer that a script begins with: `DecentralizedOptimizer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Adam, Optimizer

from fogdist.algorithms.decentralized_adamw import DecentralizedAdamW, refusal_of
from fogdist.algorithms.decentralized_sgd import DecentralizedSGD, Order
from fogdist.compression import Codec
from fogdist.context import current
from fogdist.lazy import nx
from fogdist.shards import is_sharded
from fogdist.topology import Topology
from fogdist.training.algorithm import AlgorithmOptions
from fogdist.training.continuing import OnLoss
from fogdist.training.mixing import Mixing, Neighbors, as_mixing
from fogdist.training.view import Models
from fogdist.tuning.tuner import Tune, TunedMixing, Tuner, checked, start_of


def DecentralizedOptimizer(
    optimizer: Optimizer,
    model: Models,
    *,
    topology: Mixing | Topology | Sequence[nx.DiGraph] | nx.DiGraph | str | None = None,
    order: Order | None = None,
    local_steps: int = 1,
    compression: Codec | None = None,
    patience: float | None = None,
    on_loss: OnLoss = "raise",
    broadcast: bool = True,
    group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    by_samples: bool = False,
    tune: bool | Tune = False,
) -> DecentralizedSGD | DecentralizedAdamW:
    """Returns an optimizer whose steps also average the parameters with those of the rank's neighbors. Collective.

    All ranks begin with the parameters and buffers of rank 0. With an Adam or AdamW the ranks average its moments too, which
    `fogdist.algorithms.DecentralizedAdamW` explains: it trains better than averages of parameters alone, and sends three
    times the bytes. All other optimizers run adapt with combine, whose exchange is hidden behind the forward and the
    backward pass: `fogdist.algorithms.DecentralizedSGD`.

    Args:
        optimizer: Any torch optimizer but LBFGS.
        model: The model, or a list of models, that hold its parameters.
        topology: Who averages with whom, the same on all ranks: a name that `fog topology` lists, such as "ring" or
            "one-peer-exp2"; a `fogdist.topology.Topology`, whose rounds are used one after the other; a `networkx.DiGraph` with
            its weights, or a sequence of them, one a round; or a `fogdist.algorithms.Mixing`, such as `Machines()`. None for
            the group's topology, by default the exponential graph.
        order: "awc" (adapt with combine), "atc" (adapt then combine) or "cta" (combine then adapt) for averages of the
            parameters alone. None for the choice above.
        local_steps: J: ranks communicate in every J-th call of `step`.
        compression: A codec of `fogdist.compression` for the messages. An Adam then averages parameters alone.
        patience: How long ranks wait for a late neighbor, as in `fogdist.algorithms.DecentralizedSGD`; None for as long as it
            takes. An Adam then averages parameters alone.
        on_loss: What a step does if a rank is lost: "raise", or "continue" with the ranks that are left.
        broadcast: Whether all ranks begin with the parameters and buffers of rank 0.
        group: The group of ranks; by default that of `init`. For a sharded model that of the mesh's dimension over which
            replicas gossip: docs/howto/sharded_models.md.
        bucket_cap_mb: Size of a message in MiB. None for 4 on the CPU and 25 on other devices.
        by_samples: Whether ranks weigh in an average by the samples that they have used since the last one: the script sets
            ``optimizer.samples = len(batch)`` before each step. `topology` must then be symmetric, as "ring" is.
        tune: True, or the bounds, to move topology, local steps and codec to what links and compute allow while it trains:
            `fogdist.Tune` and docs/slow_links.md. `local_steps` is then where it begins, and a `topology` is kept. The
            attribute `tuning` has the setting and its history. For parameters on the CPU that are no DTensors.

    Returns:
        A view of the optimizer, and an instance of its class: learning-rate schedulers, gradient scalers and `state_dict`
        work as before. `no_sync` is a block for the passes of an accumulated batch, `average` gives all ranks one model at the
        end, `close` ends it.

    Raises:
        TypeError: An argument has a wrong type; a parameter is not a dense tensor.
        ValueError: As `fogdist.algorithms.Algorithm`; `order` is none of the three; `compression` is given beside a mixing;
            `tune` has bounds that exclude the other arguments, or codecs that the algorithm does not take.
        RuntimeError: As `fogdist.algorithms.Algorithm`.

    Example:
        >>> optimizer = fogdist.DecentralizedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    """
    options: AlgorithmOptions = {
        "topology": topology,
        "local_steps": local_steps,
        "compression": compression,
        "on_loss": on_loss,
        "broadcast": broadcast,
        "group": group,
        "bucket_cap_mb": bucket_cap_mb,
        "by_samples": by_samples,
    }
    averages_moments = order is None and compression is None and patience is None
    kind: type[DecentralizedSGD | DecentralizedAdamW] = DecentralizedSGD
    if averages_moments and isinstance(optimizer, Adam) and not refusal_of(optimizer):
        kind = DecentralizedAdamW
    more: dict[str, Any] = (
        {} if kind is DecentralizedAdamW else {"order": order or "awc", "patience": patience}
    )
    if tune is False:
        return kind(optimizer, model, **more, **options)
    if by_samples:
        raise ValueError("by_samples must be False with tune, which gives all ranks the same local_steps")
    if any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "tune must be False for DTensors: the ranks of each shard would choose for themselves"
        )
    bounds = checked(tune, kind, compression, local_steps, patience)
    context = current(group)
    given = as_mixing(topology, context) if topology is not None else None
    if given is not None and (type(given) is not Neighbors or given.topology is None or given.compression):
        raise ValueError(f"topology must be a topology, a graph or None with tune, got {given!r}")
    kept = None if given is None else given.topology
    options["topology"] = mixing = TunedMixing(start_of(kept, context.size))
    made = kind(optimizer, model, **more, **options)
    hides = 1.0 if kind is DecentralizedSGD and more["order"] == "awc" else 0.0
    made.tuning = Tuner(made, mixing, bounds, hides=hides, topology=kept)
    return made
