"""`fog advise`: measures links, compute and codecs, and recommends topology, local steps, bucket size and compression."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fog_cli import UsageError, add_command, advice, table
from fog_cli.advice import Codec, Network, Setting, pays
from fog_cli.commands import run as run_command
from fog_cli.spawn import objects

_EXAMPLES = """\
examples:
  fog advise -np 4 --parameters 25.6M --step-time 0.18          a model by its size and the time of a step
  fog advise -np 4 --model mine.py                              the script's function make() is timed
  fog advise -np 8 -H a:4,b:4 --parameters 124M --step-time 0.14

make() of the script returns a model and a function without arguments that computes one step of it (forward and backward
pass). Ranks are started as by `fog run`; nothing else should use the links meanwhile. It takes about a second a host.

Of the settings whose step takes at most 5 % longer than compute alone (or, if there are none, than the fastest
setting), it recommends the one with which the ranks' disagreement falls to a tenth in the shortest time. It does so for
exchanges without a codec and with each of some, and says whether these pay.
"""
_SECONDS = 0.1
_TOLERANCE = 0.05
_ELEMENT_BYTES = 4  # of the parameters that --parameters counts


def add(subparsers: Any) -> None:
    """Describes the command."""
    parser = add_command(
        subparsers,
        "advise",
        "measure links and compute, and recommend how to average",
        "Measures the links between ranks and the compute of a step, and recommends a topology, local steps "
        "and a bucket size, and says whether compression pays.",
        _EXAMPLES,
        allow_abbrev=False,
    )
    run_command.add_placing(parser)
    parser.add_argument("--model", metavar="SCRIPT", help="script whose make() is measured")
    parser.add_argument(
        "--parameters", metavar="COUNT", help="trained parameters of the model, as 25.6M or 124000000"
    )
    parser.add_argument("--step-time", type=float, metavar="SECONDS", help="of a step without any exchange")


def run(arguments: argparse.Namespace) -> int:
    """Prints the recommendation."""
    check(arguments)
    words = ["-m", "fog_cli.programs.advise_ranks", str(_SECONDS)]
    if arguments.model:
        words.append(str(Path(arguments.model).resolve()))
    arguments.command, arguments.module = words[1:], True
    with tempfile.TemporaryFile() as output:
        before = os.dup(1)
        os.dup2(output.fileno(), 1)
        try:
            status = run_command.run(arguments)
        finally:
            os.dup2(before, 1)
            os.close(before)
        output.seek(0)
        text = output.read().decode(errors="replace")
    measured: dict[str, Any] = {}
    for each in objects(text):
        if each.keys() & {"host_of", "compute_s"}:  # of the links, and of the script, which may print others
            measured |= each
    if status or not measured:
        sys.stderr.write(text)
        what = (
            "the links were measured, but the script has failed"
            if measured
            else "the ranks have not measured"
        )
        print(f"fog advise: {what}: see above", file=sys.stderr)
        return status or 1
    if measured.get("bytes") == 0:
        print("fog advise: the model has no trained parameters", file=sys.stderr)
        return 2
    report = Report.of(measured, arguments.parameters, arguments.step_time)
    print("\n".join(as_text(report)))
    return 0


@dataclass(frozen=True)
class Report:
    """What is recommended, and of what.

    Attributes:
        network: The links.
        compute: Seconds of a step alone.
        size: Bytes of the parameters.
        found: All settings.
        choice: The recommended one.
        compressed: The recommended one with each codec.
    """

    network: Network
    compute: float
    size: float
    found: Sequence[Setting]
    choice: Setting
    compressed: Sequence[Setting]

    @classmethod
    def of(cls, measured: Mapping[str, Any], parameters: str | None, step_time: float | None) -> Report:
        """Returns the report of what the ranks have measured, and of a model by its size and the time of a step."""
        network = Network.of(measured)
        compute = measured.get("compute_s", step_time)
        size = measured["bytes"] if parameters is None else _ELEMENT_BYTES * count(parameters)
        each = measured.get("element_bytes", _ELEMENT_BYTES)
        found = advice.settings(network, compute, size)
        # No codec takes elements of a byte.
        codecs = [Codec(*codec) for codec in measured["codecs"]] if each > 1 else []
        compressed = advice.with_codecs(network, compute, size, codecs, _TOLERANCE, element_bytes=each)
        return cls(network, compute, size, found, advice.best(found, compute, _TOLERANCE), compressed)


def check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be advised on.

    Raises:
        UsageError: An argument is wrong.
    """
    run_command.check_ranks(arguments.num_proc, 2)
    given = arguments.parameters is not None, arguments.step_time is not None
    if arguments.model:
        if any(given):
            raise UsageError("--model: the script is measured; leave out --parameters and --step-time")
        if not Path(arguments.model).is_file():
            raise UsageError(f"--model {arguments.model}: there is no such script")
    elif not all(given):
        raise UsageError("what is trained? Give --parameters and --step-time, or --model")
    else:
        count(arguments.parameters)
        if not 0 < arguments.step_time < math.inf:
            raise UsageError(f"--step-time: got {arguments.step_time}; allowed are seconds above 0")


def count(text: str) -> int:
    """Returns the number of parameters of "25.6M".

    Raises:
        UsageError: It is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGbB]?)", text)
    number = (
        float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}[match[2].upper()] if match else 0
    )
    if number < 1:
        raise UsageError(f"--parameters: got {text!r}; allowed are counts such as 124000000, 25.6M and 7B")
    return round(number)


def as_text(report: Report) -> list[str]:
    """Returns the lines for people: what was measured, the best setting of each topology and codec, and the choice."""
    network, compute, choice = report.network, report.compute, report.choice
    lines = [
        f"{len(network.host_of)} ranks on {network.hosts} hosts, {report.size / 1e6:.3g} MB of parameters"
    ]
    lines.append(f"  compute      {1e3 * compute:.3g} ms a step")
    if network.hosts > 1:
        links = [f"{8 * rate / 1e9:.3g}" for rate in (min(network.host_rates), max(network.host_rates))]
        shown = links[0] if links[0] == links[1] else " to ".join(links)
        lines.append(f"  hosts' links {shown} Gbit/s, {1e6 * network.latency:.0f} us a message")
    for (a, b), rate in sorted(network.trunks.items()):
        lines.append(f"  site {a} to {b}  {8 * rate / 1e9:.3g} Gbit/s for all hosts together")
    if network.latency_within:
        rate = min(network.local_rates)
        lines.append(f"  within hosts {rate / 1e9:.3g} GB/s, {1e6 * network.latency_within:.0f} us a message")
    rows = [
        (
            *("", "local steps", "bucket MiB", "exchange ms", "step ms", "over compute", "rounds"),
            "s to a tenth",
        )
    ]
    by_way = [
        advice.best([each for each in report.found if each.way.name == name], compute, _TOLERANCE)
        for name in dict.fromkeys(each.way.name for each in report.found)
    ]
    for each in [*by_way, *report.compressed]:
        codec = f", {each.codec.code}" if each.codec else ""
        rows.append(
            (
                f"{'*' if each.way == choice.way and not codec else ' '} {each.way.name}{codec}",
                str(each.local_steps),
                f"{each.bucket_mb:g}",
                f"{1e3 * each.exchange:.3g}",
                f"{1e3 * each.step:.4g}",
                f"{each.step / compute - 1:.1%}",
                str(each.way.rounds),
                f"{each.agreement:.3g}",
            )
        )
    lines += ["", *table(rows), "", f"Recommended: {choice.way.name}", f"  {in_code(choice)}"]
    if network.hosts < 2:
        lines.append("Compression: ranks of one host read each other's tensors in place, so no codec pays.")
    for compressed in report.compressed:
        assert compressed.codec is not None  # as was asked for
        verdict = f"pays: {in_code(compressed)}" if pays(compressed, choice) else "does not pay"
        lines.append(f"Compression with {compressed.codec.code} {verdict}")
    return lines


def in_code(choice: Setting) -> str:
    """Returns the call that a script makes for a setting."""
    topology, _, before = choice.way.code.partition(" after ")
    options = [
        f"topology={topology}",
        f"local_steps={choice.local_steps}",
        f"bucket_cap_mb={choice.bucket_mb:g}",
    ]
    if choice.codec is not None:
        options.append(f"compression={choice.codec.code}")
    call = f'fogdist.DecentralizedOptimizer(optimizer, model, order="awc", {", ".join(options)})'
    return f"{before}; {call}" if before else call
