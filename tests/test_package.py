"""Tests of the package: the cost of its import, the contents of the archives, their installation and first run."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import typing
import venv
import zipfile
from email.parser import Parser
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import fogdist
import pytest
import torch
from fogdist import algorithms, topology
from fogdist.removed import REMOVED
from scripts import ROOT

from fog_pg import _extension

TORCH = torch.__version__.partition("+")[0]


def run(*command: str | Path, folder: Path = ROOT, timeout: float = 120) -> str:
    """Returns the standard output of a command; raises AssertionError with all of its output if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# --- import -------------------------------------------------------------------------------------------------

IMPORT = """
import sys
import torch

before = set(sys.modules)
import fogdist

added = set(sys.modules) - before
packages = {name.partition(".")[0] for name in added} - sys.stdlib_module_names
parts_of_torch = sorted(name for name in added if name.startswith("torch."))
assert packages <= {"fogdist", "fog_pg", "torch", "numpy"}, sorted(packages)
assert not any(name.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")) for name in added), parts_of_torch
assert len(parts_of_torch) < 20, parts_of_torch
assert "fog_pg._C" not in sys.modules

assert str(torch.ops.fog.neighbor_allreduce.default) == "fog.neighbor_allreduce.default"
assert "neighbor_allreduce" in dir(torch.ops.fog), dir(torch.ops.fog)
fogdist.topology.ring(4)
assert "networkx" in sys.modules and "torch._dynamo" not in sys.modules
"""


def test_import_loads_what_is_heavy_later() -> None:
    run(sys.executable, "-c", IMPORT)


@pytest.mark.parametrize("module", [fogdist, topology, algorithms], ids=lambda module: module.__name__)
def test_names_and_their_types_are_there_at_once(module: typing.Any) -> None:
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value):
            typing.get_type_hints(value)


def test_a_name_that_is_gone_says_what_to_use() -> None:
    for module, names in REMOVED.items():
        for name, instead in names.items():
            assert name.isidentifier(), name
            expected = f"module {module!r} has no attribute {name!r} any more: {instead}"
            with pytest.raises(AttributeError, match=re.escape(expected)):
                getattr(importlib.import_module(module), name)
            with pytest.raises(ImportError, match=re.escape(expected)):
                exec(f"from {module} import {name}")
            assert not hasattr(importlib.import_module(module), name)
        with pytest.raises(AttributeError, match="has no attribute 'other'$"):
            _ = importlib.import_module(module).other


def test_version_is_that_of_the_installed_package() -> None:
    # Only in the environment, because a build leaves metadata in the checkout.
    installed = importlib.metadata.distributions(name="fogdist", path=[sysconfig.get_path("purelib")])
    assert [distribution.version for distribution in installed] == [fogdist.__version__]


# --- archives -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """Returns the names of all files in git that exist."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout of git: what belongs to fog cannot be told")
    names = run("git", "ls-files", "-z").split("\0")
    return [name for name in names if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def tree(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies these files, as they are now, to a folder without git."""
    folder = tmp_path_factory.mktemp("tree")
    for name in sources:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", BUILD_SDIST, str(folder), folder=tree)
    (archive,) = folder.iterdir()
    return archive


def test_source_archive_holds_all_that_git_has(sdist: Path, sources: list[str]) -> None:
    with tarfile.open(sdist) as archive:
        names = [member.name.partition("/")[2] for member in archive if member.isfile()]
        top = archive.getnames()[0]
        information = Parser().parsestr(archive.extractfile(f"{top}/PKG-INFO").read().decode())  # type: ignore[union-attr]
    assert sorted(set(sources) - set(names)) == []
    made = {name for name in set(names) - set(sources) if not name.startswith("fogdist.egg-info/")}
    assert made == {"PKG-INFO", "setup.cfg"}
    # The torch version for which the extension will be built is not known yet.
    assert "torch>=2.11" in information.get_all("Requires-Dist", [])
    assert "requires-dist" in information.get_all("Dynamic", [])
    assert information["Version"] == "0.1.0.dev0"  # without git


def test_wheel_takes_every_module(tree: Path, sources: list[str], tmp_path: Path) -> None:
    run(sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path), folder=tree)
    wanted = {name.removeprefix("python/") for name in sources if name.startswith(("python/", "fog_pg/"))}
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()} == wanted


def test_isolated_build_takes_the_torch_of_its_environment(tree: Path) -> None:
    ask = "from setuptools import build_meta; print(); print(*build_meta.get_requires_for_build_wheel())"
    assert run(sys.executable, "-c", ask, folder=tree).splitlines()[-1] == f"torch=={TORCH}"


def test_version_comes_from_tags(tree: Path) -> None:
    shutil.copytree(tree, copy := tree.with_name("versions"))
    git = ["git", "-c", "user.name=fog", "-c", "user.email=fog@localhost"]
    run(*git, "init", "-q", folder=copy)
    run(*git, "add", "pyproject.toml", folder=copy)
    run(*git, "commit", "-qm", "first", folder=copy)
    ask = [sys.executable, "-m", "setuptools_scm"]
    assert run(*ask, folder=copy).startswith("0.1.0.dev1+g")  # a shallow clone has no tags either
    run(*git, "tag", "v0.2.0", folder=copy)
    assert run(*ask, folder=copy).strip() == "0.2.0"


CHECK_LIBRARY = """
import pathlib, runpy, sys, setuptools
setuptools.setup = lambda **arguments: None
runpy.run_path("setup.py")["check_standard_library"](pathlib.Path(sys.argv[1]))
"""


def test_a_build_without_the_shared_library_of_c_plus_plus_fails(tmp_path: Path) -> None:
    """Regression: the extension that a compiler with a static libstdc++ made crashed when it was imported."""
    source, built = tmp_path / "text.cpp", tmp_path / "text.so"
    source.write_text("#include <iostream>\nvoid text() { std::cout << 1; }\n")
    compiler = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", str(source), "-o", str(built)]
    run(*compiler)
    run(sys.executable, "-c", CHECK_LIBRARY, built)
    run(*compiler, "-static-libstdc++")
    with pytest.raises(AssertionError, match="set CXX"):
        run(sys.executable, "-c", CHECK_LIBRARY, built)
    assert not built.exists()


# --- wheels of a release ------------------------------------------------------------------------------------

WHICH_EXTENSION = """
import sys, torch
torch.__version__ = sys.argv[1]
try:
    from fog_pg import _C, _extension  # a program may use the extension before the first group loads it
    assert _extension.load() is _C
    print(_C.__file__)
except ImportError as error:
    print(error)
"""


def wheel_for(torch_version: str, folder: Path, extension: bytes, version: str = "1.0") -> Path:
    """Returns a wheel with this package as it is, whose extension is said to be for one version of torch."""
    tree, information = (
        folder / f"fogdist-{version}",
        folder / f"fogdist-{version}" / f"fogdist-{version}.dist-info",
    )
    shutil.copytree(ROOT / "fog_pg", tree / "fog_pg", ignore=shutil.ignore_patterns("_C*.so", "__pycache__"))
    (tree / "fog_pg" / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(extension)
    (tree / "fog_pg" / "_build_info.py").write_text(
        f'TORCH_VERSIONS = ({torch_version!r},)\nVERSION = "{version}"\nNATIVE_MPI = False\n'
    )
    information.mkdir()
    minor = ".".join(torch_version.split(".")[:2])
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: fogdist\nVersion: {version}\nRequires-Dist: torch=={minor}.*\n\n"
    )
    (information / "WHEEL").write_text(
        "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n"
    )
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", str(folder), str(tree))
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_one_wheel_has_an_extension_for_each_torch(tmp_path: Path) -> None:
    wheels_of_a_release = runpy.run_path(str(ROOT / ".ci" / "wheels.py"))
    merge, check = wheels_of_a_release["merge"], wheels_of_a_release["check"]
    own = Path(_extension.load().__file__).read_bytes()
    (tmp_path / "other.cpp").touch()
    compiler = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "other.cpp", "-o", "other.so"]
    run(*compiler, folder=tmp_path)
    other = (tmp_path / "other.so").read_bytes()
    wheels = []
    for torch_version, extension in (("9.10.0", other), (torch.__version__, own), ("9.9.1+cpu", other)):
        (tmp_path / torch_version).mkdir()
        wheels.append(wheel_for(torch_version, tmp_path / torch_version, extension))
    merged = merge(wheels, tmp_path / "merged")
    with zipfile.ZipFile(merged) as archive:
        archive.extractall(site := tmp_path / "site")
    own_minor = ".".join(TORCH.split(".")[:2])
    assert {file.parent.name for file in site.rglob("_C*.so")} == {
        f"torch-{own_minor}",
        "torch-9.9",
        "torch-9.10",
    }
    information = Parser().parsestr((site / "fogdist-1.0.dist-info" / "METADATA").read_text())
    assert information.get_all("Requires-Dist") == [f"torch<9.11,>={own_minor}"]

    def ask(version: str) -> str:
        words = ["env", f"PYTHONPATH={site}", sys.executable, "-c", WHICH_EXTENSION, version]
        return run(*words, folder=tmp_path).strip()

    assert Path(ask(torch.__version__)).parent == site / "fog_pg" / f"torch-{own_minor}"
    refused = ask("9.11.0")
    assert f"built for torch {torch.__version__} and 9.9.1+cpu and 9.10.0, this is torch 9.11.0" in refused
    assert "pip install 'torch==9.10.*'" in refused and "folder of fog's sources" not in refused
    check(merged)
    with pytest.raises(ValueError, match=f"two wheels are for torch {re.escape(own_minor)}"):
        merge([wheels[1], wheels[1]], tmp_path / "twice")
    (tmp_path / "later").mkdir()
    later = wheel_for("9.9.1", tmp_path / "later", other, version="2.0")
    with pytest.raises(ValueError, match="these wheels differ"):
        merge([wheels[1], later], tmp_path / "versions")


def test_the_extension_needs_no_library_of_cuda_and_names_no_folder_of_its_build() -> None:
    """So one file serves torch's builds for CPUs and for CUDA."""
    extension = Path(_extension.load().__file__)
    assert b"libtorch_cpu.so" in extension.read_bytes()
    assert runpy.run_path(str(ROOT / ".ci" / "wheels.py"))["faults_of"](extension) == []


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["-Wl,--no-as-needed", "libcudart.so"], "libcudart.so.99"),
        (["-Wl,-rpath,/somewhere"], "/somewhere"),
        (['-DNAME="/home/me/csrc/process_group_fog/file.cpp"'], "/home/me/csrc/process_group_fog"),
        (['-DNAME="fault at /home/me/torch/include/c10/file.h"'], "/home/me/torch/include"),
    ],
)
def test_a_release_has_no_extension_that_runs_on_some_machines_only(
    tmp_path: Path, arguments: list[str], fault: str
) -> None:
    release = runpy.run_path(str(ROOT / ".ci" / "wheels.py"))
    (tmp_path / "file.cpp").write_text("#ifdef NAME\nconst char* name = NAME;\n#endif\n")
    compiler = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "file.cpp"]
    run(*compiler, "-Wl,-soname,libcudart.so.99", "-o", "libcudart.so", folder=tmp_path)
    run(*compiler, *arguments, "-o", "other.so", folder=tmp_path)
    (tmp_path / "wheel").mkdir()
    wheel = wheel_for("9.9.1", tmp_path / "wheel", (tmp_path / "other.so").read_bytes())
    with pytest.raises(ValueError, match=f"has {re.escape(fault)}$"):
        release["check"](wheel)


@pytest.mark.style
def test_hooks_run_the_linters_that_make_runs() -> None:
    """pre-commit has its own list of versions."""
    pinned = set(re.findall(r"[\w-]+==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text()))
    (line,) = re.findall(r"^lint = .*$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert pinned and pinned <= set(re.findall(r"[\w-]+==[\d.]+", line))


# --- clean environments -------------------------------------------------------------------------------------


class Environment:
    """A virtual environment with only pip, isolated from the variables of this environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self._programs = folder / "bin"

    def run(self, *command: str, folder: Path) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FOG_"))}
        path = f"{self._programs}{os.pathsep}{os.environ['PATH']}"
        words = [f"{name}={value}" for name, value in (kept | {"PATH": path, "OMP_NUM_THREADS": "1"}).items()]
        return run("env", "-i", *words, *command, folder=folder, timeout=3600)

    def install(self, *arguments: str, folder: Path) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", *arguments, folder=folder)


def check_consensus(environment: Environment, folder: Path) -> None:
    words = ["torchrun", "--standalone", "--nproc_per_node=4", "average_consensus.py"]
    output = environment.run(*words, folder=folder)
    for rank in range(4):
        assert f"rank {rank}" in output, output
    where = environment.run("python", "-c", "import fogdist; print(fogdist.__file__)", folder=folder)
    assert "site-packages" in where


@pytest.mark.long
def test_archives_install_and_run_in_clean_environments(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
        examples = tmp_path / archive.getnames()[0] / "examples"

    builder, cache = Environment(tmp_path / "builder"), tmp_path / "cache"
    builder.install(
        f"torch=={TORCH}", "setuptools", "setuptools-scm", "ninja", "pybind11", "mpich>=5", folder=tmp_path
    )
    # pip keeps the wheel that it builds, if it has a cache.
    builder.install("--no-build-isolation", f"--cache-dir={cache}", str(sdist), folder=tmp_path)
    check_consensus(builder, examples)

    (wheel,) = cache.rglob("fogdist-*.whl")
    user = Environment(tmp_path / "user")
    user.install(str(wheel), folder=tmp_path)
    assert user.run("python", "-c", "import torch; print(torch.__version__)", folder=tmp_path).startswith(
        TORCH.rpartition(".")[0]
    )
    check_consensus(user, examples)
