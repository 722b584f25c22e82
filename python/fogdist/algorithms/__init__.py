"""Published algorithms of decentralized training, each a small class around any torch optimizer.

An algorithm is a view of the user's optimizer: the script keeps calling ``loss.backward()``, ``opt.step()`` and
``opt.zero_grad()``::

    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = fogdist.algorithms.GradientTracking(opt, model, topology=fogdist.topology.base_graph(fogdist.size()))

Each algorithm is one class, and its docstring states its recursion and its source. There, x is a rank's parameters, d(x)
the change that the user's optimizer makes, g its learning rate, x+ the next value and x- the previous one, and ``W x``
stands for ``sum_i W[i, j] x_i`` at rank j. The algorithms compute on a few flat vectors and exchange these, once per
round. Each is tested against its recursion in matrix form. docs/algorithms.md compares them and shows how to write one.
Their common frame is `fogdist.training`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fogdist.algorithms.asynchronous_gossip import AsynchronousGossip
from fogdist.algorithms.choco_sgd import ChocoSGD
from fogdist.algorithms.decentralized_adamw import DecentralizedAdamW
from fogdist.algorithms.decentralized_sgd import DecentralizedSGD, LocalSGD
from fogdist.algorithms.diloco import DiLoCo, GASLoC
from fogdist.algorithms.exact_diffusion import ExactDiffusion
from fogdist.algorithms.gradient_tracking import GradientTracking
from fogdist.algorithms.push_sum import PushSumSGD
from fogdist.algorithms.sparse_loco import SparseLoCo
from fogdist.algorithms.win_put import WinPut
from fogdist.removed import missing
from fogdist.training.algorithm import Algorithm
from fogdist.training.mixing import GlobalAverage, Machines, Mixing, Neighbors, NoMixing, Round

__all__ = [
    "Algorithm",
    "AsynchronousGossip",
    "ChocoSGD",
    "DecentralizedAdamW",
    "DecentralizedSGD",
    "DiLoCo",
    "ExactDiffusion",
    "GASLoC",
    "GlobalAverage",
    "GradientTracking",
    "LocalSGD",
    "Machines",
    "Mixing",
    "Neighbors",
    "NoMixing",
    "PushSumSGD",
    "Round",
    "SparseLoCo",
    "WinPut",
]

if not TYPE_CHECKING:  # a type checker is to find misspelt names

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)
