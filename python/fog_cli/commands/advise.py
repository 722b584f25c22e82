"""`fog advise`: measures links, compute and codecs, and recommends topology, local steps, bucket size and compression."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fog_cli import UsageError, add_command, advice, processes
from fog_cli.advice import Codec, Compression, Network, Setting
from fog_cli.commands import run as run_command

_EXAMPLES = """\
examples:
  fog advise -np 4 --parameters 25.6M --step-time 0.18          a model by its size and the time of a step
  fog advise -np 4 --model mine.py                              the script's function make() is timed
  fog advise -np 8 -H a:4,b:4 --parameters 124M --step-time 0.14 --json

make() of the script returns a model and a function without arguments that computes one step of it (forward and backward
pass). Ranks are started as by `fog run`; nothing else should use the links meanwhile. It takes about a second a host.

Of the settings whose step takes at most --tolerance longer than compute alone (or, if there are none, than the fastest
setting), it recommends the one with which the ranks' disagreement falls to a tenth in the shortest time. It does so for
exchanges without a codec and with each of some, and says whether these pay.
"""
_SECONDS = 0.1


def add(subparsers: Any) -> None:
    """Describes the command."""
    parser = add_command(
        subparsers,
        "advise",
        "measure links and compute, and recommend how to average",
        "Measures the links between ranks and the compute of a step, and recommends a topology, local steps "
        "and a bucket size, with reasons, and says whether compression pays.",
        _EXAMPLES,
        allow_abbrev=False,
    )
    run_command.add_placing(parser)
    parser.add_argument("--model", metavar="SCRIPT", help="script whose make() is measured")
    parser.add_argument(
        "--parameters", metavar="COUNT", help="trained parameters of the model, as 25.6M or 124000000"
    )
    parser.add_argument("--step-time", type=float, metavar="SECONDS", help="of a step without any exchange")
    parser.add_argument(
        "--element-bytes", type=int, default=4, metavar="N", help="bytes of a parameter (default: 4)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="how much longer than compute a step may take (default: 0.05)",
    )
    parser.add_argument(
        "--most-local-steps", type=int, default=max(advice.LOCAL_STEPS), metavar="N", help="default: 1024"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all settings and what was measured as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the recommendation."""
    check(arguments)
    words = ["-m", "fog_cli.programs.advise_ranks", str(_SECONDS)]
    if arguments.model:
        words.append(str(Path(arguments.model).resolve()))
    arguments.command, arguments.module = words[1:], True
    command, environment = run_command.prepare(arguments, os.environ)
    with tempfile.TemporaryFile() as output:
        try:
            status = processes.run(command.words, environment | command.variables, output.fileno())
        except OSError as error:
            raise UsageError(f"{command.words[0]}: {error.strerror}") from error
        output.seek(0)
        text = output.read().decode(errors="replace")
    measured = _measured(text)
    if status or not measured:
        sys.stderr.write(text)
        what = (
            "the links were measured, but the script has failed"
            if measured
            else "the ranks have not measured"
        )
        print(f"fog advise: {what}: see above", file=sys.stderr)
        return status or 1
    network = Network.of(measured)
    compute = measured.get("compute_s", arguments.step_time)
    size = measured["bytes"] if "bytes" in measured else count(arguments.parameters) * arguments.element_bytes
    if not size:
        print("fog advise: the model has no trained parameters", file=sys.stderr)
        return 2
    steps = [each for each in advice.LOCAL_STEPS if each <= arguments.most_local_steps]
    found = advice.settings(network, compute, size, local_steps=steps)
    choice = advice.best(found, compute, arguments.tolerance)
    why = advice.reasons(found, choice, compute, arguments.tolerance)
    per = arguments.element_bytes if "bytes" not in measured else measured["element_bytes"]
    # No codec takes elements of a byte.
    codecs = [Codec(*each) for each in measured["codecs"]] if per > 1 else []
    compressed = advice.compressions(
        network, compute, size, codecs, arguments.tolerance, element_bytes=per, local_steps=steps
    )
    if arguments.json:
        told = as_json(network, found, choice, why, compute, size, arguments.tolerance)
        told["compression"] = compression_json(network, compressed)
        print(json.dumps(told, indent=1))
    else:
        lines = as_text(network, found, choice, why, compute, size, arguments.tolerance)
        print("\n".join([*lines, *compression_text(network, choice, compressed)]))
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be advised on.

    Raises:
        UsageError: An argument is wrong.
    """
    if arguments.num_proc < 2:
        raise UsageError(f"-np: got {arguments.num_proc}; allowed are numbers from 2 on")
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
    if arguments.element_bytes not in (1, 2, 4, 8):
        raise UsageError(f"--element-bytes: got {arguments.element_bytes}; allowed are 1, 2, 4 and 8")
    if not 0 < arguments.tolerance <= 10:
        raise UsageError(f"--tolerance: got {arguments.tolerance}; allowed are numbers above 0, up to 10")
    if arguments.most_local_steps < 1:
        raise UsageError(
            f"--most-local-steps: got {arguments.most_local_steps}; allowed are numbers from 1 on"
        )


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


def as_text(
    network: Network,
    found: Sequence[Setting],
    choice: Setting,
    why: Sequence[str],
    compute: float,
    size: float,
    tolerance: float,
) -> list[str]:
    """Returns the lines for people: what was measured, the best setting of each topology, the choice and why."""
    lines = [f"{len(network.host_of)} ranks on {network.hosts} hosts, {size / 1e6:.3g} MB of parameters"]
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
    names = list(dict.fromkeys(each.way.name for each in found))
    rows = [
        ("", "local steps", "bucket MiB", "exchange ms", "step ms", "over compute", "rounds", "s to a tenth")
    ]
    for name in names:
        each = advice.best([one for one in found if one.way.name == name], compute, tolerance)
        rows.append(
            (
                f"{'*' if each.way == choice.way else ' '} {name}",
                str(each.local_steps),
                f"{each.bucket_mb:g}",
                f"{1e3 * each.exchange:.3g}",
                f"{1e3 * each.step:.4g}",
                f"{each.step / compute - 1:.1%}",
                str(each.way.rounds),
                f"{each.agreement:.3g}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines.append("")
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    lines += ["", f"Recommended: {choice.way.name}", f"  {in_code(choice)}", *(f"  {each}" for each in why)]
    return lines


def compression_text(network: Network, choice: Setting, found: Sequence[Compression]) -> list[str]:
    """Returns the lines about codecs."""
    if network.hosts < 2:
        return ["", "Compression: ranks of one host read each other's tensors in place, so no codec pays."]
    if not found:
        return ["", "Compression: no codec takes parameters of one byte."]
    lines = [""]
    for each in found:
        best, codec = each.choice, each.codec
        head = (
            f"{codec.code}: {codec.element_bytes:.3g} bytes an element, {1e3 * each.seconds:.3g} ms for encoding and decoding. "
            f"With {best.way.name}, {best.local_steps} local steps and buckets of {best.bucket_mb:g} MiB an exchange takes "
            f"{1e3 * best.exchange:.3g} ms, most of it for {best.limit}, and a step {1e3 * best.step:.4g} ms; "
            f"{best.agreement:.3g} s to a tenth instead of {choice.agreement:.3g}."
        )
        speed = _limit_bits_per_s(network, each)
        words = "" if speed is None else f"{speed / 1e9:.3g} Gbit/s"
        if each.pays:
            until = f", up to links of about {words}" if words else ""
            lines += [f"Compression with {head}", f"  It pays{until}: {in_code(best)}"]
        else:
            below = f"; it would on links below about {words}" if words else " on any link"
            lines += [f"Compression with {head}", f"  It does not pay{below}."]
    return lines


def _limit_bits_per_s(network: Network, found: Compression) -> float | None:
    """The speed of the slowest host's link, or of the line between sites, up to which a codec pays."""
    rates = [*network.trunks.values()] or [rate for rate in network.host_rates if rate < math.inf]
    return 8 * found.limit * min(rates) if found.limit is not None and rates else None


def compression_json(network: Network, found: Sequence[Compression]) -> list[dict[str, Any]]:
    """Returns the same for programs."""
    return [
        {
            **dataclasses.asdict(each.codec),
            "codec_s": each.seconds,
            "topology": each.choice.way.name,
            "local_steps": each.choice.local_steps,
            "bucket_mb": each.choice.bucket_mb,
            "exchange_s": each.choice.exchange,
            "limit": each.choice.limit,
            "step_s": each.choice.step,
            "agreement_s": each.choice.agreement,
            "pays": each.pays,
            "pays_up_to_bits_per_s": _limit_bits_per_s(network, each),
            "call": in_code(each.choice),
        }
        for each in found
    ]


def in_code(choice: Setting) -> str:
    """Returns the call that a script makes for a setting."""
    options = f"local_steps={choice.local_steps}, bucket_cap_mb={choice.bucket_mb:g}"
    mixing, _, before = choice.way.code.partition(" after ")
    if choice.codec is not None:
        argument = f"compression={choice.codec.code}"
        mixing = f"Machines({argument})" if before else f"Neighbors({mixing}, {argument})"
    call = f'DecentralizedSGD(optimizer, model, order="awc", mixing={mixing}, {options})'
    return f"{before}; {call}" if before else call


def as_json(
    network: Network,
    found: Sequence[Setting],
    choice: Setting,
    why: Sequence[str],
    compute: float,
    size: float,
    tolerance: float,
) -> dict[str, Any]:
    """Returns the same for programs, with all settings."""

    def shown(each: Setting) -> dict[str, Any]:
        return {
            "topology": each.way.name,
            "mixing": each.way.code,
            "local_steps": each.local_steps,
            "bucket_mb": each.bucket_mb,
            "exchange_s": each.exchange,
            "limit": each.limit,
            "step_s": each.step,
            "rounds": each.way.rounds,
            "agreement_s": each.agreement,
            "sent_bytes": each.sent,
        }

    about = dataclasses.asdict(network)
    about["host_rates"] = [None if rate == math.inf else rate for rate in network.host_rates]
    about["local_rates"] = [None if rate == math.inf else rate for rate in network.local_rates]
    about["trunks"] = [[a, b, rate] for (a, b), rate in sorted(network.trunks.items())]
    return {
        "network": about,
        "compute_s": compute,
        "parameter_bytes": size,
        "tolerance": tolerance,
        "choice": shown(choice),
        "code": in_code(choice),
        "reasons": list(why),
        "settings": [shown(each) for each in found],
    }


def _measured(text: str) -> Mapping[str, Any]:
    """What the first rank has printed, of the links and of the script; lines begin with the rank."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"\[\w+\] (\{.*\})", line)
        if match and ('"host_of"' in match[1] or '"compute_s"' in match[1]):
            found |= json.loads(match[1])
    return found
