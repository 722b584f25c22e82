"""The memory limit for a sum of several arrays: one pass that reads each of them once and writes the result once.

The loop is C (`out[i] = a[i] + b[i] + ...`), made by the compiler that a build of fog needs anyway, with this machine's
vector instructions.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_OPTIONS = ["-O3", "-march=native", "-shared", "-fPIC"]


def sum_of(inputs: Sequence[NDArray[np.float32]], output: NDArray[np.float32]) -> Callable[[], object]:
    """Returns a function that writes the sum of `inputs` to `output`.

    Args:
        inputs: One or more contiguous arrays of float32 with the same length.
        output: Array of that length that overlaps none of them.
    """
    function = _sum_function(len(inputs))
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in (output, *inputs)]
    length = ctypes.c_size_t(len(output))
    keep = (list(inputs), output)  # keeps the arrays alive; their addresses do not

    def form() -> object:
        assert keep
        return function(length, *addresses)

    return form


@functools.cache
def _sum_function(inputs: int) -> Callable[..., object]:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        sys.exit("the limit of memory needs a C compiler")
    names = [f"x{place}" for place in range(inputs)]
    parameters = ", ".join(f"const float* restrict {name}" for name in names)
    terms = " + ".join(f"{name}[i]" for name in names)
    source = (
        "#include <stddef.h>\n"
        f"void sum(size_t n, float* restrict out, {parameters}) {{\n"
        f"  for (size_t i = 0; i < n; ++i) out[i] = {terms};\n"
        "}\n"
    )
    with tempfile.TemporaryDirectory(prefix="fog-benchmark-") as directory:
        file, library = Path(directory) / "sum.c", Path(directory) / "sum.so"
        file.write_text(source)
        subprocess.run([*compiler.split(), *_OPTIONS, str(file), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library)).sum  # the library stays loaded without its file
