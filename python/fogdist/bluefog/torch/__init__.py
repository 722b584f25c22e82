"""`bluefog.torch`: all names of BlueFog 0.1 to 0.3, exported there or not. `import fogdist.bluefog.torch as bf` has them too.

They are the public functions and classes of the modules here, those of `topology_util`, and those of `fogdist`.
"""

from __future__ import annotations

from typing import Any

import torch  # also `bluefog.torch.torch`, which BlueFog's documentation lists

import fogdist
from fogdist.bluefog import handles
from fogdist.bluefog.common import topology_util
from fogdist.bluefog.deprecation import deprecated_function_arg, find
from fogdist.bluefog.torch import basics, collectives, optimizers, windows
from fogdist.observe.timeline import timeline_context, timeline_end_activity, timeline_start_activity

_NAMES: dict[str, Any] = {
    **{name: getattr(fogdist, name) for name in fogdist.__all__},
    **topology_util.OWN,
    **{
        name: value
        for module in (basics, collectives, optimizers, windows)
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_") and name != "end"
    },
    **{name: getattr(handles, name) for name in handles.FOR_SCRIPTS},
    "is_available": torch.distributed.is_available,
    "nccl_built": torch.distributed.is_nccl_available,
    "deprecated_function_arg": deprecated_function_arg,
    "timeline_context": timeline_context,
    "timeline_end_activity": timeline_end_activity,
    "timeline_start_activity": timeline_start_activity,
}

__all__ = [*_NAMES]  # noqa: PLE0604  strings, all of them


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return _NAMES[name]
    return find(name, "bluefog.torch", _NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
