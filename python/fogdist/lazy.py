"""Loads networkx at its first use, because importing it takes as long as importing all of fogdist.

`nx` stands for the module. Modules that `import fogdist` loads must not import networkx themselves.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["nx"]


class _LazyModule(ModuleType):
    """A stand-in for a module that loads the module at the first access to one of its names."""

    def __getattr__(self, name: str) -> Any:
        # Called only once, because names that are in the dictionary are found without this method.
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, name)


if TYPE_CHECKING:
    import networkx as nx
else:
    nx = _LazyModule("networkx")
