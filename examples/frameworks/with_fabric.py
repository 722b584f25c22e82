"""Lightning Fabric on fog: with DDP, with DDP whose ranks gossip, with a fogdist optimizer.

torchrun --nproc_per_node=2 examples/frameworks/with_fabric.py --how ddp
torchrun --nproc_per_node=2 examples/frameworks/with_fabric.py --how gossip
torchrun --nproc_per_node=2 examples/frameworks/with_fabric.py --how optimizer
"""

from __future__ import annotations

import fogdist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from problem import EPOCHS, loss_of, make_loader, make_net, make_sgd, read_how, report
from torch import nn


class GossipStrategy(DDPStrategy):
    """DDP that averages parameters with the neighbors in place of gradients with all ranks."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        model = super().setup_module(module)
        model.register_comm_hook(fogdist.GossipState(), fogdist.gossip_hook)
        return model


class UnwrappedStrategy(DDPStrategy):
    """Ranks and data as with DDP, but the model is not wrapped: the optimizer communicates."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module


def main() -> None:
    how = read_how("Fabric on fog.", "ddp", "gossip", "optimizer")
    kind = {"ddp": DDPStrategy, "gossip": GossipStrategy, "optimizer": UnwrappedStrategy}[how]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=kind(process_group_backend="fog"))
    fabric.launch()
    fogdist.init()  # adopts the group that Fabric has made
    net = make_net()
    optimizer = make_sgd(net)
    if how == "optimizer":
        optimizer = fogdist.DecentralizedOptimizer(optimizer, net)
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(make_loader())
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, inputs, targets))
            optimizer.step()
    report(net)


if __name__ == "__main__":
    main()
