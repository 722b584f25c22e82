"""Decentralized SGD: averages with neighbors after, beside or before the local step; and local SGD."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch.optim import Optimizer
from typing_extensions import Unpack

from fogdist.context import current
from fogdist.topology.validation import check_choice
from fogdist.training.algorithm import AlgorithmOptions, check_factor
from fogdist.training.fragments import FragmentedAlgorithm, FragmentOptions
from fogdist.training.mixing import GlobalAverage
from fogdist.training.overlapping import Mixer, OverlappingAlgorithm
from fogdist.training.patient_mixer import PatientMixer, patient_mixing
from fogdist.training.view import Models

Order = Literal["atc", "awc", "cta"]


class DecentralizedSGD(OverlappingAlgorithm):
    """Decentralized SGD (D-PSGD, diffusion) around any optimizer; d(x) is the optimizer's step at x.

    - "atc", adapt then combine: ``x+ = W (x + d(x))``.
    - "awc", adapt with combine: ``x+ = W x + d(x)``; the exchange starts with the forward pass and is hidden
      behind it and the backward pass.
    - "cta", combine then adapt: ``y = W x``, ``x+ = y + d(y)``; y is in the model from the beginning of the
      forward pass on, x after `step`.

    (Chen and Sayed, IEEE Transactions on Signal Processing 60, 2012, and Sayed, Foundations and Trends in
    Machine Learning 7, 2014, for the three orders; Lian et al., "Can Decentralized Algorithms Outperform
    Centralized Algorithms?", NeurIPS 2017, arXiv 1705.09056, for awc as D-PSGD.)

    Only forward passes in training mode with gradients enabled count, and the model must be called as a
    function; in a step without any, the exchange is done in `step`. With "awc" parameters must not be changed between
    forward pass and step, which warns: neighbors read them where they are. (Where a forward pass itself changes them,
    by an embedding's `max_norm`, the exchange starts at its end.) If W is not doubly stochastic, ranks agree on a
    weighted mean: `PushSumSGD` corrects that.

    With `patience` ranks wait for each other, but not for a late one. A rank waits for each neighbor up to a deadline: the
    median of the times that it had to wait for it lately, plus `patience` times their median absolute deviation, which
    counts as at least 5 % of a round. A neighbor that has not come by then is left out of the round, and until it is back; its weight
    goes to the rank's own values, so weights add up to 1. The neighbor leaves this rank out of the same round: if the
    weights are symmetric, the mean of all ranks stays as it is. If not, leaving j out at i moves the mean of n ranks by
    ``w_ji (x_i - x_j) / n``. A value counts in its own round or not at all. A rank
    that was left out goes on in the round of its neighbors, so ranks may have made different numbers of steps. A neighbor
    that ends in good order is left out from then on. If one is lost, the step raises, or leaves it out too if `on_loss` is
    "continue".

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        order: "atc", "awc" or "cta".
        patience: As above, at least 0; 5 leaves room for the jitter of a busy machine. `topology` must then be a graph, a
            topology with a period, or None for the group's topology of now. Parameters are sent to windows, which take
            up to 4 times their size for each in-neighbor. None to wait for all neighbors.
        **options: As in `Algorithm`. In local steps, without averages, the three orders are the same.

    Raises:
        ValueError: `order` is none of the three; `patience` is below 0 or does not go with `topology`; and as `Algorithm`.
    """

    runs_alone: ClassVar[bool] = False
    can_be_joined: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    compared: ClassVar[tuple[str, ...]] = ("order", "patience")

    order: Order
    patience: float | None
    _mixer: Mixer

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        order: Order = "atc",
        patience: float | None = None,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        self.order = check_choice(order, "order", Order)
        self._mixer = Mixer()
        self.patience = None if patience is None else check_factor(patience, "patience")
        if self.patience is not None:
            if options.get("by_samples"):
                raise ValueError(
                    "by_samples must be False with patience, which leaves out neighbors at any time"
                )
            context = current(options.get("group"))
            mixing = patient_mixing(options.get("topology"), context, options.pop("compression", None))
            options["topology"] = mixing
        super().__init__(optimizer, model, **options)
        if self.patience is not None:
            self.mixing = mixing  # the mixer goes on after losses by itself
            self._mixer = PatientMixer(self.name, self.patience, self._participant)
        if self.overlaps:
            self.watch_forward("with forward" if order == "awc" else "before forward")

    @property
    def overlaps(self) -> bool:
        """See `OverlappingAlgorithm.overlaps`."""
        return self.order != "atc"

    def keeps_copies(self) -> bool:
        """See `Algorithm.keeps_copies`: each bucket is a message of its own, but each rank has its own late neighbors."""
        return self.patience is None

    def late_neighbors(self) -> list[int]:
        """Returns the in-neighbors that were left out of the last round; none without `patience`."""
        return self._mixer.left_out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`. With `patience` all ranks load, between the same two steps."""
        super().load_state_dict(state_dict)
        self._mixer.restart()

    def members_changed(self) -> None:
        """See `Algorithm.members_changed`."""
        self._mixer.renew()

    def average(self, buffers: bool = True) -> None:
        """See `Algorithm.average`."""
        with self._mixer.away():
            super().average(buffers)

    def combine(self) -> None:
        """Averages after the local steps of "atc"."""
        self.begin()
        self.finish()

    def begin(self) -> None:
        """Begins the exchange ("awc") or makes all of it ("cta")."""
        self.rounds = self._mixer.begin(self.buckets, self.mixing, self.this_round())
        if self.order == "cta":
            self._mixer.finish()

    def accept_changes(self) -> None:
        """See `Algorithm.accept_changes`."""
        self._mixer.accept_changes()

    def _hold(self) -> None:
        super()._hold()
        self._mixer.restart()  # a process that joins in this step opens no windows of earlier buckets

    def _fog_give_up(self) -> None:
        """Also drops the exchange in flight."""
        super()._fog_give_up()
        self._mixer = Mixer()

    def finish(self) -> None:
        """Completes the exchange of the parameters that it began with, even if some were frozen or added since."""
        self._mixer.finish()


class LocalSGD(FragmentedAlgorithm):
    """Local SGD: J local steps, then the exact average: ``x+ = mean_j(x_j + d_1 + ... + d_J)``.

    (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767; also post-local
    SGD, parallel restarted SGD or federated averaging with all clients.) With a `topology` it is
    decentralized local SGD (Koloskova et al., ICML 2020, arXiv 2003.10422).

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        **options: As in `FragmentedAlgorithm`; `topology` is `GlobalAverage()` by default, and `local_steps`, which is J, 8.

    Raises:
        ValueError: As `FragmentedAlgorithm`.
    """

    can_be_joined: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    def __init__(self, optimizer: Optimizer, model: Models, **options: Unpack[FragmentOptions]) -> None:
        if options.get("topology") is None:
            options["topology"] = GlobalAverage()
        options.setdefault("local_steps", 8)
        super().__init__(optimizer, model, **options)
