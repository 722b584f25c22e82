"""Builds the extension fog_pg._C against the installed torch, and makes the package require that version.

Everything else is in pyproject.toml.

Environment:
    FOG_MPICXX: Path of a site's mpicxx. The extension is then compiled against, and linked with, that MPI. Without
        it the extension is compiled against mpi_abi.h of the PyPI package mpich, and finds an ABI library at run time.
    FOG_SANITIZE: Sanitizers to compile with, such as "address,undefined" or "thread", or "coverage" to count the lines
        that run: see `make test-asan` and `make coverage`.
    MAX_JOBS: Number of compilers that run at the same time (default: one per core).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = Path("csrc/process_group_fog")
# The headers of torch that most files include, directly or not.
PRECOMPILED = ["ATen/Functions.h", "torch/csrc/distributed/c10d/Backend.hpp"]
SANITIZE = os.environ.get("FOG_SANITIZE", "")


def fail(message: str) -> None:
    sys.exit(f"fog: {message}")


# Compiling in place needs no version.
if importlib.util.find_spec("setuptools_scm") is None and "build_ext" not in sys.argv:
    fail("the version comes from git, by setuptools-scm, which is not installed: pip install setuptools-scm")
# What only tests use is left out of wheels. Tests run an editable install, or what "setup.py build" makes.
IS_WHEEL = "bdist_wheel" in sys.argv
# These commands only copy files, for any torch.
IS_FOR_ANY_TORCH = not {"sdist", "egg_info", "build_py"}.isdisjoint(sys.argv)
if IS_FOR_ANY_TORCH:
    BuildExtension = build_ext
else:
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension, get_cxx_compiler, include_paths
    except ImportError:
        fail(
            "building needs torch in this environment. Install torch (2.11 or later), mpich, setuptools, setuptools-scm "
            "and ninja, then run pip with --no-build-isolation."
        )


def installed_torch() -> str:
    """Returns the requirement of an isolated build: the torch of the environment for which it builds, if there is one.

    pip runs isolated builds with that environment's interpreter, but with other import folders.
    """
    folders = list({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for distribution in importlib.metadata.distributions(name="torch", path=folders):
        return f"torch=={distribution.version.partition('+')[0]}"
    return "torch>=2.11"


def requirements() -> list[str]:
    """Returns the package's requirements at run time. torch's C++ interface changes with each minor version."""
    if IS_FOR_ANY_TORCH:
        version = ">=2.11"
    else:
        major, minor = torch.__version__.split(".")[:2]
        version = f"=={major}.{minor}.*"
    return [f"torch{version}", "mpich>=5; platform_system == 'Linux'", "networkx>=3", "numpy"]


def mpi_flags() -> tuple[list[str], list[str], list[str]]:
    """Returns include folders, compiler arguments and linker arguments for MPI."""
    if wrapper := os.environ.get("FOG_MPICXX"):
        # Some MPIs still ship C++ bindings, which fog does not use and whose headers give warnings.
        without_bindings = ["-DOMPI_SKIP_MPICXX=1", "-DMPICH_SKIP_MPICXX=1"]
        flags = wrapper_flags(wrapper, "compile")
        # Include folders come before those of the environment, where the package mpich has another mpi.h.
        folders = [flag[2:] for flag in flags if flag.startswith("-I")]
        others = [flag for flag in flags if not flag.startswith("-I")]
        link_flags = ["-Wl,--as-needed", *wrapper_flags(wrapper, "link")]
        return folders, ["-DFOG_NATIVE_MPI", *without_bindings, *others], link_flags
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        fail("mpi_abi.h not found: pip install 'mpich>=5', or set FOG_MPICXX to your site's mpicxx")
    for file in files:
        if file.name == "mpi_abi.h":
            return [str(Path(file.locate()).resolve().parent)], [], []
    fail(
        "the installed mpich package has no mpi_abi.h: pip install 'mpich>=5', or set FOG_MPICXX to your site's mpicxx"
    )
    raise AssertionError


def wrapper_flags(wrapper: str, step: str) -> list[str]:
    """Returns the flags that an mpicxx adds for one step; MPICH and Open MPI have different options for this."""
    for question in (f"--showme:{step}", f"-{step}_info"):
        answer = subprocess.run([wrapper, question], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return [
                flag
                for flag in shlex.split(answer.stdout)
                if flag.startswith(("-I", "-D", "-L", "-l", "-Wl", "-pthread"))
            ]
    fail(f"FOG_MPICXX={wrapper} answers neither --showme:{step} nor -{step}_info")
    raise AssertionError


def check_standard_library(extension: Path) -> None:
    """Removes an extension with a C++ library of its own, beside torch's: its import would end in a crash."""
    if b"\0libstdc++.so" not in extension.read_bytes():  # among the names of the libraries that it needs
        extension.unlink()
        fail(
            f"the compiler {get_cxx_compiler()} links libstdc++ statically, but the extension must share that of torch: "
            "set CXX to one that links libstdc++.so, such as CXX=/usr/bin/g++, and build again"
        )


class BuildFog(BuildExtension):
    """Records the versions for which the extension was built, so that an import elsewhere can explain its failure."""

    def finalize_options(self) -> None:
        # An editable install builds in a temporary folder. With the objects here, ninja compiles only changed files. A
        # native build and one for sanitizers have their own objects.
        super().finalize_options()
        kind = ("-native" if os.environ.get("FOG_MPICXX") else "") + (SANITIZE and f"-{SANITIZE}")
        if IS_WHEEL:  # of any torch: see .ci/wheels.py
            kind += f"-torch-{torch.__version__}"
        self.build_temp = os.path.join(
            "build", f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}{kind}"
        )

    def build_extensions(self) -> None:
        # Most of the time of a compilation is for reading torch's headers, so they are precompiled once. This is left
        # out with compiler caches, which torch puts before the compiler, because by default they then cache nothing.
        (extension,) = self.extensions
        flags = extension.extra_compile_args["cxx"]
        if not any(map(shutil.which, ("ccache", "sccache"))) or "TORCH_NO_COMPILER_WRAPPER" in os.environ:
            # The compiler hides warnings of system headers; torch's own marks for this are lost when headers are
            # precompiled.
            flags[:0] = [f"-isystem{folder}" for folder in include_paths()]
            if header := self.precompile(extension.include_dirs, flags):
                flags[:0] = ["-include", str(header)]
        if IS_WHEEL:  # a Python with a shared library names its own folder, which other machines lack
            for linker in ("linker_so", "linker_so_cxx"):
                words = getattr(self.compiler, linker, [])
                setattr(self.compiler, linker, [word for word in words if not word.startswith("-Wl,-rpath")])
        super().build_extensions()
        check_standard_library(Path(self.get_ext_fullpath(extension.name)))

    def precompile(self, include_dirs: list[str], flags: list[str]) -> Path | None:
        """Compiles PRECOMPILED in a separate folder; returns None if the compiler cannot do that.

        A compiler uses the result if it fits a file's flags, and otherwise reads the header as text; the object is the
        same.
        """
        folders = [
            f"-I{folder}" for folder in (*include_dirs, *self.compiler.include_dirs, *self.include_dirs)
        ]
        # torch sets these macros for all files of an extension.
        macros = ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C"]
        command = [
            *shlex.split(get_cxx_compiler()),
            *self.compiler.compiler_so[1:],
            *folders,
            *flags,
            *macros,
        ]
        version = subprocess.run(
            [command[0], "--version"], capture_output=True, text=True, check=False
        ).stdout
        text = "".join(f"#include <{name}>\n" for name in PRECOMPILED)
        # Another compiler, torch or flag gives another folder, so ninja compiles all files again.
        key = hashlib.sha256("\0".join([text, version, torch.__version__, *command]).encode()).hexdigest()[
            :16
        ]
        header = (Path(self.build_temp) / f"precompiled-{key}" / "torch.hpp").resolve()
        compiled = header.with_name("torch.hpp.gch")
        if not compiled.exists():
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(text)
            partial = header.with_name("partial")
            done = subprocess.run(
                [*command, "-x", "c++-header", str(header), "-o", str(partial)], check=False
            )
            if done.returncode != 0:
                return None
            partial.rename(compiled)
        return header

    def run(self) -> None:
        super().run()
        target = ROOT if self.inplace else Path(self.build_lib)
        (target / "fog_pg" / "_build_info.py").write_text(
            '"""Written by setup.py: what fog_pg._C was built for."""\n\n'
            f"TORCH_VERSIONS = {(torch.__version__,)!r}\n"
            f'VERSION = "{self.distribution.get_version()}"\n'
            f"NATIVE_MPI = {bool(os.environ.get('FOG_MPICXX'))}\n"
        )


def sanitizer_flags() -> list[str]:
    """Returns arguments for the compiler and the linker, which replace Python's: its -fwrapv would hide overflows."""
    if SANITIZE == "coverage":
        return ["--coverage", "-O0", "-fprofile-update=atomic"]
    return (
        [f"-fsanitize={SANITIZE}", "-O1", "-fno-wrapv", "-fno-omit-frame-pointer", "-Wno-tsan"]
        if SANITIZE
        else []
    )


def extension() -> Extension:
    sources = sorted(
        str(source) for source in SOURCES.rglob("*.cpp") if not (IS_WHEEL and source.parent.name == "testing")
    )
    if IS_FOR_ANY_TORCH:
        return Extension("fog_pg._C", sources)
    include_mpi, compile_mpi, link_mpi = mpi_flags()
    # Compilers name a header's folder with links resolved, or without, whichever is shorter.
    packages = Path(torch.__file__).parent.parent
    folders = dict.fromkeys((ROOT, packages, packages.resolve()))
    if SANITIZE == "coverage":  # a process that skips the end of C++ calls this instead, see tests/harness.py
        link_mpi.append("-Wl,-u,__gcov_dump")
    return CppExtension(
        "fog_pg._C",
        sources,
        include_dirs=[str(ROOT / SOURCES), *include_mpi],
        extra_compile_args={
            "cxx": [
                "-std=c++20",
                "-O3",
                *([] if IS_WHEEL else ["-g1"]),
                "-Wall",
                "-Wextra",
                "-Wno-unused-parameter",
                "-ffp-contract=off",  # gives the same bits on every CPU
                "-fvisibility=hidden",
                # Messages and symbols name no folder of the machine that builds.
                *(f"-ffile-prefix-map={folder}/=" for folder in folders),
                *compile_mpi,
                *sanitizer_flags(),
            ]
        },
        extra_link_args=[*link_mpi, *sanitizer_flags()],
    )


setup(
    # Isolated builds ask for this first.
    setup_requires=[installed_torch()] if "egg_info" in sys.argv else [],
    install_requires=requirements(),
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildFog},
)
