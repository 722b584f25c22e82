"""`bluefog.torch`: fogdist's names, those that it does not have, and those that BlueFog called in other ways.

What is not in a module here is `fogdist`'s; names of BlueFog 0.1 and 0.2 are in `fogdist.legacy`.
"""

from __future__ import annotations

from typing import Any

import fogdist
from fogdist import legacy
from fogdist.bluefog.torch import basics, collectives, optimizers, windows

_NAMES = {
    **{name: getattr(fogdist, name) for name in fogdist.__all__},
    **{
        n: getattr(module, n) for module in (basics, collectives, optimizers, windows) for n in module.__all__
    },
}

__all__ = [*_NAMES]  # noqa: PLE0604  strings, all of them


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return _NAMES[name]
    # What an older name stands for takes the older arguments too, where it is here.
    return legacy.find(name, "bluefog.torch", _NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
