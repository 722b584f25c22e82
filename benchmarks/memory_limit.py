"""The memory limit for a sum of several arrays: one pass that reads each of them once and writes the result once.

There are two forms of the loop, because size and other load decide which is faster: compiled C (`out[i] = a[i] + b[i] +
...`, by the compiler that a build of fog needs anyway, with this machine's vector instructions), and numpy in blocks
that fit into a core's cache.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Elements of a block: with its inputs it fits into the second-level cache, and it takes longer than the call of numpy.
BLOCK = 1 << 16
_OPTIONS = ["-O3", "-march=native", "-shared", "-fPIC"]


def sums(
    inputs: Sequence[NDArray[np.float32]], output: NDArray[np.float32]
) -> dict[str, Callable[[], object]]:
    """Returns functions that write the sum of `inputs` to `output`, by the name of their form.

    Args:
        inputs: One or more contiguous arrays of float32 with the same length.
        output: Array of that length that overlaps none of them.

    Returns:
        "numpy", and "C" if there is a compiler.
    """
    forms: dict[str, Callable[[], object]] = {"numpy": _in_blocks(inputs, output)}
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is not None:
        forms["C"] = _compiled(compiler, inputs, output)
    return forms


def _in_blocks(inputs: Sequence[NDArray[np.float32]], output: NDArray[np.float32]) -> Callable[[], object]:
    starts = range(0, len(output), BLOCK)
    blocks = [(output[i : i + BLOCK], [array[i : i + BLOCK] for array in inputs]) for i in starts]

    def form() -> None:
        for out, (first, *others) in blocks:
            if not others:
                np.copyto(out, first)
                continue
            np.add(first, others[0], out=out)
            for other in others[1:]:
                np.add(out, other, out=out)

    return form


def _compiled(
    compiler: str, inputs: Sequence[NDArray[np.float32]], output: NDArray[np.float32]
) -> Callable[[], object]:
    function = _sum_function(compiler, len(inputs))
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in (output, *inputs)]
    length = ctypes.c_size_t(len(output))
    keep = (list(inputs), output)  # keeps the arrays alive; their addresses do not

    def form() -> object:
        assert keep
        return function(length, *addresses)

    return form


@functools.cache
def _sum_function(compiler: str, inputs: int) -> Callable[..., object]:
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
