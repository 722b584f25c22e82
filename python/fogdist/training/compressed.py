"""The frame of the algorithms that need a codec: exchanges in which a rank decodes its own message as its neighbors do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from fogdist.compression import Codec, Moniqua
from fogdist.context import Context, current
from fogdist.training.algorithm import Algorithm, check_factor
from fogdist.training.continuing import repeated
from fogdist.training.mixing import Finish, Neighbors, Round, as_mixing
from fogdist.training.view import Models

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fogdist.training.algorithm import AlgorithmOptions

# The weighted sums of the decoded messages of this rank and its in-neighbors, and this rank's own decoded message.
Decoded: TypeAlias = "tuple[list[Tensor], list[Tensor]]"

_COUNTERS = 1 << 32


class CompressedAlgorithm(Algorithm):
    """Base of the algorithms that exchange what a codec makes of vectors of theirs.

    A subclass calls `exchange`. One with another compression than a codec's, such as a factorization, overrides
    `begin_encoded`, and `check_compression`. Complex numbers are sent as pairs of real ones, and numbers of 16 bits as
    float32, in which vectors that belong to them are kept too.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        compression: The codec, the same on all ranks.
        gamma: The step size of the mixing, more than 0 and at most 1.
        **options: As in `Algorithm`. `mixing` must be a graph, a topology or None, without a codec of its own.

    Raises:
        TypeError: `compression` is no codec; `gamma` is no number; and as `Algorithm`.
        ValueError: `gamma` is out of its range; the codec or the mixing does not fit; the group is one of virtual ranks;
            and as `Algorithm`.
    """

    takes_compression: ClassVar[bool] = False

    compression: Codec
    gamma: float
    _neighbors: Neighbors

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        compression: Codec,
        gamma: float,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        self.check_compression(compression)
        self.compression = compression
        self.gamma = check_share(gamma, "gamma")
        context = current(options.get("group"))
        mixing = as_mixing(options.get("mixing"), context)
        if type(mixing) is not Neighbors:
            raise ValueError(
                f"mixing must be a topology, a graph or None for {self.algorithm_name}, got {mixing!r}"
            )
        if mixing.compression is None and context.carried_out(mixing) is not mixing:
            raise ValueError(f"group must be of real ranks for {self.algorithm_name}, got virtual ranks")
        self._neighbors = mixing
        options["mixing"] = mixing
        options["compare"] = {
            **options.get("compare", {}),
            "compression": compression,
            "gamma": self.gamma,
        }
        super().__init__(optimizer, model, **options)

    def check_compression(self, compression: Codec) -> None:
        """Raises TypeError if the argument `compression` is no codec, and ValueError if it is one that does not fit."""
        if not isinstance(compression, Codec):
            raise TypeError(f"compression must be a codec of fogdist.compression, got {compression!r}")
        if isinstance(compression, Moniqua):
            raise ValueError(
                f"compression must be decoded to the same values on all ranks for {self.algorithm_name}, got "
                f"{compression!r}, which is decoded with the receiver's values"
            )

    def begin_encoded(self, tensors: Sequence[Tensor], round: Round, counter: int) -> Callable[[], Decoded]:
        """Begins an exchange of compressed tensors along the mixing.

        Args:
            tensors: Of real dtypes, the same on all ranks except for their values; they must not change before the end.
            round: The round; its name is that of the exchange.
            counter: The number of the exchange, for random numbers: the same on all ranks, and from 0 to 2^32 - 1.

        Returns:
            A function that waits for the results, which the caller may change.
        """
        own = [torch.empty_like(each) for each in tensors]
        finish = self._neighbors.begin_decoded(tensors, round, self.compression, own, counter)
        return lambda: (finish(), own)

    def exchange(self, tensors: Sequence[Tensor]) -> Decoded | None:
        """Exchanges compressed vectors like `values`, along the mixing of this round.

        Returns:
            The results; None if the exchange was given up after a loss.
        """
        round = self.this_round()
        return self.through_losses(
            lambda context: self.begin_vectors(tensors, replace(round, context=context), self.rounds)
        )

    def begin_vectors(self, vectors: Sequence[Tensor], round: Round, counter: int) -> Callable[[], Decoded]:
        """Begins an exchange of compressed vectors like `values`; arguments as of `begin_encoded`."""
        sent = [as_sent(vector) for vector in vectors]
        wait = self.begin_encoded(sent, round, counter % _COUNTERS)

        def finish() -> Decoded:
            sums, own = (
                [as_kept(result, vector) for result, vector in zip(results, vectors, strict=True)]
                for results in wait()
            )
            return sums, own

        return finish

    def through_losses(self, begin: Callable[[Context], Callable[[], Decoded]]) -> Decoded | None:
        """Makes an exchange, which `begin` begins in a group; with ``on_loss="continue"`` again after each loss.

        Returns:
            Its results; None if it was given up, because other ranks had completed it before the loss.
        """
        if self._seat is None:
            return begin(self.context)()

        def start(context: Context) -> Finish:
            wait = begin(context)

            def finish() -> list[Tensor]:
                sums, own = wait()
                return [*sums, *own]

            return finish

        results = repeated(self._seat, start)()
        if results is None:
            return None
        half = len(results) // 2
        return results[:half], results[half:]


def check_share(value: float, argument: str) -> float:
    """Returns a number that is more than 0 and at most 1, as a float.

    Raises:
        TypeError: Not a real number.
        ValueError: Out of this range.
    """
    value = check_factor(value, argument, positive=True)
    if value > 1.0:
        raise ValueError(f"{argument} must be more than 0 and at most 1, got {value}")
    return value


def is_wide(tensor: Tensor) -> bool:
    """Returns whether vectors that are kept for a tensor have its dtype; otherwise they are float32."""
    return tensor.dtype not in (torch.float16, torch.bfloat16)


def as_sent(vector: Tensor) -> Tensor:
    """Returns a contiguous vector as real numbers of at least 32 bits, in its own memory where that is possible."""
    if vector.is_complex():
        return torch.view_as_real(vector).reshape(-1)
    return vector if is_wide(vector) else vector.float()


def as_kept(sent: Tensor, vector: Tensor) -> Tensor:
    """Returns what was sent, or received, for a vector in the form of the vectors that are kept."""
    return torch.view_as_complex(sent.view(-1, 2)) if vector.is_complex() else sent
