"""Hugging Face accelerate on fog: with DDP, with DDP whose ranks gossip, with a fogdist optimizer.

    torchrun --nproc_per_node=2 examples/frameworks/with_accelerate.py --how ddp
    torchrun --nproc_per_node=2 examples/frameworks/with_accelerate.py --how gossip
    torchrun --nproc_per_node=2 examples/frameworks/with_accelerate.py --how optimizer

On CPUs accelerate takes Gloo or MPI whatever backend it is asked for, and then refuses the name. But it adopts a
process group that is there: so fogdist.init() comes first, and no backend is named.
"""

from __future__ import annotations

import fogdist
from accelerate import Accelerator
from problem import EPOCHS, loss_of, make_loader, make_net, make_sgd, read_how, report


def main() -> None:
    how = read_how("accelerate on fog.", "ddp", "gossip", "optimizer")
    fogdist.init()
    accelerator = Accelerator(cpu=True)
    net = make_net()
    optimizer = make_sgd(net)
    if how == "optimizer":
        optimizer = fogdist.DecentralizedOptimizer(optimizer, net)
        # The model is left out: prepare() would wrap it in DDP.
        model = net.to(accelerator.device)
        optimizer, loader = accelerator.prepare(optimizer, make_loader())
    else:
        model, optimizer, loader = accelerator.prepare(net, optimizer, make_loader())
    if how == "gossip":
        model.register_comm_hook(fogdist.GossipState(), fogdist.gossip_hook)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, inputs, targets))
            optimizer.step()
    report(net)


if __name__ == "__main__":
    main()
