"""`bluefog.torch`: all names of BlueFog 0.1 to 0.3, exported there or not. `import fogdist.bluefog.torch as bf` has them too.

Names that no module here defines are `fogdist`'s.
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  `bluefog.torch.torch`, which BlueFog's documentation lists

import fogdist
from fogdist.bluefog import handles
from fogdist.bluefog.common import topology_util
from fogdist.bluefog.deprecation import find
from fogdist.bluefog.torch import basics, collectives, optimizers, windows

_NAMES = {
    **{name: getattr(fogdist, name) for name in fogdist.__all__},
    **{name: getattr(topology_util, name) for name in topology_util.OWN},
    **{
        name: getattr(module, name)
        for module in (basics, collectives, handles, optimizers, windows)
        for name in module.__all__
    },
}

__all__ = [*_NAMES]  # noqa: PLE0604  strings, all of them


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return _NAMES[name]
    return find(name, "bluefog.torch", _NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
