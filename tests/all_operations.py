"""Runs every operation, checked exactly, under any launcher; no part of the script knows which one started it.

The functions that other tests send to their ranks run here too, and also with tensors that are too large for those
tests. Every rank ends with one line: its place, the MPI library, and how many of these functions it ran.

    torchrun --nproc_per_node=4 tests/all_operations.py
    mpiexec -n 4 python tests/all_operations.py --hosts 0 0 1 1
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable

import fogdist
import test_collectives as collectives
import test_hierarchical as hierarchical
import test_neighbor as neighbors
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from operations import COLLECTIVES, REDUCING, WITHOUT_WORK, prepare
from reference import HALVES, Checks, make_input, mix
from test_random_exchanges import large_cases, run_cases

MIB = 1 << 20
# Bytes of each tensor that one rank sends to one rank: more than any MPI protocol sends in one piece.
LARGE_BYTES = 9 * MIB


def large_collective(operation: str) -> None:
    dtype = torch.bfloat16 if operation in REDUCING else torch.uint8
    numel = LARGE_BYTES // dtype.itemsize + 1  # odd, so the ranks' parts of it differ
    ready = prepare(operation, dtype, (numel,), root=dist.get_world_size() - 1)
    ready.start(False)
    with Checks() as checks:
        ready.verify(checks, f"{operation} {dtype} of {numel}")


def large_messages() -> None:
    collectives.exchange_with_next([torch.bfloat16], [LARGE_BYTES // torch.bfloat16.itemsize + 1])


def large_neighbor_exchanges() -> None:
    rank, size = fogdist.rank(), fogdist.size()
    graph = topologies.ring(size)
    fogdist.set_topology(graph)
    matrix = topologies.mixing_matrix(topologies.uniform_weights(graph))
    sources = sorted(source for source in graph.predecessors(rank) if source != rank)
    numel = LARGE_BYTES // torch.bfloat16.itemsize + 1
    inputs = [make_input(r, torch.bfloat16, numel) for r in range(size)]
    with Checks() as checks:
        output = fogdist.neighbor_allreduce(inputs[rank])
        checks.close("neighbor_allreduce", output, mix(inputs, matrix)[rank])
        output = fogdist.neighbor_allgather(inputs[rank])
        checks.equal("neighbor_allgather", output, torch.cat([inputs[source] for source in sources]))


def steps(large: bool) -> list[tuple[Callable[..., None], tuple[object, ...]]]:
    """Returns every function to run, with its arguments."""
    found: list[tuple[Callable[..., None], tuple[object, ...]]] = []
    found += [
        (collectives.sweep, (COLLECTIVES,)),
        (collectives.test_uneven_parts, ()),
        (collectives.test_coalescing_manager, (True,)),
        (collectives.test_many_operations_in_flight, ()),
        (collectives.exchange_with_next, ([*HALVES, torch.float32], collectives.SMALL + collectives.LARGE)),
        (collectives.test_tags_out_of_order, ()),
        (collectives.test_recv_from_any_source, ()),
        (collectives.test_batch_isend_irecv, ()),
        (collectives.test_object_collectives, ()),
        (collectives.test_subgroups, ()),
        (run_cases, (large_cases(dist.get_world_size()),)),
        (neighbors.test_lists, ()),
        (hierarchical.exchanges, (False,)),
        (hierarchical.test_local_reductions, ()),
    ]
    if large:
        found += [(large_messages, ()), (large_neighbor_exchanges, ()), (hierarchical.exchanges, (True,))]
        # The coalesced forms send the same messages as the others.
        found += [(large_collective, (name,)) for name in COLLECTIVES if name not in WITHOUT_WORK]
    return found


def check_hosts(expected: list[int] | None) -> None:
    """Compares the hosts that the group has found with those on which its ranks were started."""
    size, rank = fogdist.size(), fogdist.rank()
    hosts = dist.group.WORLD._get_backend(torch.device("cpu")).hosts  # type: ignore[union-attr]
    expected = expected or [0] * size
    assert hosts == expected, f"hosts {hosts} instead of {expected}"
    local = [other for other in range(size) if expected[other] == expected[rank]]
    assert (fogdist.local_rank(), fogdist.local_size()) == (local.index(rank), len(local))


def main() -> None:
    parser = argparse.ArgumentParser(description="every operation of fog, checked exactly")
    parser.add_argument("--hosts", type=int, nargs="+", help="each rank's host (default: all on one)")
    parser.add_argument("--small", action="store_true", help="leave out the large tensors")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    fogdist.init()
    check_hosts(arguments.hosts)
    chosen = steps(large=not arguments.small)
    for function, given in chosen:
        inspect.unwrap(function)(*given)  # of a test, what each rank runs
    dist.barrier()

    from fog_pg import _C

    library = " ".join(_C.mpi_version().split()[:4])
    place = f"rank {fogdist.rank()} of {fogdist.size()}"
    # one write, so that lines do not mix
    sys.stdout.write(f"{place}: {len(chosen)} steps right on {library}\n")
    fogdist.shutdown()


if __name__ == "__main__":
    main()
