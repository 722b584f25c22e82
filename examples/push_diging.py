"""Exact optimization on a directed graph: push-DIGing on one-sided windows, against the true optimum.

    torchrun --nproc_per_node=4 examples/push_diging.py
    torchrun --nproc_per_node=4 examples/push_diging.py --task linear_regression --topology ring-right
    torchrun --nproc_per_node=4 examples/push_diging.py --save-plot-file push_diging.png

Each rank has data of its own, and all look for the x that is best for all data together: the mean of the ranks'
losses f_i is to be smallest. A rank has u, which stands for x times a weight v, and y, which follows the
gradient of the mean: in each iteration it takes u - lr y, divides u, y and v into equal shares for its
out-neighbors and itself, adds up what it gets, takes x = u / v, and adds the change of its own gradient to y. So
the sum of y over all ranks is always that of their gradients, and the limit is the optimum itself, at a geometric
rate, on every directed graph that is strongly connected; nobody has to know how many write to whom (Nedic,
Olshevsky and Shi, "Achieving geometric convergence for distributed optimization over time-varying graphs", SIAM
Journal on Optimization 27, 2017).

u, y and v are one tensor in one window: win_accumulate gives the shares away, win_update_then_collect adds up.
Barriers keep the ranks in step, as the theorem has it. A rank that ran ahead would give nearly all of v away
before anything came back, and divide by what is left.
"""

from __future__ import annotations

import argparse

import networkx as nx
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import fogdist
from fogdist.topology import TOPOLOGY_NAMES, by_name

ROWS = 40  # samples of each rank
FEATURES = 8
REGULARIZATION = 0.05
TASKS = ("logistic_regression", "linear_regression")


def unbalanced(size: int) -> nx.DiGraph:
    """Returns a directed ring with further edges from rank 0 to all: equal shares are unfair on it."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from((rank, (rank + 1) % size) for rank in range(size) if size > 1)
    graph.add_edges_from((0, rank) for rank in range(1, size))
    return graph


class Problem:
    """The loss f_i of one rank: the mean over its samples, and REGULARIZATION / 2 * |x|^2.

    Args:
        task: One of TASKS.
        rank: Whose data.
    """

    def __init__(self, task: str, rank: int) -> None:
        generator = torch.Generator().manual_seed(1000 + rank)
        self._is_logistic = task == "logistic_regression"
        truth = torch.randn(FEATURES, generator=generator, dtype=torch.float64)  # another one on each rank
        self._a = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
        noise = 0.3 * torch.randn(ROWS, generator=generator, dtype=torch.float64)
        values = self._a @ truth + noise
        self._b = values.sign() if self._is_logistic else values

    def loss(self, x: Tensor) -> Tensor:
        """Returns f_i at x."""
        product = self._a @ x
        fit = -logsigmoid(self._b * product) if self._is_logistic else (product - self._b).square() / 2
        return fit.mean() + REGULARIZATION / 2 * x.square().sum()

    def gradient(self, x: Tensor) -> Tensor:
        """Returns the gradient of f_i at x."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.loss(x), x)[0]


def optimum(problem: Problem) -> Tensor:
    """Returns the minimizer of the mean of all ranks' losses, by Newton's method with averages over all ranks."""
    x = torch.zeros(FEATURES, dtype=torch.float64)
    for _ in range(30):
        gradient = fogdist.allreduce(problem.gradient(x))
        hessian = fogdist.allreduce(torch.func.hessian(problem.loss)(x))
        x = x - torch.linalg.solve(hessian, gradient)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description="Push-DIGing with win_accumulate.")
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--topology", choices=["unbalanced", *TOPOLOGY_NAMES], default="unbalanced")
    parser.add_argument("--max-iter", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.4, help="step along y")
    parser.add_argument("--save-plot-file", help="picture of the errors, needs matplotlib")
    args = parser.parse_args()
    if args.max_iter < 1:
        parser.error(f"--max-iter must be at least 1, got {args.max_iter}")

    fogdist.init(unbalanced if args.topology == "unbalanced" else lambda size: by_name(args.topology, size))
    rank = fogdist.rank()
    problem = Problem(args.task, rank)
    best = optimum(problem)
    neighbors = fogdist.out_neighbor_ranks()
    share = 1.0 / (len(neighbors) + 1)
    shares = dict.fromkeys(neighbors, share)

    state = torch.zeros(2 * FEATURES + 1, dtype=torch.float64)
    u, y, v = state[:FEATURES], state[FEATURES:-1], state[-1:]
    gradient = problem.gradient(u)
    y.copy_(gradient)
    v.fill_(1.0)
    fogdist.win_create(state, "push_diging", zero_init=True)
    # u, y and v are views of the window's tensor.
    errors = [(u / v - best).norm().item()]
    for _ in range(args.max_iter):
        u.sub_(y, alpha=args.lr)
        fogdist.win_accumulate(state, "push_diging", self_weight=share, dst_weights=shares)
        fogdist.barrier()  # all shares are there
        fogdist.win_update_then_collect("push_diging")
        fogdist.barrier()  # all have collected them, before the next ones come
        previous, gradient = gradient, problem.gradient(u / v)
        y.add_(gradient - previous)
        errors.append((u / v - best).norm().item())
    fogdist.win_free()

    curves = fogdist.allgather(torch.tensor([errors], dtype=torch.float64))
    weights = fogdist.allgather(v)
    if rank == 0:
        largest = curves.max(dim=0).values.tolist()
        print(f"{'iteration':>9}{'largest distance to the optimum':>34}")
        for iteration in sorted({*range(0, args.max_iter, max(1, args.max_iter // 10)), args.max_iter}):
            print(f"{iteration:>9}{largest[iteration]:>34.3e}")
        for r, (curve, weight) in enumerate(zip(curves.tolist(), weights.tolist(), strict=True)):
            print(f"rank {r}: distance {curve[-1]:.3e}, v = {weight:.3f}")
        if args.save_plot_file:
            plot(curves, args.save_plot_file)
    fogdist.shutdown()


def plot(curves: Tensor, path: str) -> None:
    """Draws each rank's distance to the optimum over its iterations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for rank, curve in enumerate(curves):
        pyplot.semilogy(curve.numpy(), label=f"rank {rank}", linewidth=1)
    pyplot.xlabel("iteration of the rank")
    pyplot.ylabel("distance to the optimum")
    pyplot.legend()
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
