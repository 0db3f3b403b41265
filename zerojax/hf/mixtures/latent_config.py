"""Read the sizes of latent attention from `config.json`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

READS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
)
"""Keys that families with latent attention read."""
IGNORED = ("head_dim", "qk_head_dim")
"""Keys that repeat sums of these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention.

    Attributes:
      query_rank: width of the latent vector of queries; None: queries have one matrix.
      rank: width R of the latent vector of keys and values.
      nope_dim, rope_dim: width of a head's keys without rotation, and of the rotated part.
      value_dim: width of a head's values.
    """

    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    def count_params(self, hidden: int, heads: int, qkv_bias: bool) -> int:
        """Return the number of parameters of one layer's attention, without the output's bias."""
        together = self.rank + self.rope_dim
        count = hidden * together + self.rank
        count += self.rank * heads * (self.nope_dim + self.value_dim)
        count += heads * self.value_dim * hidden
        if qkv_bias:
            count += together
        if self.query_rank is None:
            return count + hidden * heads * self.key_dim
        count += hidden * self.query_rank + self.query_rank
        count += self.query_rank * heads * self.key_dim
        return count + (self.query_rank if qkv_bias else 0)


def parse_latent(value: Mapping[str, Any]) -> LatentConfig:
    """Return the sizes of latent attention.

    Args:
      value: checked values by key.

    Raises:
      ValueError: a key is missing or does not fit; the error names it.
    """
    for key in READS[1:5]:
        if value[key] is None:
            raise ValueError(f"{key} is missing")
    latent = LatentConfig(
        query_rank=value["q_lora_rank"],
        rank=value["kv_lora_rank"],
        nope_dim=value["qk_nope_head_dim"],
        rope_dim=value["qk_rope_head_dim"],
        value_dim=value["v_head_dim"],
    )
    heads = value["num_attention_heads"]
    if value["num_key_value_heads"] not in (None, heads):
        raise ValueError(
            f"num_key_value_heads={value['num_key_value_heads']} is not num_attention_heads="
            f"{heads}, but with latent attention each head has keys of its own"
        )
    if latent.rope_dim % 2:
        raise ValueError(
            f"qk_rope_head_dim={latent.rope_dim}: an even width is needed, because rotations act "
            "on pairs"
        )
    if latent.value_dim > latent.key_dim:
        raise ValueError(
            f"v_head_dim={latent.value_dim} exceeds qk_nope_head_dim + qk_rope_head_dim="
            f"{latent.key_dim}, which is not supported"
        )
    return latent


def scale_scores(latent: LatentConfig, value: Mapping[str, Any]) -> float:
    """Return the factor of scores, which grows with the factor of longer rotations.

        1 / sqrt(D) (1 + 0.1 mscale_all_dim log(factor))^2

    Args:
      latent: sizes of latent attention.
      value: checked values by key, of which the rotations have been parsed.
    """
    scale = latent.key_dim**-0.5
    rope = value["rope_parameters"] or value["rope_scaling"] or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor = rope.get("factor") or 1
    if kind == "default" or factor <= 1:
        return scale
    return scale * (1 + 0.1 * (rope.get("mscale_all_dim") or 0) * math.log(factor)) ** 2
