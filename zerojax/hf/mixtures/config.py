"""Read the options of a mixture of experts from `config.json`.

    Qwen 3, OLMoE      p = softmax(logits); the k largest, divided by their sum if norm_topk_prob
    Mixtral            the same, always divided
    DeepSeek V2        the same, times a factor; from the best groups of experts
    DeepSeek V3, GLM   p = sigmoid(logits); ranked by p + a correction, from the best groups
    gpt-oss            as Mixtral: softmax over the k largest logits; biases, and clamped experts

The balance loss is Switch's, as transformers computes it, over all layers together:

    loss += router_aux_loss_coef E sum_e share_e probability_e      if output_router_logits

Share and probability are means over the tokens of all layers with experts; shares add up to k.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from zerojax.experts import Routing

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys for the number of experts, which are synonyms."""
_READ = (*COUNTS, "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Options of the experts of a decoder.

    Attributes:
      experts: number of experts E.
      intermediate: width F of an expert.
      routing: how a router's logits become choices and weights.
      sparse: whether each layer has experts; the others have an MLP.
      shared: width of an MLP that all tokens visit too, the shared experts; 0: none.
      correction: whether ranks have a correction that is not trained.
      balance: weight of the balance loss.
      biases: whether router and experts have biases.
      clamp: (limit, alpha) if an expert is W_down ((u + 1) g sigmoid(alpha g)), in which g, W_gate
        x, is at most the limit and u, W_up x, is within it (gpt-oss); None: W_down (f(g) u).
    """

    experts: int
    intermediate: int
    routing: Routing
    sparse: tuple[bool, ...]
    shared: int = 0
    correction: bool = False
    balance: float = 0.0
    biases: bool = False
    clamp: tuple[float, float] | None = None

    def count_params(self, hidden: int) -> int:
        """Return the number of trained parameters of one layer's router and experts."""
        count = self.experts * hidden + 3 * self.experts * hidden * self.intermediate
        count += 3 * hidden * self.shared
        if self.biases:
            count += self.experts * (1 + 2 * self.intermediate + hidden)
        return count

    def computes(self) -> dict[str, Any]:
        """Return the options that affect the computation but not the weights' shapes, for JSON."""
        clamp = None if self.clamp is None else list(self.clamp)
        return {**dataclasses.asdict(self.routing), "clamp": clamp}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """How a family's `config.json` describes its experts.

    Attributes:
      width: key of the width of an expert.
      normalizes: whether the weights of a token's experts add up to 1; None: as `norm_topk_prob`
        says.
      score: function from logits to probabilities.
      has_balance: whether there is a balance loss if `output_router_logits` is true.
      has_shared: whether there are `n_shared_experts` shared experts, one MLP of their width.
      has_first: whether the first `first_k_dense_replace` layers have an MLP instead of experts.
      is_listed: whether `moe_layers`, or every `interleave_moe_layer_step`-th layer, has experts.
      weighs_inputs: whether weights multiply an expert's input, for one expert per token, and there
        is one shared expert (Llama 4).
      has_groups: whether a token's experts are in `topk_group` of `n_group` groups, and weights
        are multiplied by `routed_scaling_factor`.
      method: values of `topk_method` with groups; a family without the key has groups.
      of_group: number of a group's best experts whose ranks add up to the group's rank.
      correction: whether ranks have a correction that is not trained.
      biases: whether router and experts have biases.
      is_clamped: whether the experts' inner values are clamped, as `swiglu_limit` and
        `swiglu_alpha` say.
    """

    width: str = "moe_intermediate_size"
    normalizes: bool | None = None
    score: Literal["softmax", "sigmoid"] = "softmax"
    has_balance: bool = True
    has_shared: bool = False
    has_first: bool = False
    is_listed: bool = False
    weighs_inputs: bool = False
    has_groups: bool = False
    method: str = ""
    of_group: int = 1
    correction: bool = False
    biases: bool = False
    is_clamped: bool = False

    @property
    def reads(self) -> frozenset[str]:
        """Keys that such a family reads."""
        keys = {*_READ, self.width, "scoring_func"}
        if self.is_listed:
            keys |= {"moe_layers", "interleave_moe_layer_step"}
        elif self.has_first:
            keys.add("first_k_dense_replace")
        else:
            keys |= {"decoder_sparse_step", "mlp_only_layers"}
        if self.has_shared:
            keys.add("n_shared_experts")
        if self.has_groups:
            keys |= {"n_group", "topk_group", "routed_scaling_factor", "topk_method"}
        if self.is_clamped:
            keys |= {"swiglu_limit", "swiglu_alpha"}
        if self.normalizes is None:
            keys.add("norm_topk_prob")
        return frozenset(keys)


def parse_mixture(value: Mapping[str, Any], mixture: Mixture, layers: int) -> MixtureConfig:
    """Return the options of the experts.

    Args:
      value: checked values by key.
      mixture: how the family describes its experts.
      layers: number of layers.

    Raises:
      ValueError: a key is missing or contradicts another one, or layers without experts are not
        supported; the error names the key.
    """
    counts = {key: value[key] for key in COUNTS if value[key] is not None}
    if not counts:
        raise ValueError(f"{COUNTS[0]} is missing")
    if len(set(counts.values())) > 1:
        given = ", ".join(f"{key}={count}" for key, count in counts.items())
        raise ValueError(f"{given}: these keys are synonyms; remove all but one")
    key, experts = next(iter(counts.items()))
    top_k = value["num_experts_per_tok"]
    if top_k is None or top_k > experts:
        state = "is missing" if top_k is None else f"is {top_k}, which exceeds {key}={experts}"
        raise ValueError(f"num_experts_per_tok {state}")
    width = value[mixture.width]
    if width is None:
        raise ValueError(f"{mixture.width} is missing")
    has_balance = mixture.has_balance and value["output_router_logits"]
    balance = value["router_aux_loss_coef"] if has_balance else 0.0
    return MixtureConfig(
        experts=experts,
        intermediate=width,
        routing=_parse_routing(value, mixture, experts, top_k),
        sparse=_sparse_layers(value, layers),
        shared=width * (1 if mixture.weighs_inputs else value["n_shared_experts"] or 0),
        correction=mixture.correction,
        balance=balance or 0.0,
        biases=mixture.biases,
        clamp=(value["swiglu_limit"], value["swiglu_alpha"]) if mixture.is_clamped else None,
    )


def _parse_routing(value: Mapping[str, Any], mixture: Mixture, experts: int, top_k: int) -> Routing:
    """Return how logits become choices and weights.

    Raises:
      ValueError: keys contradict each other or the family; the error names them.
    """
    score = value["scoring_func"]
    if score not in (None, mixture.score):
        raise ValueError(
            f"scoring_func={score!r}: only {mixture.score!r} is supported for this model_type"
        )
    normalizes = value["norm_topk_prob"] if mixture.normalizes is None else mixture.normalizes
    if mixture.weighs_inputs and top_k != 1:
        raise ValueError(
            f"num_experts_per_tok={top_k}: only 1 is supported for this model_type, whose weights "
            "multiply the experts' inputs"
        )
    routing = Routing(
        top_k=top_k,
        score=mixture.score,
        normalize=normalizes,
        weighs_inputs=mixture.weighs_inputs,
    )
    if not mixture.has_groups:
        return routing
    routing = dataclasses.replace(routing, scale=value["routed_scaling_factor"] or 1.0)
    method = value["topk_method"]
    if method not in (None, mixture.method, "greedy"):
        raise ValueError(
            f"topk_method={method!r}: only {mixture.method!r} and 'greedy' are supported for this "
            "model_type"
        )
    if method == "greedy":
        return routing
    groups = value["n_group"] or 1
    top_groups = value["topk_group"] or groups
    size = experts // groups
    if experts % groups or top_groups > groups or top_k > top_groups * size:
        raise ValueError(
            f"n_group={groups} and topk_group={top_groups} do not fit {experts} experts, of which "
            f"a token visits {top_k}"
        )
    if mixture.of_group > size:
        raise ValueError(
            f"n_group={groups} leaves {size} of {experts} experts in a group, but the "
            f"{mixture.of_group} best of a group rank it"
        )
    return dataclasses.replace(
        routing, groups=groups, top_groups=top_groups, of_group=mixture.of_group
    )


def _sparse_layers(value: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts.

    Raises:
      ValueError: none has.
    """
    first = value["first_k_dense_replace"] or 0
    step = value["decoder_sparse_step"] or 1
    dense = value["mlp_only_layers"] or ()
    if value["interleave_moe_layer_step"] is not None:
        step = value["interleave_moe_layer_step"]
        if value["moe_layers"] is not None:
            step = 1
            dense = [layer for layer in range(layers) if layer not in value["moe_layers"]]
    sparse = tuple(
        layer >= first and (layer + 1) % step == 0 and layer not in dense for layer in range(layers)
    )
    if not any(sparse):
        raise ValueError(
            f"no layer of {layers} has experts: see first_k_dense_replace, decoder_sparse_step, "
            "mlp_only_layers, moe_layers or interleave_moe_layer_step"
        )
    return sparse
