"""Lightning on fog: with DDP, with DDP whose ranks gossip, with a fogdist optimizer.

    torchrun --nproc_per_node=2 examples/frameworks/with_lightning.py --how ddp
    torchrun --nproc_per_node=2 examples/frameworks/with_lightning.py --how gossip
    torchrun --nproc_per_node=2 examples/frameworks/with_lightning.py --how optimizer

Without torchrun, ``python with_lightning.py``, Lightning starts the second rank itself.
"""

from __future__ import annotations

import fogdist
import lightning
from lightning.pytorch.strategies import DDPStrategy
from problem import EPOCHS, loss_of, make_loader, make_net, make_sgd, read_how, report
from torch import Tensor
from torch.optim import Optimizer


class GossipStrategy(DDPStrategy):
    """DDP that averages parameters with the neighbors in place of gradients with all ranks.

    DDPStrategy has an argument `ddp_comm_hook`, which it ignores on CPUs. So the hook is registered here.
    """

    def configure_ddp(self) -> None:
        super().configure_ddp()
        fogdist.init()  # adopts the group that Lightning has made
        self.model.register_comm_hook(fogdist.GossipState(), fogdist.gossip_hook)


class UnwrappedStrategy(DDPStrategy):
    """Ranks, data and logging as with DDP, but the model is not wrapped: the optimizer communicates."""

    def configure_ddp(self) -> None:
        fogdist.init()  # Lightning asks the module for its optimizers after this


class Regression(lightning.LightningModule):
    """The problem as a LightningModule."""

    def __init__(self, is_decentralized: bool) -> None:
        super().__init__()
        self.net = make_net()
        self.is_decentralized = is_decentralized

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return loss_of(self.net, *batch)

    def configure_optimizers(self) -> Optimizer:
        optimizer = make_sgd(self.net)
        if self.is_decentralized:
            # The network and not self: a round begins with the forward pass of the module that is given here.
            optimizer = fogdist.DecentralizedOptimizer(optimizer, self.net)
        return optimizer


def main() -> None:
    how = read_how("Lightning on fog.", "ddp", "gossip", "optimizer")
    kind = {"ddp": DDPStrategy, "gossip": GossipStrategy, "optimizer": UnwrappedStrategy}[how]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=kind(process_group_backend="fog"),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression(how == "optimizer")
    trainer.fit(module, make_loader())
    report(module.net)


if __name__ == "__main__":
    main()
