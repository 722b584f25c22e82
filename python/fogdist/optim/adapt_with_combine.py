"""AWC, adapt with combine: neighbors' parameters travel while the gradient is computed."""

from __future__ import annotations

from torch.optim import Optimizer

from fogdist.context import current
from fogdist.optim.combining import CombiningOptimizer
from fogdist.optim.overlapping import OverlappingOptimizer
from fogdist.optim.parameter_average import CommunicationType, ParameterAverage
from fogdist.optim.wrapper import Models, reject_lbfgs, wrap


def DistributedAdaptWithCombineOptimizer(
    optimizer: Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
) -> AdaptWithCombineOptimizer:
    """Returns an optimizer that adapts with combine: ``w+ = Avg(w) - step(grad f(w))``.

    The average starts at the end of a forward pass, of the parameters as they were in it, travels during the
    backward pass, and is awaited in `step`, which then makes the optimizer's own step from the average with
    the gradient of the old parameters. (The consensus or diffusion strategy with the gradient off the
    average: Sayed, "Adaptation, learning, and optimization over networks", Foundations and Trends in Machine
    Learning 7, 2014; overlapped as in BlueFog, Ying et al. 2021.)

    Only forward passes in training mode with gradients enabled count, and the model must be called as a
    function, not by its `forward` method; a step without any such pass averages on the spot. A gradient
    scaler must skip steps on all ranks alike.

    Args:
        optimizer: Any torch optimizer that evaluates its closure once a step; it keeps its state.
        model: The model, or a list of models, that hold its parameters. All trained parameters are averaged,
            buffers are not.
        communication_type: Whom to average with.
        num_steps_per_communication: J: an average every J forward passes of the model. With J = 3 both three
            passes and one step, and three passes with a step after each, make one average.

    Returns:
        An instance of the optimizer's class with `step` as above, `synchronize`, `skip_synchronize`, and the
        attributes `self_weight`, `src_weights`, `dst_weights`, `enable_topo_check`, `communication_type`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: `optimizer` is an LBFGS, is distributed already or has a parameter that is not in the
            model; two parameters have the same name; `num_steps_per_communication` is below 1; before `init`.
        RuntimeError: After `shutdown`.
    """
    context = current()
    distributed = wrap(AdaptWithCombineOptimizer, optimizer, model, num_steps_per_communication)
    reject_lbfgs(optimizer)
    distributed.communication_type = communication_type
    distributed._fog_start(is_alone=context.size == 1)
    return distributed


class AdaptWithCombineOptimizer(OverlappingOptimizer, CombiningOptimizer):
    """See `DistributedAdaptWithCombineOptimizer`, which makes it."""

    _fog_averages: list[ParameterAverage]

    def _fog_start(self, is_alone: bool) -> None:
        self._fog_averages = [
            ParameterAverage(f"fogdist.awc.{self._fog_number}.{place}")
            for place in range(len(self._fog_models))
        ]
        super()._fog_start(is_alone)

    def _fog_begin(self, place: int) -> None:
        self._fog_averages[place].start(
            self._fog_parameters(place), self.communication_type, self._fog_weights()
        )

    def _fog_end(self, place: int) -> None:
        self._fog_averages[place].finish()

    def _fog_is_begun(self, place: int) -> bool:
        return self._fog_averages[place].is_started
