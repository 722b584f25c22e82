"""What the fork server of the harness imports before it forks ranks: all that is slow to import, once.

Nothing here may start a thread or load MPI: a fork would copy half of it.
"""

from __future__ import annotations

import gc

import fogdist  # noqa: F401  loads no library before it is used
import harness  # noqa: F401
import networkx  # noqa: F401  what a first topology imports
import numpy  # noqa: F401
import pytest  # noqa: F401
import reference  # noqa: F401
import torch
import torch._dynamo  # the first step of an optimizer and the first functional collective import it
import torch.distributed
import torch.distributed._functional_collectives
import torch.nn.parallel
import torch.testing  # noqa: F401

# Ranks then neither traverse nor copy these objects when they collect garbage and when they end: that would
# be half the time of a short world.
gc.collect()
gc.freeze()
