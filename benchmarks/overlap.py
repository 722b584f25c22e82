"""Times training steps of ranks on different hosts: how much of an exchange over a slow link compute hides.

    python benchmarks/overlap.py                                # 4 hosts, links of 1 Gbit/s, about seven minutes
    python benchmarks/overlap.py --ratios 1 --compute device --modes none exchange awc

Run it as root and without a launcher: it makes a network namespace for each rank, whose link tc limits to --rate
(emulated_hosts.py), and starts its ranks there. The model is an MLP of 2.9 million parameters, the optimizer SGD with
momentum, the topology the exponential-2 graph. The systems take turns (see interleaved.py), each with its own model:

    none                compute alone
    exchange            the exchange of the parameters alone, which AWC, ATC and the wrapper have to hide
    allreduce           an allreduce alone
    awc, atc, ddp_sync  the optimizers, whose ATC hides nothing; DecentralizedDataParallel, mode "sync"
    ddp, ddp gloo       averages of gradients over all ranks by torch's DDP, on fog and on Gloo

The column "link" is the least traffic of an exchange divided by the rate of the link. Compute takes a given multiple of
the time of the exchange (--ratios). There are two kinds of compute:

    device    layers sleep without using the CPU, as if an accelerator computed them
    cpu       larger batches. Compute and the work of the exchange share the cores; if ranks outnumber the cores,
              this work adds to the step even if the exchange is hidden.

The goal for AWC: a step takes less than 1.15 times the longer of compute alone and exchange alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import program
import side_by_side
from emulated_hosts import address
from fogdist.testing.faults.links import parse_rate
from interleaved import Times, take_turns
from report import Row, print_steps, write_json
from training_step import training_step

# The examples show how to train in each mode, so they are measured.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))

if TYPE_CHECKING:
    from side_by_side import Systems
    from torch import nn

LINK = "link"
GLOO = " gloo"
TRANSFERS = ("exchange", "allreduce")
# The headings of the columns, by name.
SYSTEMS = {
    "none": "compute alone",
    "exchange": "exchange alone",
    "awc": "AWC",
    "atc": "ATC",
    "ddp_sync": "Decentralized DDP, sync",
    "ddp": "DDP on fog",
    "ddp gloo": "DDP on Gloo",
    "allreduce": "allreduce alone",
    LINK: "link, at least",
}
KINDS = {"device": "emulated device", "cpu": "CPU"}
# The goal for a step, relative to the longer of compute and exchange.
GOAL = 1.15
PIXELS, HIDDEN = 784, (1024, 1024, 1024)
# The forward pass's part of a step, if the layers are matrix products.
FORWARD_SHARE = 1 / 3
# The batch sizes between which the time of a step is assumed to be linear.
CALIBRATION_BATCHES = (64, 256)
CALIBRATION_SECONDS = 3.0


def device_model(seconds: float) -> nn.Module:
    """Returns the MLP on an emulated device: passes wait beside each layer, by its share of the parameters.

    Args:
        seconds: The time that forward and backward pass sleep together.
    """
    from models import mlp
    from torch import nn

    model: nn.Module = mlp(PIXELS, HIDDEN)
    per_parameter = seconds / sum(parameter.numel() for parameter in model.parameters())
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            wait = per_parameter * sum(p.numel() for p in layer.parameters())
            layer.register_forward_hook(lambda *_, wait=wait: time.sleep(FORWARD_SHARE * wait))
            layer.register_full_backward_pre_hook(
                lambda *_, wait=wait: time.sleep((1 - FORWARD_SHARE) * wait)
            )
    return model


def ways_of(
    names: Sequence[str],
    model: Callable[[], nn.Module],
    batch: int,
    systems: Systems,
    bucket_cap_mb: float | None,
) -> dict[str, Callable[[], object]]:
    """Sets ways up, each with a model of its own; returns what makes a step of each. All ranks call this together.

    Args:
        names: Names in SYSTEMS.
        model: Makes the model.
        batch: The number of rows of a batch.
        systems: The systems of this run.
        bucket_cap_mb: As in the optimizers; None for their defaults.
    """
    import torch
    from fogdist import algorithms
    from modes import MODES, Setup, Trainer

    cap = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
    wrappers: dict[str, Callable[..., Any]] = {
        "awc": partial(algorithms.DecentralizedSGD, order="awc"),
        "atc": algorithms.DecentralizedSGD,
    }

    def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def trainer(name: str) -> Trainer:
        torch.manual_seed(0)
        own = model()
        if name in wrappers:
            return Trainer(own, wrappers[name](sgd(own.parameters()), own, **cap))
        group = systems.gloo if name.endswith(GLOO) else systems.fog
        made: Trainer = MODES[name.removesuffix(GLOO)].make(Setup(own, sgd, group=group))
        return made

    ways: dict[str, Callable[[], object]] = {}
    for name in names:
        if name in TRANSFERS:
            ways[name] = transfer(name, model(), bucket_cap_mb)
        else:
            ways[name] = training_step(trainer(name), (batch, PIXELS), systems.rank)
    return ways


def transfer(name: str, model: nn.Module, bucket_cap_mb: float | None) -> Callable[[], None]:
    """Returns a function that exchanges as many bytes as a model has, in the buckets of the optimizers."""
    import fogdist
    import torch.distributed as dist
    from fogdist.packing import cap_bytes
    from fogdist.training.buckets import FlatBuckets

    flats = FlatBuckets(list(model.parameters()), cap_bytes(bucket_cap_mb)).flats

    def neighbors() -> None:
        works = [fogdist.neighbor_allreduce(flat, enable_topo_check=False, async_op=True) for flat in flats]
        for work in works:
            work.wait()

    def everyone() -> None:
        works = [dist.all_reduce(flat, dist.ReduceOp.AVG, async_op=True) for flat in flats]
        for work in works:
            work.wait()

    return neighbors if name == "exchange" else everyone


def measure_all(arguments: argparse.Namespace) -> None:
    """Runs the benchmark on a rank."""
    import fogdist
    from models import mlp

    systems = side_by_side.join(address(0))
    fogdist.init(lambda n: fogdist.topology.by_name("exp2", n))

    def median(name: str, model: Callable[[], nn.Module], batch: int) -> float:
        """Seconds of a step, from a few."""
        few = argparse.Namespace(seconds=CALIBRATION_SECONDS, iterations=arguments.iterations, back_to_back=1)
        ways = ways_of([name], model, batch, systems, arguments.bucket_cap_mb)
        times, _ = take_turns(ways, systems.mpi, few, are_long=True)
        return 1e-3 * times[name].median

    def plain() -> nn.Module:
        model: nn.Module = mlp(PIXELS, HIDDEN)
        return model

    elements = sum(parameter.numel() for parameter in plain().parameters())
    sent = 4 * elements * len(fogdist.out_neighbor_ranks())
    exchange = median("exchange", plain, 1)
    on_link = 1e3 * 8 * sent / parse_rate(arguments.rate)
    rows: list[Row] = []
    for kind in arguments.compute:
        if kind == "device":
            least = median("none", plain, 1)
        else:
            small, large = (median("none", plain, batch) for batch in CALIBRATION_BATCHES)
            per_sample = (large - small) / (CALIBRATION_BATCHES[1] - CALIBRATION_BATCHES[0])
        for ratio in arguments.ratios:
            goal, batch = ratio * exchange, 1
            model: Callable[[], nn.Module] = plain
            if kind == "device":
                model = partial(device_model, max(goal - least, 0.0))
            else:
                batch = max(1, round(CALIBRATION_BATCHES[0] + (goal - small) / per_sample))
            times, iterations = take_turns(
                ways_of(arguments.modes, model, batch, systems, arguments.bucket_cap_mb),
                systems.mpi,
                arguments,
                are_long=True,
            )
            times[LINK] = Times(on_link, on_link, on_link)
            title = f"{KINDS[kind]}, compute {ratio:g} x exchange"
            rows.append(Row(title, systems.size, "float32", elements, 4 * elements, sent, iterations, times))
            if systems.rank == 0:
                print_row(rows[-1])
    if systems.rank == 0:
        write_json(arguments.rows, {**program.facts(), "rate": arguments.rate}, rows)
    fogdist.shutdown()
    side_by_side.leave()


def longer(row: Row) -> float | None:
    """Milliseconds of the longer of compute alone and exchange alone, if the row has both."""
    if not {"none", "exchange"} <= row.times.keys():
        return None
    return max(row.times["none"].median, row.times["exchange"].median)


def print_row(row: Row) -> None:
    """Prints a table of the ways."""
    bound = longer(row)
    head = f"{row.operation}; {row.ranks} hosts, {os.cpu_count()} cores"
    print_steps(head, row, SYSTEMS, "x longer", lambda name: bound and row.times[name].median / bound)


def print_goals(rows: Sequence[Row]) -> None:
    """Prints where AWC reaches its goal."""
    for row in rows:
        bound = longer(row)
        if bound is None or "awc" not in row.times:
            continue
        share = row.times["awc"].median / bound
        verdict = "met" if share < GOAL else "missed"
        print(f"Goal, {row.operation}: AWC in less than {GOAL} x the longer one: {share:.2f}, {verdict}")


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = program.parser_of(__doc__)
    program.add_options(parser, ranks=[4], seconds=10.0, has_sizes=False, back_to_back=2)
    add = parser.add_argument
    program.add_names(parser, "--modes", [name for name in SYSTEMS if name != LINK])
    program.add_names(parser, "--compute", KINDS, help="of what kind")
    add("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], metavar="X", help="compute over exchange")
    add("--rate", default="1gbit", help="of each link, in the words of tc: 400mbit")
    add("--bucket-cap-mb", type=float, metavar="MIB", help="of the optimizers; by default theirs")
    arguments = program.parse_options(parser)
    try:
        parse_rate(arguments.rate)
    except ValueError as error:
        parser.error(f"--rate: {error}")
    return arguments


def main() -> None:
    """Starts the hosts with their ranks and compares the results with the goal; on a rank, measures."""
    arguments = parse_arguments()
    on_hosts = partial(side_by_side.run_on_hosts, arguments.rate)
    rows = program.run(Path(__file__), arguments, measure_all, SYSTEMS, on_hosts)
    if rows:
        print()
    print_goals(rows)


if __name__ == "__main__":
    main()
