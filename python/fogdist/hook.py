"""Gossip with torch's own DistributedDataParallel: a communication hook.

torch checks a hook's annotations as objects, so this file does without `from __future__ import annotations`.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.agreement import check_same_everywhere
from fogdist.context import current
from fogdist.training.buckets import FlatBuckets
from fogdist.training.mixing import Plans, TopologyLike


class GossipState:
    """The state of `gossip_hook`: the topology. Collective.

    Args:
        topology: As in `DecentralizedDataParallel`; by default the group's topology, that of each step.
        group: A group with a fog backend of the same ranks as the DDP's; by default that of `init`.

    Attributes:
        round: The topology's round of the next backward pass that communicates. It is part of no state dict.

    Raises:
        TypeError: As `DecentralizedDataParallel`.
        ValueError: As `DecentralizedDataParallel`; ranks disagree (on all ranks alike).
        RuntimeError: After `shutdown`.
    """

    def __init__(
        self,
        topology: TopologyLike = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._context = current(group)
        self._plans = Plans(topology, self._context)
        self._name = f"fogdist.gossip_hook {self._context.next_number()}"
        self.round = 0
        # Keyed by DDP's buckets, which DDP rebuilds after the first backward pass.
        self._flats: dict[int, FlatBuckets] = {}
        # The parameters of the one DDP that uses this state, complete after a whole backward pass.
        self._parameters: set[Tensor] = set()
        self._has_all = self._is_replaced = False
        self._in_flight: dict[int, tuple[FlatBuckets, dist.Work]] = {}
        check_same_everywhere(self._context.backend, "state", self._plans.items())

    def _check_model(self, bucket: dist.GradBucket) -> None:
        """Raises RuntimeError for a bucket of a different DDP than before, or after another object took over the parameters."""
        if self._is_replaced:
            raise RuntimeError(
                "state was replaced: a distributed optimizer or wrapper was made of its parameters"
            )
        parameters = bucket.parameters()
        # The buckets of a pass come in order. The first one may come again after a failed pass.
        is_complete = self._has_all or (bucket.index() == 0 and self._parameters)
        if is_complete and not self._parameters.issuperset(parameters):
            raise RuntimeError(
                "state must be of one DistributedDataParallel only, got a bucket of another one; make a "
                "GossipState for each"
            )
        self._parameters.update(parameters)
        self._has_all = self._has_all or bucket.is_last()

    def _exchange(self, parameters: FlatBuckets, bucket: int) -> None:
        """Starts the average of a bucket's parameters, which they receive at the end of the backward pass."""
        if not self._in_flight:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        plan, name = self._plans.plan(self.round), f"{self._name}.{bucket}"
        work = self._context.backend.neighbor_allreduce(parameters.flats[0], plan, name=name)
        self._in_flight[bucket] = parameters, work

    @torch.no_grad()
    def _finish(self) -> None:
        """Waits for all averages and writes them into the parameters. Raises the error of a failed exchange."""
        in_flight, self._in_flight = self._in_flight, {}
        failure: RuntimeError | None = None
        for parameters, work in in_flight.values():
            try:
                work.wait()
            except RuntimeError as error:
                failure = failure or error
                continue
            parameters.write_back(dict(enumerate(work.get_future().value())))
        if failure is not None:
            # Raised only after DDP has ended the pass too, so that the next pass is possible.
            torch.autograd.Variable._execution_engine.queue_callback(partial(_fail, failure))

    def _buckets_of(self, bucket: dist.GradBucket) -> FlatBuckets:
        """Returns a flat bucket with the parameters' values for a bucket of DDP."""
        parameters = bucket.parameters()
        flats = self._flats.get(bucket.index())
        if flats is None or not flats.holds(parameters):
            whole = sum(p.nbytes for p in parameters)
            flats = self._flats[bucket.index()] = FlatBuckets(parameters, max(whole, 1), owner=self)
            flats.take_over()
        else:
            flats.load()
        return flats

    def _fog_give_up(self) -> None:
        self._is_replaced = True
        self._flats.clear()


def _fail(error: RuntimeError) -> None:
    raise error


def gossip_hook(
    state: GossipState,
    bucket: dist.GradBucket,
) -> torch.futures.Future[Tensor]:
    """A hook for torch's DistributedDataParallel that averages with neighbors instead of all ranks.

    ::

        model = DistributedDataParallel(model, broadcast_buffers=False)
        model.register_comm_hook(fogdist.GossipState(topology), fogdist.gossip_hook)

    Each bucket's parameters are averaged with the neighbors' as soon as its gradients are ready, and each rank keeps its own
    gradients. When ``backward`` returns, the parameters hold the averages, so the optimizer makes ``x+ = Mix(x) - step(grad
    f(x))``. This is adapt with combine, as `DecentralizedDataParallel` with mode "sync", without a change to optimizer or
    loop.

    A round of the topology is one backward pass, for any number of buckets; passes in ``no_sync`` do not communicate.
    Each bucket of DDP is one exchange, and the first ones hide behind the rest of the backward pass. So
    ``bucket_cap_mb=4`` hides more than DDP's 25, and ``gradient_as_bucket_view=True`` saves DDP two copies of the
    gradients. What is exchanged is a copy of the parameters (`FlatBuckets`); once they are averaged, no second backward
    pass through the same graph is possible. If a GradScaler skips a step on one rank, the rank keeps its average and does
    not delay the others. All ranks must make the same number of passes, as with DDP.

    DDP keeps its own behavior. When it is constructed, it broadcasts rank 0's parameters and buffers and checks their
    shapes. It broadcasts buffers in each forward pass, for which all ranks wait, unless ``broadcast_buffers=False``
    (torch 2.13 deprecates this name for ``forward_sync_buffers=False``).
    ``find_unused_parameters`` adds one small allreduce per iteration. Parameters that no gradient reaches are averaged
    like others. Models differ between ranks: average them before you evaluate or save them, with
    ``fogdist.allreduce_parameters(dict(model.named_parameters()))``.

    Args:
        state: Of one DDP only.
        bucket: From DDP.

    Returns:
        A future of this rank's gradients. The hook itself does not wait.

    Raises:
        torch.distributed.DistBackendError: From ``backward``: an exchange failed.
        RuntimeError: The state serves another DDP already; nothing of the bucket is sent.
    """
    state._check_model(bucket)
    state._exchange(state._buckets_of(bucket), bucket.index())
    result: torch.futures.Future[Tensor] = torch.futures.Future()
    result.set_result(bucket.buffer())
    # Once per backward pass, not once per bucket.
    if bucket.is_last():
        state.round += 1
    return result
