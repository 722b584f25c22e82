"""`bluefog.common.topology_util`: `fogdist.topology`, by all names that its functions had."""

from __future__ import annotations

from typing import Any

import fogdist
from fogdist import legacy, topology

InferDestinationFromSourceRanks = fogdist.InferDestinationFromSourceRanks
InferSourceFromDestinationRanks = fogdist.InferSourceFromDestinationRanks

__all__ = [  # noqa: PLE0604  strings, all of them
    "InferDestinationFromSourceRanks",
    "InferSourceFromDestinationRanks",
    *topology.__all__,
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(topology, name)
    return legacy.find(name, "bluefog.common.topology_util", vars(topology))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
