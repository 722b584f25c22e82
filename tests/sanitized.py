"""Builds the extension with a sanitizer in a folder of its own, and runs tests on it: sanitized.py asan|tsan [pytest's arguments].

Every process of the tests, including forked ranks, writes what the sanitizer finds to a file. They are printed at the end,
and any finding is a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Codecs and virtual ranks need no wire.
VIRTUAL = "compression virtual_ranks virtual_sums agreement"
REAL = (
    "collectives neighbor random_exchanges compressed_exchanges group_operations hierarchical windows"
    " window_guarantees compressed_windows streams faults"
)
TCP = {"FOG_BETWEEN_HOSTS": "tcp", "FOG_LOCAL_LINKS": "0"}
# Files of tests and the ranks' environment. ThreadSanitizer sees no memory between processes: its ranks are threads.
RUNS = {"asan": [(f"{VIRTUAL} {REAL}", {}), (REAL, TCP)], "tsan": [(VIRTUAL, {})]}
ROOT = Path(__file__).resolve().parent.parent
# Sanitizers, libraries that every process needs before all others, and options by environment variable.
KINDS = {
    "asan": (
        "address,undefined",
        ["libasan.so", "libubsan.so"],
        {
            # torch has the same symbols in several libraries; tests refuse memory to the engine; faulthandler is used.
            # An error aborts. Leaks do not change the exit status: Python always leaves some.
            "ASAN_OPTIONS": "detect_odr_violation=0:allocator_may_return_null=1:handle_segv=2:abort_on_error=1:exitcode=0",
            "UBSAN_OPTIONS": "halt_on_error=1:abort_on_error=1",
        },
    ),
    "tsan": (
        "thread",
        ["libtsan.so"],
        # Neither Python nor torch is compiled with it, so what it reports there means nothing.
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:die_after_fork=0:exitcode=0:history_size=4"},
    ),
}


def library(name: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def findings_in(report: str) -> list[str]:
    """Returns the findings of one process, without memory that only Python and torch keep until the end."""
    parts = re.split(r"^=+\n|\n\n(?=(?:Direct|Indirect) leak of|SUMMARY)", report, flags=re.MULTILINE)
    return [
        part
        for part in parts
        if (
            "_C." in part
            if part.startswith("Direct leak")
            else re.match(r"(==\d+==ERROR: A|WARNING: T|.*runtime error)", part)
        )
    ]


def main() -> int:
    kind, *arguments = sys.argv[1:]
    flags, libraries, options = KINDS[kind]
    folder = ROOT / "build" / kind
    shutil.rmtree(folder / "reports", ignore_errors=True)
    (folder / "reports").mkdir(parents=True)
    build = ["setup.py", "--quiet", "build", "--build-lib", str(folder)]
    subprocess.run([sys.executable, *build], cwd=ROOT, env=os.environ | {"FOG_SANITIZE": flags}, check=True)
    environment = (
        os.environ
        | {
            "LD_PRELOAD": " ".join(library(name) for name in [*libraries, "libstdc++.so.6"]),
            "PYTHONPATH": str(folder),
            "UCX_TLS": "^cma",  # a call of process_vm_readv with which MPICH tries the system misleads the sanitizers
            "PYTHONMALLOC": "malloc",  # so that the sanitizer knows each object
            **{name: f"{value}:log_path={folder}/reports/{kind}" for name, value in options.items()},
        }
    )
    failed = False
    for names, settings in RUNS[kind]:
        files = [f"{ROOT}/tests/test_{name}.py" for name in names.split()]
        # Without the call that UCX_TLS forbids, MPI puts nothing between processes of one host.
        command = [sys.executable, "-m", "pytest", "-k", "not [rma and not late_put", *files, *arguments]
        # In this folder, because Python looks there first for the package.
        done = subprocess.run(command, cwd=folder, env=environment | settings, check=False)
        failed |= done.returncode not in (0, 5)  # 5: the arguments select no test
    findings = []
    for report in sorted((folder / "reports").iterdir()):
        findings += findings_in(report.read_text())
    print(*findings, f"== {kind}: {len(findings)} findings", sep="\n\n")
    return failed or bool(findings)


if __name__ == "__main__":
    sys.exit(main())
