"""The MPI installations of tests/test_mpi.py: where they are, and how to start ranks with them.

``python tests/mpi_installations.py`` (``make test-mpi``) installs all MPIs except the package mpich below build/mpi,
and builds fog against Open MPI there. It changes neither the system nor the Python environment.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from scripts import ROOT

DIRECTORY = ROOT / "build" / "mpi"
INTEL = DIRECTORY / "intel"
OPEN_MPI = DIRECTORY / "openmpi"
# fog built against Open MPI.
NATIVE = OPEN_MPI / "fog"

HOW_TO_GET = "make test-mpi installs it"
DEBIAN_PACKAGES = ["openmpi-bin", "libopenmpi-dev"]
# Dependencies for Fortran and documentation only.
NOT_NEEDED = ("m4", "autoconf", "automake", "autotools-dev", "gfortran", "libgfortran", "libjs-")


class Missing(Exception):
    """An MPI is missing; the text says what to do."""


@dataclasses.dataclass(frozen=True)
class Installation:
    """An MPI that can run fog.

    Attributes:
        name: A name for messages.
        mpiexec: The words before the number of ranks.
        environment: Environment variables for its launcher and fog.
    """

    name: str
    mpiexec: list[str]
    environment: Mapping[str, str]

    def launcher(self, ranks: int) -> list[str]:
        """Returns the words before a script's path."""
        return [*self.mpiexec, "-n", str(ranks), sys.executable]


def mpich() -> Installation:
    """Returns the package mpich of this interpreter, which fog uses by default."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        raise Missing("the package mpich brings no mpiexec to this interpreter")
    return Installation("MPICH", [str(mpiexec)], {})


def intel() -> Installation:
    """Returns the package impi-rt, used through FOG_MPI_LIBRARY."""
    library = INTEL / "lib" / "libmpi_abi.so.1"
    if not library.exists():
        raise Missing(f"needs the package impi-rt: {HOW_TO_GET}")
    environment = {
        "I_MPI_ROOT": str(INTEL),
        "FOG_MPI_LIBRARY": str(library),
        "LD_LIBRARY_PATH": str(library.parent),  # its own libfabric, which it needs between hosts
    }
    return Installation("Intel(R) MPI", [str(INTEL / "bin" / "mpiexec.hydra")], environment)


def open_mpi() -> Installation:
    """Returns Debian's Open MPI, with fog built against it."""
    if not (mpirun := _open_mpi_program("mpirun")):
        raise Missing(f"needs Debian's openmpi-bin and libopenmpi-dev: {HOW_TO_GET}")
    built = next(NATIVE.glob("fog_pg/_C*.so"), None)
    if built is None:
        raise Missing("needs fog built against Open MPI: make test-mpi builds it")
    # The build itself writes _build_info.py.
    python = [source for source in ROOT.glob("fog_pg/*.py") if source.name != "_build_info.py"]
    sources = [*ROOT.glob("csrc/**/*.[ch]pp"), *python, *ROOT.glob("python/**/*.py")]
    if max(source.stat().st_mtime for source in sources) > built.stat().st_mtime:
        raise Missing("fog built against Open MPI is older than the sources: make test-mpi builds it anew")
    environment = _open_mpi_environment() | {
        "PYTHONPATH": str(NATIVE),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Hides warnings about missing network drivers and compression.
        "PMIX_MCA_pcompress_base_silence_warning": "1",
        "OMPI_MCA_mca_base_component_show_load_errors": "0",
    }
    return Installation("Open MPI", [mpirun, "--oversubscribe", "--bind-to", "none"], environment)


def _open_mpi_program(name: str) -> str | None:
    """Returns the path of one of Open MPI's programs: the system's, or the one below build/mpi."""
    own = OPEN_MPI / "root" / "usr" / "bin" / f"{name}.openmpi"
    return shutil.which(f"{name}.openmpi") or (str(own) if own.exists() else None)


def _open_mpi_environment() -> dict[str, str]:
    """Returns the environment that programs below build/mpi need to find their parts; the system's need none."""
    if shutil.which("mpirun.openmpi"):
        return {}
    root = OPEN_MPI / "root"
    libraries = f"lib/{platform.machine()}-linux-gnu"
    return {
        "OPAL_PREFIX": str(root / "usr"),
        "PMIX_INSTALL_PREFIX": str(root / "usr" / libraries / "pmix2"),
        "LD_LIBRARY_PATH": f"{root / 'usr' / libraries}:{root / libraries}",
    }


def _run(*command: str | Path, directory: Path = ROOT, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        check=False,
        cwd=directory,
        env=os.environ | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        words = " ".join(str(word) for word in command)
        raise Missing(f"{words}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def _pip(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run(*pip, *arguments, environment=environment)


def install_intel() -> None:
    """Installs impi-rt below build/mpi."""
    if not (INTEL / "lib" / "libmpi_abi.so.1").exists():
        _pip("install", "--ignore-installed", "--prefix", INTEL, "impi-rt")


def install_open_mpi() -> None:
    """Unpacks Debian's Open MPI below build/mpi, unless the system has it, and builds fog against it."""
    if not _open_mpi_program("mpicxx"):
        if not shutil.which("apt-get"):
            raise Missing("Open MPI: no apt-get here, and no mpicxx.openmpi")
        archives = OPEN_MPI / "archives"
        archives.mkdir(parents=True, exist_ok=True)
        plan = _run("apt-get", "--simulate", "--no-install-recommends", "install", *DEBIAN_PACKAGES)
        names = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
        wanted = [
            name
            for name in names
            if name in DEBIAN_PACKAGES or not (name.startswith(NOT_NEEDED) or name.endswith("-dev"))
        ]
        _run("apt-get", "download", *wanted, directory=archives)
        for archive in sorted(archives.glob("*.deb")):
            _run("dpkg", "--extract", archive, OPEN_MPI / "root")
    flags = f"{sysconfig.get_config_var('CFLAGS') or ''} -Werror"  # every warning is an error
    environment = _open_mpi_environment() | {
        "FOG_MPICXX": str(_open_mpi_program("mpicxx")),
        "CFLAGS": flags,
        "CXXFLAGS": flags,
    }
    _pip(
        *("install", "--no-build-isolation", "--no-deps", "--upgrade", "--target", NATIVE, ROOT),
        environment=environment,
    )


def main() -> int:
    failures = 0
    for install in (install_intel, install_open_mpi):
        print(f"== {install.__doc__}", flush=True)
        try:
            install()
        except Missing as missing:
            print(f"   not done: {missing}", file=sys.stderr, flush=True)
            failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
