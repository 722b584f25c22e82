"""Published algorithms of decentralized training, each a small class around any torch optimizer.

An algorithm is a view of the user's optimizer, as in `fogdist.optim`: the script keeps calling
``loss.backward()``, ``opt.step()`` and ``opt.zero_grad()``::

    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = fogdist.algorithms.GradientTracking(opt, model, mixing=fogdist.topology.base_graph(fogdist.size()))

All have one frame, of three parts:

- *mixing* (`mixing`): whom ranks average with, by which weights, round by round: a `Topology`, the group's
  topology or the optimizer's dynamic attributes; all ranks; nobody. On directed graphs, push-sum's shares.
- *local steps* (`frame`): the user's optimizer makes every change d(x) from gradients, and ranks communicate
  in every `local_steps`-th step.
- *outer optimizer* (`slow_momentum`, `diloco`): what is made of the averages of many steps: slow momentum,
  Nesterov, or nothing.

One algorithm, one class, whose docstring states its recursion and its source. In these, x is a rank's
parameters, d(x) what the user's optimizer adds to them, g its learning rate, x+ the next value and x- the one
before, and ``W x`` stands for ``sum_i W[i, j] x_i`` at rank j. They compute on a few flat vectors (`flats`),
which also is what travels: one exchange a round. Each is tested against its recursion in matrix form.
docs/algorithms.md compares them.
"""

from __future__ import annotations

from fogdist.algorithms.asynchronous_gossip import AsynchronousGossip
from fogdist.algorithms.decentralized_sgd import DecentralizedSGD, LocalSGD
from fogdist.algorithms.diloco import DiLoCo, GASLoC, NoLoCo
from fogdist.algorithms.exact_diffusion import D2, ExactDiffusion
from fogdist.algorithms.frame import Algorithm
from fogdist.algorithms.gossip_pga import GossipPGA
from fogdist.algorithms.gradient_tracking import GradientTracking
from fogdist.algorithms.mixing import AllRanks, Mixing, Neighbors, Nobody
from fogdist.algorithms.push_sum import PushSumSGD
from fogdist.algorithms.quasi_global import QuasiGlobalMomentum
from fogdist.algorithms.slow_momentum import SlowMo

__all__ = [
    "D2",
    "Algorithm",
    "AllRanks",
    "AsynchronousGossip",
    "DecentralizedSGD",
    "DiLoCo",
    "ExactDiffusion",
    "GASLoC",
    "GossipPGA",
    "GradientTracking",
    "LocalSGD",
    "Mixing",
    "Neighbors",
    "NoLoCo",
    "Nobody",
    "PushSumSGD",
    "QuasiGlobalMomentum",
    "SlowMo",
]
