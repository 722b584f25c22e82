"""`fog advise`: measures links, compute and codecs, and recommends topology, local steps, bucket size and compression."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fog_cli import UsageError, count, number, table
from fog_cli.commands import run as run_command
from fog_cli.spawn import Ended

if TYPE_CHECKING:
    from fogdist.tuning.decision import Setting

EXAMPLES = """\
examples:
  fog advise -np 4 --parameters 25.6M --step-time 0.18          a model by its size and the time of a step
  fog advise -np 4 --model mine.py                              the script's function make() is timed
  fog advise -np 8 -H a:4,b:4 --parameters 124M --step-time 0.14

make() of the script returns a model and a function without arguments that computes one step of it (forward and backward
pass). Ranks are started as by `fog run`; nothing else should use the links meanwhile. It takes about a second a host.

Of the settings whose step takes at most 5 % longer than compute alone (or, if there are none, than the fastest
setting), it recommends the one with which the ranks' disagreement falls to a tenth in the shortest time: averages of
parameters with and without a codec, SparseLoCo, or DiLoCo, whichever comes first. Where DDP is about as fast, it says so.
It prints what to import and to call, and what the choice costs in accuracy, as far as that was measured.
"""
_SECONDS = 0.1
_ELEMENT_BYTES = 4  # of the parameters that --parameters counts
_COLUMNS = "", "local steps", "bucket MiB", "exchange ms", "step ms", "over compute", "rounds", "s to a tenth"


def add(parser: argparse.ArgumentParser) -> None:
    """Describes the arguments."""
    run_command.add_placing(parser, 2)
    parser.add_argument("--model", metavar="SCRIPT", help="script whose make() is measured")
    parser.add_argument(
        "--parameters",
        type=count,
        metavar="COUNT",
        help="trained parameters of the model, as 25.6M or 124000000",
    )
    parser.add_argument(
        "--step-time", type=number(float, 1e-6), metavar="SECONDS", help="of a step without any exchange"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the recommendation."""
    check(arguments)
    words = ["fog_cli.programs.advise_ranks", str(_SECONDS)]
    if arguments.model:
        words.append(str(Path(arguments.model).resolve()))
    arguments.command, arguments.module = words, True
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
    for each in Ended(status, text, "").objects():
        if each.keys() & {"host_of", "compute_s"}:  # of the links, and of the script, which may print others
            measured |= each
    if status or not measured:
        sys.stderr.write(text)
        what = "the ranks have not measured"
        if measured:
            what = "the links were measured, but the script has failed"
        print(f"fog advise: {what}: see above", file=sys.stderr)
        return status or 1
    if measured.get("bytes") == 0:
        print("fog advise: the model has no trained parameters", file=sys.stderr)
        return 2
    print("\n".join(report(measured, arguments.parameters, arguments.step_time)))
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be advised on.

    Raises:
        UsageError: An argument is wrong.
    """
    given = arguments.parameters is not None, arguments.step_time is not None
    if arguments.model:
        if any(given):
            raise UsageError("--model: the script is measured; leave out --parameters and --step-time")
        if not Path(arguments.model).is_file():
            raise UsageError(f"--model {arguments.model}: there is no such script")
    elif not all(given):
        raise UsageError("what is trained? Give --parameters and --step-time, or --model")


def report(measured: Mapping[str, Any], parameters: int | None, step_time: float | None) -> list[str]:
    """Returns the lines to print: what was measured, the best setting of each topology and codec, and the choice.

    Args:
        measured: By the ranks, see `fog_cli.programs.advise_ranks`.
        parameters: How many there are, if no script was measured.
        step_time: The seconds of a step, likewise.
    """
    from fogdist.tuning.decision import AVERAGES, best, decide, pays
    from fogdist.tuning.network import Network
    from fogdist.tuning.prediction import Codec

    network = Network.of(measured)
    compute = measured.get("compute_s", step_time)
    size = measured["bytes"] if parameters is None else _ELEMENT_BYTES * parameters
    element_bytes = measured.get("element_bytes", _ELEMENT_BYTES)
    codecs = {}
    if element_bytes > 1:  # no codec takes elements of a byte
        codecs = {each[0]: Codec.of(each, element_bytes) for each in measured["codecs"]}
    decision = decide(network, [compute], size, codecs)
    choice = decision.setting
    lines = [
        f"{len(network.host_of)} ranks on {network.hosts} hosts, {size / 1e6:.3g} MB of parameters",
        f"  compute      {1e3 * compute:.3g} ms a step",
    ]
    if network.hosts > 1:
        links = [f"{8 * rate / 1e9:.3g}" for rate in (min(network.host_rates), max(network.host_rates))]
        shown = links[0] if links[0] == links[1] else " to ".join(links)
        lines.append(f"  hosts' links {shown} Gbit/s, {1e6 * network.latency:.0f} us a message")
    for (a, b), rate in sorted(network.trunks.items()):
        lines.append(f"  site {a} to {b}  {8 * rate / 1e9:.3g} Gbit/s for all hosts together")
    if network.latency_within:
        rate = min(network.local_rates)
        lines.append(f"  within hosts {rate / 1e9:.3g} GB/s, {1e6 * network.latency_within:.0f} us a message")
    groups: dict[tuple[str, str], list[Setting]] = {}
    averages: dict[str, list[Setting]] = {}  # by codec
    for each in decision.found:
        code = each.codec.code if each.codec else ""
        # Of averages with a codec one row for all topologies.
        of_codec = each.method is AVERAGES and code
        groups.setdefault((each.method.name, code if of_codec else name_of(each)), []).append(each)
        if each.method is AVERAGES:
            averages.setdefault(code, []).append(each)
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for found in groups.values():
        row = choice if choice in found else best(found, compute)
        rows.append(_cells(row, compute, is_choice=row is choice))
    lines += [
        "",
        *table(rows),
        "",
        f"Recommended: {name_of(choice)}",
        *(f"  {line}" for line in in_code(choice)),
    ]
    lines += [f"Why: {decision.reason}", f"Accuracy: {decision.loss}"]
    if network.hosts < 2:
        lines.append("Compression: ranks of one host read each other's tensors in place, so no codec pays.")
    plain = best(averages.pop(""), compute)
    for code, found in averages.items():
        verdict = "pays" if pays(best(found, compute), plain) else "does not pay"
        lines.append(f"Averages with {code}: it {verdict}")
    return lines


def _cells(setting: Setting, compute: float, *, is_choice: bool) -> tuple[str, ...]:
    """Returns a row of the table."""
    return (
        f"{'*' if is_choice else ' '} {name_of(setting)}",
        str(setting.local_steps),
        f"{setting.bucket_mb:g}",
        f"{1e3 * setting.exchange:.3g}",
        f"{1e3 * setting.step:.4g}",
        f"{setting.step / compute - 1:.1%}",
        str(setting.way.rounds),
        f"{setting.agreement:.3g}",
    )


def name_of(setting: Setting) -> str:
    """Returns a short name of a method, its topology and its codec."""
    from fogdist.tuning.decision import AVERAGES, DDP

    if setting.method is DDP:
        return "DDP"
    name = setting.way.name if setting.method is AVERAGES else setting.method.name
    return f"{name}, {setting.codec.code}" if setting.codec else name


def in_code(choice: Setting) -> list[str]:
    """Returns the lines that a script writes: what it imports, and the call that makes a setting."""
    from fogdist.tuning.decision import AVERAGES, DDP

    if choice.method is DDP:
        return [
            "from torch.nn.parallel import DistributedDataParallel",
            "model = DistributedDataParallel(model)",
        ]
    options = [f"local_steps={choice.local_steps}", f"bucket_cap_mb={choice.bucket_mb:g}"]
    imports, before = ["import fogdist"], ""
    call = f"fogdist.algorithms.{choice.method.name}"
    if choice.method is AVERAGES:
        call = f"fogdist.{choice.method.name}"
        topology, _, before = choice.way.code.partition(" after ")
        options = [choice.method.options, f"topology={topology}", *options]
        if "topology." in choice.way.code:
            imports.append("from fogdist import topology")
        if topology.endswith("()"):
            imports.append(f"from fogdist.algorithms import {topology.removesuffix('()')}")
    if choice.codec is not None:
        options.append(f"compression={choice.codec.code}")
        imports.append(f"from fogdist.compression import {choice.codec.code.partition('(')[0]}")
    calls = [before] if before else []
    return ["; ".join(imports), *calls, f"optimizer = {call}(optimizer, model, {', '.join(options)})"]
