"""Builds the extension with a sanitizer in a folder of its own, and runs tests on it: sanitized.py asan|tsan [pytest's arguments].

Every process of the tests, including forked ranks, writes what the sanitizer finds to a file. They are printed at the end,
and any finding is a failure.

`sanitized.py coverage` does the same with counters of the lines that run, C++'s and Python's, and prints their shares.
"""

from __future__ import annotations

import collections
import json
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
    " window_guarantees streams faults"
)
TCP = {"FOG_BETWEEN_HOSTS": "tcp", "_FOG_LOCAL_LINKS": "0"}
# Files of tests, the ranks' environment, and what is left out. MPI's RMA on one host calls process_vm_readv, which misleads
# the sanitizers. ThreadSanitizer sees no memory between processes: its ranks are threads; it makes the worlds of 1,000
# ranks, which one thread runs, take minutes each.
NO_RMA = "not [rma"
RUNS = {
    "asan": [(f"{VIRTUAL} {REAL}", {}, NO_RMA), (REAL, TCP, f"{NO_RMA} and not [memory")],
    "tsan": [(VIRTUAL, {}, f"{NO_RMA} and not thousand")],
    "coverage": [("*", {}, "")],
}
ROOT = Path(__file__).resolve().parent.parent
# What coverage.py measures: every process, also those that end without the finalization of Python.
COVERAGE = """[run]
source = {folder}
data_file = {folder}/reports/python
parallel = true
patch =
    _exit
    subprocess
disable_warnings = no-data-collected, module-not-imported
"""
# Sanitizers, libraries that every process needs before all others, and options by environment variable.
KINDS = {
    "asan": (
        "address,undefined",
        ["libasan.so", "libubsan.so"],
        {
            # torch has the same symbols in several libraries; tests refuse memory to the engine; faulthandler is used.
            # An error aborts. Leaks do not change the exit status: Python always leaves some. The search for leaks
            # sometimes crashes itself where it reads threads' dynamic storage.
            "ASAN_OPTIONS": "detect_odr_violation=0:allocator_may_return_null=1:handle_segv=2:abort_on_error=1:exitcode=0"
            ":intercept_tls_get_addr=0",
            "UBSAN_OPTIONS": "halt_on_error=1:abort_on_error=1",
        },
    ),
    "tsan": (
        "thread",
        ["libtsan.so"],
        # Neither Python nor torch is compiled with it, so what it reports there means nothing.
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:die_after_fork=0:exitcode=0:history_size=4"},
    ),
    "coverage": ("coverage", [], {}),
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


def print_coverage(folder: Path, counters: list[str]) -> None:
    """Prints a row a folder of sources; build/coverage/not-run.txt has the lines that nothing ran."""
    lines: dict[str, dict[int, bool]] = collections.defaultdict(lambda: collections.defaultdict(bool))
    coverage = [sys.executable, "-m", "coverage"]
    gcovr = ["gcovr", "--root", str(ROOT), "--filter", f"{ROOT}/csrc/"]
    gcovr += ["--gcov-suspicious-hits-threshold", "0"]  # inner loops run more often than it believes possible
    for command in (
        [*gcovr, "--json", "cpp.json", *counters],
        [*coverage, "combine", "--quiet"],
        # Of what tests compile from a text there is no source.
        [*coverage, "json", "--ignore-errors", "--quiet", "-o", "python.json"],
    ):
        subprocess.run(command, cwd=folder, check=True)
    for file in json.loads((folder / "cpp.json").read_text())["files"]:
        for line in file["lines"]:  # several times, if it is of a template
            lines[file["file"]][line["line_number"]] |= line["count"] > 0
    for file, found in json.loads((folder / "python.json").read_text())["files"].items():
        source = file if (ROOT / file).exists() else f"python/{file}"
        lines[source].update(dict.fromkeys(found["missing_lines"], False))
        lines[source].update(dict.fromkeys(found["executed_lines"], True))
    rows: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    with (folder / "not-run.txt").open("w") as missing:
        for source, ran in sorted(lines.items()):
            row = rows[str(Path(source).parent)]
            row[:] = row[0] + 1, row[1] + len(ran), row[2] + sum(ran.values())
            missing.writelines(f"{source}:{line}\n" for line in sorted(ran) if not ran[line])
    print("| folder | files | lines | not run | share |", "|---|---|---|---|---|", sep="\n")
    for name, (files, count, ran) in sorted(rows.items()):
        print(f"| `{name}` | {files} | {count} | {count - ran} | {100 * ran / max(count, 1):.1f} % |")


def main() -> int:
    kind, *arguments = sys.argv[1:]
    flags, libraries, options = KINDS[kind]
    folder = ROOT / "build" / kind
    shutil.rmtree(folder / "reports", ignore_errors=True)
    (folder / "reports").mkdir(parents=True)
    build = ["setup.py", "--quiet", "build", "--build-lib", str(folder)]
    subprocess.run([sys.executable, *build], cwd=ROOT, env=os.environ | {"FOG_SANITIZE": flags}, check=True)
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "SANITIZED": kind,
        **{name: f"{value}:log_path={folder}/reports/{kind}" for name, value in options.items()},
    }
    python = [sys.executable]
    counters = [str(path) for path in (ROOT / "build").glob("temp.*-coverage")]
    if kind == "coverage":
        (folder / ".coveragerc").write_text(COVERAGE.format(folder=folder))
        for old in (each for path in counters for each in Path(path).rglob("*.gcda")):
            old.unlink()
        python += ["-m", "coverage", "run"]
    else:
        arguments = ["--capture=sys", *arguments]  # UBSan writes to stderr, whatever its log_path
        environment |= {
            "LD_PRELOAD": " ".join(library(name) for name in [*libraries, "libstdc++.so.6"]),
            "UCX_TLS": "^cma",  # MPICH tries that call at its start
            "PYTHONMALLOC": "malloc",  # so that the sanitizer knows each object
        }
    failed = False
    for names, settings, chosen in RUNS[kind]:
        found = {name: sorted((ROOT / "tests").glob(f"test_{name}.py")) for name in names.split()}
        if missing := [name for name, paths in found.items() if not paths]:
            raise FileNotFoundError(f"tests/test_{missing[0]}.py is not there")
        files = [str(path) for paths in found.values() for path in paths]
        # In this folder, because Python looks there first for the package.
        command = [*python, "-m", "pytest", *files, "-k", chosen, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment | settings, check=False)
        failed |= done.returncode not in (0, 5)  # 5: the arguments select no test
    if kind == "coverage":
        print_coverage(folder, counters)
        return failed
    findings = []
    for report in sorted((folder / "reports").iterdir()):
        findings += findings_in(report.read_text())
    print(*findings, f"== {kind}: {len(findings)} findings", sep="\n\n")
    return failed or bool(findings)


if __name__ == "__main__":
    sys.exit(main())
