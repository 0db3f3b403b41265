"""Operators that run tile by tile: functions, NNX and Linen modules, and a head loss."""

from zerojax.tiling import linen as linen
from zerojax.tiling.head_loss import linear_cross_entropy as linear_cross_entropy
from zerojax.tiling.loops import TileLoop as TileLoop
from zerojax.tiling.loops import find_loops as find_loops
from zerojax.tiling.loops import find_stacks as find_stacks
from zerojax.tiling.loops import loop_over as loop_over
from zerojax.tiling.loops import marked as marked
from zerojax.tiling.loops import parse as parse
from zerojax.tiling.nnx import TiledDense as TiledDense
from zerojax.tiling.nnx import TiledMLP as TiledMLP
from zerojax.tiling.operators import is_wide_product as is_wide_product
from zerojax.tiling.operators import tile_sum as tile_sum
from zerojax.tiling.operators import tiled_dense as tiled_dense
from zerojax.tiling.operators import tiled_mlp as tiled_mlp
from zerojax.tiling.operators import wide_product as wide_product
from zerojax.tiling.over_tokens import over_tokens as over_tokens
from zerojax.tiling.over_tokens import over_tokens_and_sums as over_tokens_and_sums
from zerojax.tiling.weights import choose_num_tiles as choose_num_tiles
from zerojax.tiling.weights import tile_kernel as tile_kernel
from zerojax.tiling.weights import tile_mlp as tile_mlp
from zerojax.tiling.weights import untile_kernel as untile_kernel
from zerojax.tiling.weights import untile_mlp as untile_mlp
