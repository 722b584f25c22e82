"""Compares the accuracy of the training modes with that of DDP, with learning rates that are chosen by validation.

    torchrun --nproc_per_node=4 benchmarks/accuracy.py mnist --json mnist.json --lr 0.2 0.4 0.8 \\
        --modes ddp awc atc "ddp_async --slow-rank 0" -- --data DIR --steps 600 --batch-size 32 \\
        --momentum 0 --model convolutional --split labels
    torchrun --nproc_per_node=4 benchmarks/accuracy.py gpt --json gpt.json --lr 6e-3 1.2e-2 \\
        --modes ddp awc "atc --dynamic" -- --steps 600

Runs examples/train_digits.py or examples/train_gpt.py many times in the same processes. Each of --modes is a mode with
its own flags; the flags after -- apply to all runs. First, each mode trains with each learning rate and
--validation, and the rate with the best result is chosen. Then the mode trains with this rate and each of
--seeds, and is tested on data that the choice did not use. The Markdown table has the mean and the standard deviation
of the test results over the seeds, and the loss of accuracy relative to the first of --modes, DDP: mean and standard
deviation of the difference to DDP's run with the same seed. The last column has the samples per second of the ranks
that are not slow.

The file of --json stores the result of each run when it ends. Runs that are in the file are not repeated, so a stopped
program can be continued, and modes can be added later.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fogdist
import program
import torch
import torch.distributed as dist

# The examples are measured. Their folder comes first because benchmarks has a training.py too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

# By task: the example, whether a larger metric is better, and a factor for the output of the metric.
TASKS: dict[str, tuple[str, bool, float]] = {
    "mnist": ("train_digits", True, 100.0),
    "gpt": ("train_gpt", False, 1.0),
}


class Runs:
    """Runs of an example, each made once; all ranks use this object in the same way.

    Args:
        example: Name of the example's module.
        path: File that keeps the results; None to keep them in memory only.
    """

    def __init__(self, example: str, path: Path | None) -> None:
        self._example: Any = importlib.import_module(example)
        self._training: Any = importlib.import_module("training")
        self._path = path
        self._results: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._results = json.loads(path.read_text())
        self._first: argparse.Namespace | None = None

    def result(self, flags: Sequence[str]) -> dict[str, Any]:
        """Returns the example's results for these flags."""
        key = " ".join(flags)
        if key not in self._results:
            result = [self._run(flags)]
            dist.broadcast_object_list(result, src=0)
            self._results[key] = result[0]
            if dist.get_rank() == 0:
                print(f"{result[0]['final']:.4f}  {key}", flush=True)
                if self._path is not None:
                    self._path.write_text(json.dumps(self._results, indent=1) + "\n")
        return self._results[key]

    def _run(self, flags: Sequence[str]) -> dict[str, Any]:
        args = self._example.read_flags(flags)
        args.save_plot_file = None
        if self._first is None:
            self._first = args
            self._training.start(args)
        fogdist.set_topology(args.topology)  # raises if the run before has left windows open
        torch.manual_seed(args.seed)
        with contextlib.redirect_stdout(io.StringIO()):
            result: dict[str, Any] = self._example.run(args, dist.get_rank(), dist.get_world_size())
        gc.collect()  # frees the trained model with its buffers and windows at the same time on all ranks
        return result

    def close(self) -> None:
        """Disconnects from the other ranks."""
        if self._first is not None:
            self._training.end(self._first)


def mean_and_deviation(values: Sequence[float], digits: int) -> str:
    """Returns the mean and the standard deviation of one value, such as "96.96 ± 0.12"."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def read_options() -> argparse.Namespace:
    """Returns the command line; `common` holds the flags after --."""
    own, common = sys.argv[1:], []
    if "--" in own:
        place = own.index("--")
        own, common = own[:place], own[place + 1 :]
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    add("task", choices=list(TASKS))
    add("--modes", nargs="+", required=True, help="each with its flags; others are compared with the first")
    add("--lr", nargs="+", required=True, help="learning rates to choose from; one is taken as it is")
    add("--seeds", nargs="+", default=["1", "2", "3"], help="of the test runs")
    add("--json", type=Path, metavar="FILE", help="takes the results, and has those of before")
    return argparse.Namespace(**vars(parser.parse_args(own)), common=common)


def main() -> None:
    options = read_options()
    example, is_more_better, factor = TASKS[options.task]
    runs = Runs(example, options.json)
    worse = -1.0 if is_more_better else 1.0
    best = max if is_more_better else min
    reference: list[float] = []
    rows: list[str] = []
    for mode in options.modes:
        flags = ["--mode", *mode.split(), *options.common, "--lr"]
        # One rate is taken as it is; of several the one with which the mode is best on validation data.
        finals = {
            rate: runs.result([*flags, rate, "--validation", "--seed", "0"])["final"]
            for rate in (options.lr if len(options.lr) > 1 else [])
        }
        rate = best(finals or options.lr, key=lambda rate: finals.get(rate, 0.0))
        found = [runs.result([*flags, rate, "--seed", seed]) for seed in options.seeds]
        values = [factor * float(each["final"]) for each in found]
        reference = reference or values
        less = [worse * (mine - its) for mine, its in zip(values, reference, strict=True)]
        if not is_more_better:
            less = [100.0 * each / its for each, its in zip(less, reference, strict=True)]
        speed = statistics.fmean(float(each["healthy samples per second"]) for each in found)
        digits = 2 if is_more_better else 4
        rows.append(
            f"| {mode} | {rate} | {mean_and_deviation(values, digits)} | "
            f"{'' if values is reference else mean_and_deviation(less, 2)} | {speed:,.0f} |"
        )
    runs.close()
    if int(os.environ["RANK"]) == 0:
        print("\n".join(rows))


if __name__ == "__main__":
    main()
