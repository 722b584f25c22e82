"""torch.distributed.monitored_barrier for fog: groups that torch supports only for Gloo, and every timeout.

Up to 2.13, torch requires the group's backend to be "gloo"; later versions only require that the group serves CPU
tensors. Once a program has loaded fog's extension, monitored_barrier accepts groups of fog as well. In every version the
longest timeouts would overflow.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from fog_pg._timeouts import within_reach


def serve() -> None:
    """Makes torch.distributed.monitored_barrier accept fog groups; a second call does nothing."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    original = distributed_c10d.monitored_barrier
    if getattr(original, "serves_fog", False):
        return

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> Any:
        if isinstance(timeout, timedelta):
            timeout = within_reach(timeout)
        is_known = version >= (2, 14) or distributed_c10d._rank_not_in_group(group)
        if is_known or dist.get_backend(group) != "fog":
            return original(group, timeout, wait_all_ranks)
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        elif timeout is None:
            timeout = distributed_c10d.default_pg_timeout
        elif not isinstance(timeout, timedelta):
            raise TypeError(
                f"timeout: got {type(timeout).__name__}; allowed are a timedelta and a number of seconds"
            )
        asked: Any = distributed_c10d._get_default_group() if group is None else group
        return asked.monitored_barrier(within_reach(timeout), wait_all_ranks=wait_all_ranks)

    monitored_barrier.serves_fog = True  # type: ignore[attr-defined]
    distributed_c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier
