"""`fog doctor`: reports the parts of fog that work on this machine, those that fail, and how to fix them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from fog_cli import machine, version
from fog_cli.machine import Finding
from fog_cli.spawn import Ended, run_program

EXAMPLES = """\
examples:
  fog doctor                   look at everything, and try two ranks
  fog doctor --no-self-test    only look

Each line is ok, note (one host works, something else may not) or bad. The exit status is 0 if what fog needs on one
host works, else 1.
"""

_MPI_ADVICE = (
    "pip install 'mpich>=5', or name your site's MPI with the standard ABI in FOG_MPI_LIBRARY. "
    "Only RMA between hosts needs MPI, and mpiexec without a Store's address"
)
_TCP_ADVICE = "several hosts need it: docs/howto/several_hosts.md"
_RMA_ADVICE = (
    "data between hosts then goes by TCP; FOG_BETWEEN_HOSTS=auto finds that out by itself: docs/launchers.md. If there "
    f"is a fabric for RMA: {_MPI_ADVICE}"
)
_ADVICE = {
    "torch": "install torch 2.11 or later: https://pytorch.org/get-started/locally/",
    "fog": "build it in the folder of fog's sources: pip install --no-build-isolation --force-reinstall --no-deps .",
    "extension": "unset FOG_MPI_LIBRARY if it is set; else the error says what to install",
    "unknown variables": "fog knows no such variables; a typing error? docs/environment.md lists them",
    "MPI library": _MPI_ADVICE,
    "MPI": _MPI_ADVICE,
    "environment": "docs/environment.md lists the variables; correct or unset this one",
}
# The seconds that each program may take that it starts.
_LIMIT = 60.0
# Ranks of a single host do not need these.
_NOT_NEEDED = ("MPI library", "MPI", "CUDA", "NCCL")


def add(parser: argparse.ArgumentParser) -> None:
    """Describes the arguments."""
    parser.add_argument("--no-self-test", dest="self_test", action="store_false", help="do not start ranks")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report."""
    found = []
    area = ""
    for finding in findings(arguments.self_test):
        found.append(finding)
        if finding.area != area:
            area = finding.area
            print(f"{area}")
        print(f"  {finding.state:4}  {finding.name}: {finding.text}", flush=True)
        if finding.advice:
            print(f"        {' ' * len(finding.name)}  -> {finding.advice}", flush=True)
    bad = [finding.name for finding in found if finding.state == "bad"]
    if bad:
        names = ", ".join(name for name in dict.fromkeys(bad) if name != "two ranks")
        print(f"\nNot everything that fog needs on one host works: {names}.")
    else:
        tried = "" if arguments.self_test else ", as far as it can be seen without trying"
        print(f"\nWhat fog needs on one host works{tried}.")
    return 1 if bad else 0


def findings(self_test: bool) -> Iterator[Finding]:
    """Runs all checks in order and yields their findings."""
    yield Finding("versions", "fogdist", "ok", version())
    usable = True
    for finding in loaded(run_program("facts", limit=_LIMIT)):
        usable = usable and finding.state != "bad"
        yield finding
    for finding in machine.findings():
        yield finding
        usable = usable and finding.state != "bad"  # the ranks of a self-test would only time out
    if not self_test:
        return
    if not usable:
        yield Finding("self-test", "two ranks", "bad", "not tried: see above")
        return
    # _FOG_LOCAL_LINKS=0 treats the two ranks as if they were on different hosts.
    for where, advice, words, variables in (
        ("one host", "", ["host"], {}),
        ("TCP", _TCP_ADVICE, ["hosts"], {"_FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "tcp"}),
        ("MPI RMA", _RMA_ADVICE, ["hosts"], {"_FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "rma"}),
    ):
        ended = run_program("self_test", words, limit=_LIMIT, ranks=2, variables=variables)
        yield from tried(ended, where, advice)


def loaded(ended: Ended) -> Iterator[Finding]:
    """Yields the findings that the program `facts` reported."""
    for name, text, error in _steps(ended, 1):
        state = "note" if name in _NOT_NEEDED else "bad"
        if error is None:
            state = "note" if name == "unknown variables" else "ok"
        yield Finding("versions", name, state, error or text, "" if state == "ok" else _ADVICE.get(name, ""))
    if not ended.objects():
        why = ended.why() or "the program that looks said nothing"
        yield Finding("versions", "Python", "bad", why, "see the message")


def tried(ended: Ended, where: str, optional: str = "") -> Iterator[Finding]:
    """Yields the findings that the ranks of a self-test reported.

    Args:
        ended: The result of its two ranks.
        where: The beginning of the names of the findings.
        optional: The advice about a failure, if ranks of a single host do not need these steps.
    """
    report = "ranks of one host do not work; run FOG_LOG_LEVEL=debug fog doctor, and report what it says"
    advice = f"notes about the machine, above, may be the reason. If not: {optional or report}"
    for name, text, error in _steps(ended, 2):
        if name == "end" and error is None:
            continue
        if error is None:
            yield Finding("self-test", f"{where}, {name}", "ok", text)
        else:
            yield Finding("self-test", f"{where}, {name}", "note" if optional else "bad", error, advice)


def _steps(ended: Ended, ranks: int) -> Iterator[tuple[str, str, str | None]]:
    """Yields each step that a rank began: its name, its text, and the error of the first rank with an error."""
    steps: dict[str, list[dict[str, Any]]] = {}
    for rank in range(ranks):
        for line in ended.objects(rank):
            told = steps.setdefault(line["name"], [{} for _ in range(ranks)])
            told[rank] |= line
    for name, told in steps.items():
        texts, errors = [], []
        for rank, lines in enumerate(told):
            if "error" in lines:
                errors.append(f"rank {rank}: {lines['error']}" if ranks > 1 else lines["error"])
            elif "text" in lines:
                texts.append(lines["text"])
            elif lines:
                errors.append(ended.why() or "it ended without a word")
        yield name, texts[0] if texts else "", errors[0] if errors else None
    if not steps and ranks > 1:
        yield "start", "", ended.why() or "the ranks said nothing"
