"""Read the options of a mixture of experts from `config.json`.

    Qwen 3, OLMoE      p = softmax(logits); the k largest, divided by their sum if norm_topk_prob
    Mixtral            the same, always divided
    gpt-oss            the same: softmax over the k largest logits; biases, and clamped experts

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
      balance: weight of the balance loss.
      biases: whether router and experts have biases.
      clamp: (limit, alpha) if an expert is W_down ((u + 1) g sigmoid(alpha g)), in which g, W_gate
        x, is at most the limit and u, W_up x, is within it (gpt-oss); None: W_down (f(g) u).
    """

    experts: int
    intermediate: int
    routing: Routing
    balance: float = 0.0
    biases: bool = False
    clamp: tuple[float, float] | None = None

    def count_params(self, hidden: int) -> int:
        """Return the number of parameters of one layer's router and experts."""
        count = self.experts * hidden + 3 * self.experts * hidden * self.intermediate
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
      biases: whether router and experts have biases.
      is_clamped: whether the experts' inner values are clamped, as `swiglu_limit` and
        `swiglu_alpha` say.
    """

    width: str = "moe_intermediate_size"
    normalizes: bool | None = None
    score: Literal["softmax", "sigmoid"] = "softmax"
    biases: bool = False
    is_clamped: bool = False

    @property
    def reads(self) -> frozenset[str]:
        """Keys that such a family reads."""
        keys = {*_READ, self.width, "decoder_sparse_step", "mlp_only_layers"}
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
    _check_layers(value, layers)
    normalizes = value["norm_topk_prob"] if mixture.normalizes is None else mixture.normalizes
    balance = value["router_aux_loss_coef"] if value["output_router_logits"] else 0.0
    return MixtureConfig(
        experts=experts,
        intermediate=width,
        routing=Routing(top_k=top_k, score=mixture.score, normalize=normalizes),
        balance=balance or 0.0,
        biases=mixture.biases,
        clamp=(value["swiglu_limit"], value["swiglu_alpha"]) if mixture.is_clamped else None,
    )


def _check_layers(value: Mapping[str, Any], layers: int) -> None:
    """Raise ValueError unless every layer has experts."""
    step = value["decoder_sparse_step"] or 1
    if step > 1:
        raise ValueError(
            f"decoder_sparse_step={step}: experts in every {step}-th layer only are not supported"
        )
    dense = [layer for layer in value["mlp_only_layers"] or () if layer < layers]
    if dense:
        raise ValueError(
            f"mlp_only_layers={dense}: layers without experts are not supported for this model_type"
        )
