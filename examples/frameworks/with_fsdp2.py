"""FSDP2 on fog: groups of ranks that share a model and gossip with each other, and HSDP.

    torchrun --nproc_per_node=4 examples/frameworks/with_fsdp2.py --how gossip
    torchrun --nproc_per_node=4 examples/frameworks/with_fsdp2.py --how hsdp

Two ranks share one model. With "hsdp" all ranks average gradients, so that all groups have the same model. With
"gossip" each group has its own one, and averages parameters with its neighbors: each rank exchanges its part only.
"""

from __future__ import annotations

import fogdist
from problem import BATCH, EPOCHS, loss_of, make_net, make_rows, make_sgd, read_how, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

SHARDS = 2


def main() -> None:
    how = read_how("FSDP2 on fog.", "gossip", "hsdp")
    fogdist.init()
    mesh = init_device_mesh("cpu", (fogdist.size() // SHARDS, SHARDS), mesh_dim_names=("groups", "shards"))
    groups = mesh["groups"].get_group()
    model = make_net()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh["shards"] if how == "gossip" else mesh)
    optimizer = make_sgd(model)
    if how == "gossip":
        optimizer = fogdist.DecentralizedOptimizer(optimizer, model, group=groups)
    rows = make_rows()
    loader = DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows, shuffle=False))
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
    report(model, group=groups)


if __name__ == "__main__":
    main()
