"""Linear speedup: how much faster n ranks process samples than one rank, and the cost of communication.

    torchrun --nproc_per_node=4 examples/linear_speedup.py
    torchrun --nproc_per_node=4 examples/linear_speedup.py --rows 50000 --features 500 --topology ring

All ranks fit one logistic regression, each to samples of its own, by gradient tracking; an iteration goes through all
samples of a rank and exchanges x and the tracked gradient with the neighbors. Three runs take the same number of
iterations: as it is, with the exchange of the tracked gradient hidden behind the computation of the next one; the computation
alone; the communication alone. Ranks that have a core each should all make as many samples per second as one does.
"""

from __future__ import annotations

import argparse
import time

import devices
import fogdist
import ranks
import torch
import torch.distributed as dist
from fogdist.topology import TOPOLOGY_NAMES, by_name
from torch import Tensor

REGULARIZATION = 0.1


class Samples:
    """Samples of one rank, and the gradient of its logistic loss.

    Args:
        rank: The rank that has the samples.
        rows: How many.
        features: The number of features of each sample.
        device: Where they are.
    """

    def __init__(self, rank: int, rows: int, features: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1000 + rank)
        x = torch.randn(rows, features, generator=generator, dtype=torch.float64)
        truth = torch.linspace(-1, 1, features, dtype=torch.float64)
        labels = (
            torch.rand(rows, generator=generator, dtype=torch.float64) < torch.sigmoid(x @ truth)
        ) * 2.0 - 1
        self._signed = (x * labels.unsqueeze(1)).to(device)

    def zeros(self) -> Tensor:
        """Returns zeros, one a feature."""
        return self._signed.new_zeros(self._signed.shape[1])

    def gradient(self, x: Tensor) -> Tensor:
        """Returns the gradient of the mean of log(1 + exp(-b a.x)) and REGULARIZATION / 2 |x|^2."""
        shares = torch.sigmoid(-(self._signed @ x)) / len(self._signed)
        return REGULARIZATION * x - shares @ self._signed


def track(samples: Samples, iterations: int, lr: float, computes: bool, communicates: bool) -> Tensor:
    """Returns x after a number of iterations of gradient tracking, of which parts may be left out.

    Args:
        samples: The samples of this rank.
        iterations: How many.
        lr: Learning rate.
        computes: Whether to compute gradients after the first one.
        communicates: Whether to mix with the neighbors.
    """
    x = samples.zeros()
    gradient = tracked = samples.gradient(x)
    for _ in range(iterations):
        x = x - lr * tracked
        if communicates:
            x = fogdist.neighbor_allreduce(x)
            work = fogdist.neighbor_allreduce(tracked, async_op=True)
        previous = gradient
        if computes:
            gradient = samples.gradient(x)
        if communicates:
            work.wait()
            (tracked,) = work.get_future().value()
        tracked = tracked + gradient - previous
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of gradient tracking on one rank and on all.")
    parser.add_argument("--rows", type=int, default=10000, help="samples of each rank")
    parser.add_argument("--features", type=int, default=200)
    parser.add_argument("--max-iter", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--topology", choices=TOPOLOGY_NAMES, default="exp2", help="who is whose neighbor")
    args = devices.parse(parser, "rows", "features", "max_iter")

    fogdist.init(lambda size: by_name(args.topology, size))
    samples = Samples(fogdist.rank(), args.rows, args.features, devices.use(args.device))
    runs = {
        "as it is": (True, True),
        "computation alone": (True, False),
        "communication alone": (False, True),
    }
    rates = {}
    solution = samples.zeros()
    for name, (computes, communicates) in runs.items():
        track(samples, 3, args.lr, computes, communicates)  # warms up
        dist.barrier()
        begin = time.perf_counter()
        x = track(samples, args.max_iter, args.lr, computes, communicates)
        x.sum().item()  # a GPU has done it then
        seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        rates[name] = args.rows * args.max_iter / ranks.gathered(seconds)
        if computes and communicates:
            solution = x
    # Zero at the optimum of all ranks' samples together.
    error = ranks.mean(samples.gradient(solution)).norm().item()
    start = ranks.mean(samples.gradient(samples.zeros())).norm().item()
    if fogdist.rank() == 0:
        print(
            f"{fogdist.size()} ranks with {args.rows} samples of {args.features} features each: samples per second"
        )
        for name, rate in rates.items():
            each = ", ".join(f"{value:,.0f}" for value in rate.tolist())
            print(f"{name:>20}: {rate.sum().item():>14,.0f} = {each}")
        kept = rates["as it is"].sum() / rates["computation alone"].sum()
        print(f"share of the speed that communication leaves: {kept.item():.2f}")
        print(f"norm of the gradient of all samples: {start:.2e} at first, {error:.2e} at the end")
    fogdist.shutdown()


if __name__ == "__main__":
    main()
