"""Imports, once, all modules that are slow to import; the harness's fork server imports this before it forks ranks.

No module here may start a thread or load MPI, because a fork would copy only a part of it.
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

# After this, ranks neither traverse nor copy these objects in garbage collections and at their end, which would take
# half the time of a short world.
gc.collect()
gc.freeze()
