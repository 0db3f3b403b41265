"""Layers for Flax Linen: dense layers and MLPs in tiles, and a mixture of experts."""

from zerojax.experts import linen as _experts
from zerojax.tiling import linen as _tiling

MoE = _experts.MoE
TiledDense = _tiling.TiledDense
TiledMLP = _tiling.TiledMLP
