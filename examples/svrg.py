"""Stochastic gradients without their noise: SVRG with exact diffusion, against the true optimum.

    torchrun --nproc_per_node=4 examples/svrg.py
    torchrun --nproc_per_node=4 examples/svrg.py --task linear_regression --epochs 60

The problems are those of optimization.py: all ranks look for the x that is best for all data together, and each knows
its own samples only. Here a rank looks at one sample in each iteration, as in training.

- sgd: the gradient of a sample has noise that does not go away, so x ends at a distance from the optimum
  that the learning rate sets.
- svrg: at the start of each epoch a rank takes the gradient of all its samples, at x as it is then. In each iteration it
  corrects that by how much the gradient of one sample has changed since: the noise goes away as x comes to rest (Johnson and
  Zhang, "Accelerating stochastic gradient descent using predictive variance reduction", NeurIPS 2013).

Both with diffusion, whose bias they share, and with exact diffusion, which has none: only svrg with exact diffusion ends
at the optimum itself (as in Yuan, Ying, Liu and Sayed, "Variance-reduced stochastic learning by networks", 2018).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import devices
import fogdist
import ranks
import torch
from fogdist import algorithms
from fogdist.topology import TOPOLOGY_NAMES, by_name
from optimization import ROWS, TASKS, Problem, optimum
from torch import Tensor, nn

ALGORITHMS: dict[str, Callable[..., Any]] = {
    "diffusion": algorithms.DecentralizedSGD,
    "exact_diffusion": algorithms.ExactDiffusion,
}
GRADIENTS = ("sgd", "svrg")


def train(name: str, gradients: str, problem: Problem, epochs: int, lr: float) -> list[Tensor]:
    """Returns this rank's x after 0, 1, ... epochs.

    Args:
        name: A key of ALGORITHMS.
        gradients: One of GRADIENTS.
        problem: The problem of this rank.
        epochs: Each of as many iterations as a rank has samples.
        lr: Learning rate.
    """
    model = nn.Module()
    model.x = nn.Parameter(problem.zeros())
    optimizer = ALGORITHMS[name](torch.optim.SGD(model.parameters(), lr=lr), model)
    generator = torch.Generator().manual_seed(fogdist.rank())
    path = [model.x.detach().clone()]
    for _ in range(epochs):
        reference = path[-1]
        mean = problem.gradient(reference)
        for row in torch.randint(ROWS, (ROWS,), generator=generator).tolist():
            model.x.grad = problem.gradient(model.x, row)
            if gradients == "svrg":
                model.x.grad += mean - problem.gradient(reference, row)
            optimizer.step()
        path.append(model.x.detach().clone())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="SVRG with diffusion and exact diffusion against SGD.")
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--topology", choices=TOPOLOGY_NAMES, default="ring", help="who is whose neighbor")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05)
    args = devices.parse(parser, "epochs")

    fogdist.init(lambda size: by_name(args.topology, size))
    problem = Problem(args.task, fogdist.rank(), devices.use(args.device))
    best = optimum(problem)
    curves = {}
    for gradients in GRADIENTS:
        for name in ALGORITHMS:
            path = torch.stack(train(name, gradients, problem, args.epochs, args.lr))
            # One row a rank, one column an epoch.
            errors = ranks.gathered((path - best).norm(dim=1).unsqueeze(0))
            curves[f"{gradients}, {name}"] = errors.max(dim=0).values
    if fogdist.rank() == 0:
        print(f"{args.task}, {fogdist.size()} ranks: largest distance of a rank to the optimum")
        print("".join([f"{'epoch':>6}", *(f"{title:>24}" for title in curves)]))
        for epoch in sorted({*range(0, args.epochs, max(1, args.epochs // 10)), args.epochs}):
            print("".join([f"{epoch:>6}", *(f"{curve[epoch].item():>24.3e}" for curve in curves.values())]))
    fogdist.shutdown()


if __name__ == "__main__":
    main()
