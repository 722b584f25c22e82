"""Resource allocation: ranks share resources at the least total cost, by four methods, against the solution.

    torchrun --nproc_per_node=4 examples/resource_allocation.py
    torchrun --nproc_per_node=4 examples/resource_allocation.py --topology mesh --max-iter 400

Rank i has b_i of some goods to give, d_i is what it is asked for, and taking x_i of each costs it
``f_i(x_i) = sum_j a_ij (x_ij - b_ij)^2 / 2``. All ranks together must meet the demand, ``sum_i x_i = sum_i d_i``, at the
least cost; no rank tells another one its costs. There is a price y per unit at which every rank, looking at its own
costs only, takes ``x_i(y) = b_i - y / a_i``, and these add up to the demand.

- admm: the ranks adjust the price by the mean of what is missing, which is an allreduce (exchange ADMM: Boyd, Parikh,
  Chu, Peleato and Eckstein, "Distributed optimization and statistical learning via the alternating direction method of
  multipliers", Foundations and Trends in Machine Learning 3, 2011, section 7.3).
- The others look for the price in the dual, where each rank has a loss g_i(y) of its own with the gradient
  ``d_i - x_i(y)``, and the sum of all is to be smallest. So it is found like any consensus optimum, from
  neighbors alone: extra (Shi, Ling, Wu and Yin, "EXTRA: an exact first-order algorithm for decentralized consensus
  optimization", SIAM Journal on Optimization 25, 2015), exact_diffusion (Yuan, Ying, Zhao and Sayed, 2019) and
  gradient_tracking (Di Lorenzo and Scutari, 2016; adapt, then combine).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import devices
import fogdist
import ranks
import torch
from fogdist.topology import TOPOLOGY_NAMES, by_name
from torch import Tensor

GOODS = 3


class Rank:
    """The knowledge of one rank.

    Args:
        rank: The rank that has the numbers.
        device: Where they are.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1000 + rank)
        numbers = torch.rand(3, GOODS, generator=generator, dtype=torch.float64).to(device)
        self.slope = 0.5 + numbers[0]
        self.stock = 2 + numbers[1]
        self.demand = 4 * numbers[2]

    def takes(self, price: Tensor) -> Tensor:
        """Returns the cheapest amounts at a price."""
        return self.stock - price / self.slope

    def gradient(self, price: Tensor) -> Tensor:
        """Returns the gradient of its loss in the dual."""
        return self.demand - self.takes(price)


def solution(own: Rank) -> Tensor:
    """Returns the price, from the sums over all ranks, which the methods do without."""
    surplus = ranks.total(own.stock - own.demand)
    return surplus / ranks.total(1 / own.slope)


def admm(own: Rank, iterations: int) -> list[Tensor]:
    """Returns the prices after each iteration of exchange ADMM, with the penalty 1."""
    excess = own.takes(torch.zeros_like(own.stock)) - own.demand
    mean, price, path = ranks.mean(excess), torch.zeros_like(own.stock), []
    for _ in range(iterations):
        target = excess - mean - price
        # The minimum of f_i(excess + demand) + |excess - target|^2 / 2.
        excess = (own.slope * (own.stock - own.demand) + target) / (own.slope + 1)
        mean = ranks.mean(excess)
        price = price + mean
        path.append(price)
    return path


def extra(own: Rank, iterations: int, lr: float) -> list[Tensor]:
    """Returns the prices after each iteration of EXTRA."""
    previous, previous_gradient = torch.zeros_like(own.stock), own.gradient(torch.zeros_like(own.stock))
    previous_mixed = fogdist.neighbor_allreduce(previous)
    price = previous_mixed - lr * previous_gradient
    path = [price]
    for _ in range(iterations - 1):
        mixed, gradient = fogdist.neighbor_allreduce(price), own.gradient(price)
        correction = (previous + previous_mixed) / 2 + lr * (gradient - previous_gradient)
        previous, previous_mixed, previous_gradient = price, mixed, gradient
        price = price + mixed - correction
        path.append(price)
    return path


def exact_diffusion(own: Rank, iterations: int, lr: float) -> list[Tensor]:
    """Returns the prices after each iteration of exact diffusion, with the weights (I + W) / 2."""
    price = adapted = torch.zeros_like(own.stock)
    path = []
    for _ in range(iterations):
        previous, adapted = adapted, price - lr * own.gradient(price)
        corrected = adapted + price - previous
        price = (corrected + fogdist.neighbor_allreduce(corrected)) / 2
        path.append(price)
    return path


def gradient_tracking(own: Rank, iterations: int, lr: float) -> list[Tensor]:
    """Returns the prices after each iteration of gradient tracking, whose two exchanges are one of a list."""
    price = torch.zeros_like(own.stock)
    gradient = tracked = own.gradient(price)
    path = []
    for _ in range(iterations):
        price, mixed_tracked = fogdist.neighbor_allreduce([price - lr * tracked, tracked])
        previous, gradient = gradient, own.gradient(price)
        tracked = mixed_tracked + gradient - previous
        path.append(price)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Resource allocation by ADMM and by three methods in the dual."
    )
    parser.add_argument("--topology", choices=TOPOLOGY_NAMES, default="ring", help="who is whose neighbor")
    parser.add_argument("--max-iter", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.2)
    args = devices.parse(parser, "max_iter")

    fogdist.init(lambda size: by_name(args.topology, size))
    own = Rank(fogdist.rank(), devices.use(args.device))
    best = solution(own)
    methods: dict[str, Callable[[], list[Tensor]]] = {
        "admm": lambda: admm(own, args.max_iter),
        "extra": lambda: extra(own, args.max_iter, args.lr),
        "exact_diffusion": lambda: exact_diffusion(own, args.max_iter, args.lr),
        "gradient_tracking": lambda: gradient_tracking(own, args.max_iter, args.lr),
    }
    curves, allocations = {}, {}
    for name, method in methods.items():
        path = torch.stack(method())
        # One row a rank, one column an iteration.
        curves[name] = ranks.gathered((path - best).norm(dim=1).unsqueeze(0)).max(dim=0).values
        allocations[name] = own.takes(path[-1])
    missing = {name: ranks.total(taken - own.demand).norm().item() for name, taken in allocations.items()}
    if fogdist.rank() == 0:
        print(f"{fogdist.size()} ranks, {GOODS} goods: largest distance of a rank's price to the solution's")
        print("".join([f"{'iteration':>9}", *(f"{name:>20}" for name in curves)]))
        for t in sorted({*range(0, args.max_iter, max(1, args.max_iter // 10)), args.max_iter - 1}):
            print("".join([f"{t + 1:>9}", *(f"{curve[t].item():>20.3e}" for curve in curves.values())]))
        print("".join([f"{'missing':>9}", *(f"{value:>20.3e}" for value in missing.values())]))
        prices = ", ".join(f"{price:.4f}" for price in best.tolist())
        print(f"prices of the solution: {prices}")
    fogdist.shutdown()


if __name__ == "__main__":
    main()
