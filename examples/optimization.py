"""Optimization over several ranks with data of their own, by four methods, against the true optimum.

    torchrun --nproc_per_node=4 examples/optimization.py --save-plot-file optimization.png
    torchrun --nproc_per_node=4 examples/optimization.py --task linear_regression --topology mesh
    torchrun --nproc_per_node=4 examples/optimization.py --method push_diging --max-iter 300

All ranks look for the x that is best for all data together: the mean of the ranks' losses f_i is to be
smallest. Each knows its own f_i only, and talks to its neighbors.

- diffusion (adapt then combine: fogdist.algorithms.DecentralizedSGD) ends near the optimum, at a distance
  that grows with the learning rate and with how much the ranks' data differ.
- exact_diffusion and gradient_tracking (fogdist.algorithms.ExactDiffusion, GradientTracking) end at the
  optimum itself, at a geometric rate, on graphs whose weights sum to 1 at senders and receivers.
- push_diging does so on every directed graph that is strongly connected, without anybody knowing how many
  write to whom; here on one-sided windows. A rank has u, which stands for x times a weight v, and y, which
  follows the gradient of the mean: in each iteration it takes u - lr y, divides u, y and v into equal shares
  for its out-neighbors and itself, adds up what it gets, takes x = u / v, and adds the change of its own
  gradient to y (Nedic, Olshevsky and Shi, "Achieving geometric convergence for distributed optimization over
  time-varying graphs", SIAM Journal on Optimization 27, 2017). u, y and v are one tensor in one window:
  win_accumulate gives the shares away, win_update_then_collect adds up. Barriers keep the ranks in step, as
  the theorem has it: a rank that ran ahead would give nearly all of v away before anything came back, and
  divide by what is left.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import devices
import fogdist
import networkx as nx
import ranks
import torch
import torch.distributed as dist
from fogdist import algorithms
from fogdist.topology import TOPOLOGY_NAMES, by_name
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

ROWS = 40  # samples of each rank
FEATURES = 8
REGULARIZATION = 0.05
TASKS = ("logistic_regression", "linear_regression")
UNBALANCED = "unbalanced"


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
        rank: The rank that has the data.
        device: Where they are.
    """

    def __init__(self, task: str, rank: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1000 + rank)
        self._is_logistic = task == "logistic_regression"
        truth = torch.randn(FEATURES, generator=generator, dtype=torch.float64)  # another one on each rank
        a = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
        noise = 0.3 * torch.randn(ROWS, generator=generator, dtype=torch.float64)
        values = a @ truth + noise
        self._a = a.to(device)
        self._b = (values.sign() if self._is_logistic else values).to(device)

    def zeros(self, count: int = FEATURES) -> Tensor:
        """Returns zeros beside the data."""
        return self._a.new_zeros(count)

    def loss(self, x: Tensor, row: int | None = None) -> Tensor:
        """Returns f_i at x; or, with a row, what f_i would be if there were no other sample."""
        rows = slice(None) if row is None else slice(row, row + 1)
        product, b = self._a[rows] @ x, self._b[rows]
        fit = -logsigmoid(b * product) if self._is_logistic else (product - b).square() / 2
        return fit.mean() + REGULARIZATION / 2 * x.square().sum()

    def gradient(self, x: Tensor, row: int | None = None) -> Tensor:
        """Returns the gradient of `loss` at x."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.loss(x, row), x)[0]


def optimum(problem: Problem) -> Tensor:
    """Returns the minimizer of the mean of all ranks' losses, by Newton's method on averages of ranks."""
    x = problem.zeros()
    for _ in range(30):
        gradient = ranks.mean(problem.gradient(x))
        hessian = ranks.mean(torch.func.hessian(problem.loss)(x))
        x = x - torch.linalg.solve(hessian, gradient)
    return x


def by_algorithm(make: Callable[..., Any], problem: Problem, iterations: int, lr: float) -> list[Tensor]:
    """Returns this rank's x after 0, 1, ... iterations of a class of fogdist.algorithms."""
    model = nn.Module()
    model.x = nn.Parameter(problem.zeros())
    optimizer = make(torch.optim.SGD(model.parameters(), lr=lr), model)
    path = [model.x.detach().clone()]
    for _ in range(iterations):
        model.x.grad = problem.gradient(model.x)
        optimizer.step()
        path.append(model.x.detach().clone())
    return path


def by_push_diging(problem: Problem, iterations: int, lr: float) -> list[Tensor]:
    """Returns this rank's x after 0, 1, ... iterations of push-DIGing."""
    neighbors = fogdist.out_neighbor_ranks()
    share = 1.0 / (len(neighbors) + 1)
    shares = dict.fromkeys(neighbors, share)
    state = problem.zeros(2 * FEATURES + 1)
    # Views of the window's tensor.
    u, y, v = state[:FEATURES], state[FEATURES:-1], state[-1:]
    gradient = problem.gradient(u)
    y.copy_(gradient)
    v.fill_(1.0)
    window = fogdist.Window(state, zero_init=True)
    path = [u / v]
    for _ in range(iterations):
        u.sub_(y, alpha=lr)
        # With the mutex it returns when a GPU has done it, too.
        window.accumulate(state, self_weight=share, dst_weights=shares, require_mutex=True)
        dist.barrier()  # all shares are there
        window.collect(require_mutex=True)
        dist.barrier()  # all have collected them, before the next ones come
        previous, gradient = gradient, problem.gradient(u / v)
        y.add_(gradient - previous)
        path.append(u / v)
    window.free()
    return path


METHODS: dict[str, Callable[[Problem, int, float], list[Tensor]]] = {
    "diffusion": lambda *args: by_algorithm(algorithms.DecentralizedSGD, *args),
    "exact_diffusion": lambda *args: by_algorithm(algorithms.ExactDiffusion, *args),
    "gradient_tracking": lambda *args: by_algorithm(algorithms.GradientTracking, *args),
    "push_diging": by_push_diging,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decentralized optimization against the true optimum.")
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--method", choices=list(METHODS), nargs="+", default=list(METHODS))
    parser.add_argument(
        "--topology",
        choices=[UNBALANCED, *TOPOLOGY_NAMES],
        help="default: ring; for push_diging a directed graph on which shares are unfair",
    )
    parser.add_argument("--max-iter", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--save-plot-file", help="picture of the errors, needs matplotlib")
    args = devices.parse(parser, "max_iter")
    if args.topology == UNBALANCED and args.method != ["push_diging"]:
        parser.error(f"--topology {UNBALANCED} is for --method push_diging alone: averages are biased on it")

    fogdist.init()
    problem = Problem(args.task, fogdist.rank(), devices.use(args.device))
    best = optimum(problem)
    curves: dict[str, Tensor] = {}
    for method in args.method:
        name = args.topology or (UNBALANCED if method == "push_diging" else "ring")
        graph = unbalanced(fogdist.size()) if name == UNBALANCED else by_name(name, fogdist.size())
        fogdist.set_topology(graph)
        path = torch.stack(METHODS[method](problem, args.max_iter, args.lr))
        # One row a rank, one column an iteration.
        errors = ranks.gathered((path - best).norm(dim=1).unsqueeze(0))
        curves[f"{method}, {name}"] = errors.max(dim=0).values
    if fogdist.rank() == 0:
        print(f"{args.task}, {fogdist.size()} ranks: largest distance of a rank to the optimum")
        print("".join([f"{'iteration':>9}", *(f"{title:>28}" for title in curves)]))
        for t in sorted({*range(0, args.max_iter, max(1, args.max_iter // 10)), args.max_iter}):
            print("".join([f"{t:>9}", *(f"{curve[t].item():>28.3e}" for curve in curves.values())]))
        if args.save_plot_file:
            plot(
                f"{args.task}, {fogdist.size()} ranks, learning rate {args.lr:g}", curves, args.save_plot_file
            )
    fogdist.shutdown()


def plot(title: str, curves: dict[str, Tensor], path: str) -> None:
    """Draws the largest distance to the optimum over the iterations of each method."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (label, curve) in enumerate(curves.items()):
        # Curves may lie on each other: the later ones are thinner.
        axes.semilogy(curve.cpu().numpy(), label=label, linewidth=6 / (1 + number))
    axes.set(title=title, xlabel="iteration", ylabel="largest distance of a rank to the optimum")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
