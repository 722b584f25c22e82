"""`bluefog.torch`: the names of fogdist, names that only BlueFog has, and names with another call form in BlueFog.

Names that no module here defines are `fogdist`'s; names of BlueFog 0.1 and 0.2 are in `fogdist.legacy`.
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  `bluefog.torch.torch`, which BlueFog's documentation lists

import fogdist
from fogdist import legacy
from fogdist.bluefog.common.topology_util import RingGraph
from fogdist.bluefog.torch import basics, collectives, optimizers, windows

_NAMES = {
    **{name: getattr(fogdist, name) for name in fogdist.__all__},
    **{
        n: getattr(module, n) for module in (basics, collectives, optimizers, windows) for n in module.__all__
    },
    "RingGraph": RingGraph,
}

__all__ = [*_NAMES]  # noqa: PLE0604  strings, all of them


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return _NAMES[name]
    # Functions of this package also take the arguments of the older names.
    return legacy.find(name, "bluefog.torch", _NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
