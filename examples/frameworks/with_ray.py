"""Ray Train on fog: with DDP, with DDP whose ranks gossip, with a fogdist optimizer.

    python examples/frameworks/with_ray.py --how ddp
    python examples/frameworks/with_ray.py --how gossip
    python examples/frameworks/with_ray.py --how optimizer

Ray starts two workers on this machine. On a cluster fog has to be installed wherever workers run.
"""

from __future__ import annotations

import tempfile
from typing import Any

import fogdist
import ray
from problem import EPOCHS, loss_of, make_loader, make_net, make_sgd, read_how, report
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model


def train_loop(settings: dict[str, Any]) -> None:
    """The function that each worker runs, within the process group that Ray has made."""
    fogdist.init()  # adopts that group
    net = make_net()
    optimizer = make_sgd(net)
    if settings["how"] == "optimizer":
        optimizer = fogdist.DecentralizedOptimizer(optimizer, net)
        model = prepare_model(net, parallel_strategy=None)  # no DDP
    else:
        model = prepare_model(net)
    if settings["how"] == "gossip":
        model.register_comm_hook(fogdist.GossipState(), fogdist.gossip_hook)
    loader = prepare_data_loader(make_loader())
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
    report(net)


def main() -> None:
    how = read_how("Ray Train on fog.", "ddp", "gossip", "optimizer")
    ray.init(num_cpus=3, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"how": how},
            torch_config=TorchConfig(backend="fog"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()  # raises what a worker has failed with
    ray.shutdown()


if __name__ == "__main__":
    main()
