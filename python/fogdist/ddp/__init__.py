"""Decentralized training of a module as it is: a wrapper for it, and a hook for torch's own wrapper.

`data_parallel` is the wrapper; `synchronous` and `asynchronous` are its two ways to mix parameters with
neighbors. `comm_hook` is for torch.nn.parallel.DistributedDataParallel.
"""

from __future__ import annotations

from fogdist.ddp.comm_hook import Gossip, GossipState, gossip_hook
from fogdist.ddp.data_parallel import DecentralizedDataParallel

__all__ = ["DecentralizedDataParallel", "Gossip", "GossipState", "gossip_hook"]
