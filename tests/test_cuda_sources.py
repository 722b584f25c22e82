"""What fog says of CUDA is what CUDA's own headers say, and its kernels compile, where CUDA's toolkit is.

Nothing here needs a GPU. Where there is no toolkit, the tests of the device double still run the kernels.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fog_pg import _C, _driver

ROOT = Path(__file__).parents[1]
CUDA_SOURCES = ROOT / "csrc" / "process_group_fog" / "cuda"
# The oldest and the newest architectures for which CUDA 13 compiles, and Hopper between them.
ARCHITECTURES = ["sm_75", "sm_90", "sm_120"]


def toolkit() -> Path:
    """The folder of CUDA's toolkit, whose cuda.h the tests read."""
    compiler = shutil.which("nvcc")
    folders = [
        os.environ.get("CUDA_HOME"),
        compiler and Path(compiler).resolve().parents[1],
        "/usr/local/cuda",
    ]
    for folder in folders:
        if folder and (Path(folder) / "include" / "cuda.h").is_file():
            return Path(folder)
    pytest.skip("no CUDA toolkit here: no cuda.h below CUDA_HOME or beside nvcc")


def declarations() -> str:
    """A C++ source that compiles if driver.hpp declares every function as CUDA's headers do."""
    text = (CUDA_SOURCES / "driver.hpp").read_text()
    constants = {
        "kComputeCapabilityMajor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
        "kComputeCapabilityMinor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
        "kMultiprocessorCount": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
        "kIpcLazyEnablePeerAccess": "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS",
        "kHostAllocPortable": "CU_MEMHOSTALLOC_PORTABLE",
        "kHostAllocMapped": "CU_MEMHOSTALLOC_DEVICEMAP",
        "kHostRegisterPortable": "CU_MEMHOSTREGISTER_PORTABLE",
        "kHostRegisterMapped": "CU_MEMHOSTREGISTER_DEVICEMAP",
        "kStreamNonBlocking": "CU_STREAM_NON_BLOCKING",
    }
    enumerators = re.findall(r"^  (k\w+) = \d+,", text, re.MULTILINE)
    return """
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>
#include <cuda.h>
#if __has_include(<nvrtc.h>)
#include <nvrtc.h>
#endif
#include "driver.hpp"
using namespace fog::cuda;

// Two types that a call passes the same way.
template <typename A, typename B>
constexpr bool alike() {
  if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
    using To = std::remove_pointer_t<A>;
    using Other = std::remove_pointer_t<B>;
    if constexpr (std::is_void_v<To> || std::is_void_v<Other>) {
      return true;  // a handle, or any memory
    } else if constexpr (std::is_pointer_v<To>) {
      return std::is_pointer_v<Other>;
    } else {
      return sizeof(To) == sizeof(Other);
    }
  } else {
    return sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> && std::is_class_v<A> == std::is_class_v<B>;
  }
}
template <typename Result, typename... Given, typename Other, typename... Taken>
constexpr bool same(Result (*)(Given...), Other (*)(Taken...)) {
  if constexpr (sizeof...(Given) != sizeof...(Taken)) {
    return false;
  } else {
    return alike<Result, Other>() && (alike<Given, Taken>() && ...);
  }
}
#define CHECK(name, symbol, parameters) \\
  static_assert(same(decltype(Driver::name)(nullptr), decltype(&symbol)(nullptr)), #symbol);
FOG_CUDA_DRIVER_FUNCTIONS(CHECK)
FOG_CUDA_OPTIONAL_DRIVER_FUNCTIONS(CHECK)
#undef CHECK
#define CHECK(name, symbol, result, parameters) \\
  static_assert(same(decltype(Compiler::name)(nullptr), decltype(&symbol)(nullptr)), #symbol);
#if __has_include(<nvrtc.h>)
FOG_NVRTC_FUNCTIONS(CHECK)
#endif
#undef CHECK
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle) && sizeof(Uuid) == sizeof(CUuuid));
static_assert(std::is_same_v<Address, CUdeviceptr>);
""" + "".join(f"static_assert({name} == int({constants[name]}));\n" for name in enumerators)


def compile_cpp(source: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Compiles C++ with CUDA's and torch's headers at hand."""
    from torch.utils.cpp_extension import include_paths

    file = tmp_path / "source.cpp"
    file.write_text(source)
    wheels = [str(folder) for path in sys.path for folder in Path(path).glob("nvidia/*/include")]
    folders = [str(toolkit() / "include"), str(CUDA_SOURCES), *include_paths(), *wheels]
    command = [
        "g++",
        "-std=c++20",
        "-fsyntax-only",
        *(f"-I{folder}" for folder in folders),
        *arguments,
        str(file),
    ]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


def test_driver_is_declared_as_in_cuda_h(tmp_path: Path) -> None:
    done = compile_cpp(declarations(), tmp_path)
    assert done.returncode == 0, done.stderr


def test_symbols_are_those_that_cuda_h_calls() -> None:
    """cuda.h's plain names stand for versioned symbols; the one that fog opens must be the one with this signature."""
    headers = (toolkit() / "include" / "cuda.h").read_text()
    symbols = re.findall(r"X\(\w+, (cu\w+),", (CUDA_SOURCES / "driver.hpp").read_text())
    assert len(symbols) > 15
    renamed = dict(re.findall(r"^\s*#define (cu\w+)\s+(cu\w+_v\d+)\s*$", headers, re.MULTILINE))
    for symbol in symbols:
        plain = re.sub(r"_v\d+$", "", symbol)
        assert renamed.get(plain, plain) == symbol


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_with_nvcc(architecture: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc here")
    listed = subprocess.run(
        [compiler, "--list-gpu-code"], check=False, capture_output=True, text=True, timeout=60
    ).stdout
    if architecture not in listed.split():
        pytest.skip(f"this nvcc has no {architecture}")
    source = tmp_path / "kernels.cu"
    source.write_text(_C.kernel_source())
    command = [compiler, "-std=c++17", "--fmad=false", f"-arch={architecture}", "-Werror", "all-warnings"]
    done = subprocess.run(
        [*command, "-cubin", "-o", str(tmp_path / "kernels.cubin"), str(source)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("major", "minor"), [(8, 0), (9, 0), (10, 0)])
def test_kernels_compile_at_run_time(major: int, minor: int) -> None:
    """NVRTC needs no GPU."""
    compilers = [name for name in _driver.compilers("13.0") if opens(name)]
    if not compilers:
        pytest.skip("no NVRTC of CUDA 13 here: pip install nvidia-cuda-nvrtc brings it")
    # A type of device that nothing else of these tests uses.
    _C.set_device_driver("xpu", "not opened", compilers)
    code = _C.compile_kernels("xpu", major, minor)
    assert f"sm_{major}{minor}".encode() in code
    # All of them, by the code itself: each kernel has a section of its own.
    assert {name.decode() for name in re.findall(rb"\.text\.(\w+)\0", code)} == set(_C.kernel_names())


def test_a_compiler_that_is_not_there_is_named() -> None:
    _C.set_device_driver("hip", "not opened", ["libnvrtc.so.no"])
    with pytest.raises(RuntimeError, match=r"run-time compiler, NVRTC: libnvrtc\.so\.no"):
        _C.compile_kernels("hip", 9, 0)
    with pytest.raises(RuntimeError, match="no driver is known for devices of type mps"):
        _C.compile_kernels("mps", 9, 0)


def opens(name: str) -> bool:
    """Whether the library is here."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def test_compilers_are_named_by_cudas_major_version() -> None:
    assert _driver.compilers("12.8")[0] == "libnvrtc.so.12"
    assert _driver.compilers("13.0")[0] == "libnvrtc.so.13"
    assert all(name.endswith("libnvrtc.so.13") for name in _driver.compilers("13.0"))
