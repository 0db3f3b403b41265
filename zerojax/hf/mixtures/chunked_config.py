"""Read the options of Llama 4's attention from `config.json`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

READS = (
    "attention_chunk_size",
    "attn_temperature_tuning",
    "attn_scale",
    "floor_scale",
    "use_qk_norm",
)
"""Keys that the family reads."""
_CHUNKED = "chunked_attention"
_FULL = "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedConfig:
    """Options of attention that differ between layers with and without rotations.

    Attributes:
      rotated: whether each layer has rotations.
      size: number of tokens of a chunk, in layers with rotations; 0: they attend to all tokens.
      normalizes: whether rotated queries and keys are normalized, without weights.
      growth: (beta, length) if the queries of layers without rotations are multiplied by 1 + beta
        log(1 + floor((p + 1) / length)) at position p; or None.
    """

    rotated: tuple[bool, ...]
    size: int
    normalizes: bool
    growth: tuple[float, int] | None


def parse_chunked(
    value: Mapping[str, Any], kinds: object, rotated: Sequence[bool]
) -> ChunkedConfig:
    """Return the options of attention.

    Args:
      value: checked values by key.
      kinds: `layer_types` of the file, or None.
      rotated: whether each layer has rotations.

    Raises:
      ValueError: `layer_types` has other chunks than the layers with rotations.
    """
    size = value["attention_chunk_size"] or 0
    expected = [_CHUNKED if size and is_rotated else _FULL for is_rotated in rotated]
    if kinds is not None and kinds != expected:
        raise ValueError(
            "layer_types must be chunked_attention in the layers with rotations, if there is an "
            "attention_chunk_size, and full_attention in the others"
        )
    growth = None
    if value["attn_temperature_tuning"]:
        growth = value["attn_scale"], value["floor_scale"]
    return ChunkedConfig(
        rotated=tuple(rotated), size=size, normalizes=value["use_qk_norm"], growth=growth
    )
