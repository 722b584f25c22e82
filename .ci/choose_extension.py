"""In a released wheel, this file is `fog_pg/_C.py`: it takes the extension for the installed torch in its place.

The wheel has an extension for each minor version of torch, in a folder each. See wheels.py.
"""

import importlib.util
import sys

from fog_pg import _extension

(_file,) = _extension.folder_for_torch().glob("_C*.so")
_spec = importlib.util.spec_from_file_location(__name__, _file)
assert _spec and _spec.loader
sys.modules[__name__] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
