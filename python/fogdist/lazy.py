"""networkx, loaded when a topology is first made or looked at: importing it takes as long as all of fogdist.

`nx` stands for the module. Importing networkx itself in a module that `import fogdist` loads would undo this.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["nx"]


class _LazyModule(ModuleType):
    """Has a module's names; loads it when it is first asked for one."""

    def __getattr__(self, name: str) -> Any:
        # Called once: what is in the dictionary is found without it.
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, name)


if TYPE_CHECKING:
    import networkx as nx
else:
    nx = _LazyModule("networkx")
