"""Count the FLOPs of a row of the trainer on a CPU, to decide how many answers of a group share one.

Answers behind one prompt compute the prompt once. On a CPU attention is computed for all pairs of tokens in a row, the
masked ones too, so a row of many long answers costs more than several rows with a prompt each.
"""

from torch import nn

from worker.model.batch import RowCost
from worker.model.memory import query_width
from worker.model.packed import packed_elements
from worker.model.policy import Policy
from worker.model.targets import active_experts_in

# Matrix products of a forward and backward pass. Weights: the output and the gradient of the input; of the adapter also
# that of the weight. Attention: two forward, five backward, because the scores are computed again.
FROZEN, TRAINED, ATTENTION = 2, 3, 7


def row_cost(policy: Policy) -> RowCost | None:
    """Return the cost of a row in the packed forward on a CPU.

    None if another device computes it, where blocks of masked pairs are skipped, or if the layers are unknown.
    """
    if policy.device.type != "cpu" or policy.route.forward == "rows" or not policy.layers:
        return None
    text = policy.causal.config.get_text_config()
    active = active_experts_in(vars(text))
    weights = sum(_products(layer, active) for layer in policy.layers)
    return RowCost(2 * weights, 2 * ATTENTION * query_width(text) * len(policy.layers))


def _products(layer: nn.Module, active_experts: int | None) -> int:
    """The weights that one token is multiplied with, each as often as it is in a product."""
    products = 0
    for parameter in layer.parameters():
        times = TRAINED if parameter.requires_grad else FROZEN
        if parameter.dim() == 2:
            products += times * parameter.numel()
        elif parameter.dim() == 3:  # all experts in one tensor
            experts = len(parameter)
            products += times * parameter.numel() // experts * min(experts, active_experts or experts)
    return products + FROZEN * packed_elements(layer)
