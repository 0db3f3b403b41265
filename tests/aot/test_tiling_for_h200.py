"""Facts of tiled models compiled for 8 H200s that are not there: one tile is gathered at a time."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
import tiling
from flax import nnx

import zerojax as zj
from zerojax import aot, hlo

pytestmark = pytest.mark.xdist_group("h200")
HIDDEN, INNER, TOKENS = 16384, 65536, 512


class Net(nnx.Module):
    """Two MLPs on a stream."""

    def __init__(self, num_tiles, *, rngs):
        make = functools.partial(zj.TiledMLP, HIDDEN, INNER, num_tiles=num_tiles, dtype=jnp.bfloat16)
        self.mlps = nnx.List([make(rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


@functools.cache
def compiled(num_tiles):
    """Return the text of the compiled step, and its temporary bytes on a device."""
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=8, fsdp=8)
    model = zj.from_flax(
        lambda rngs: Net(num_tiles, rngs=rngs), lambda net, x: jnp.mean(jnp.square(net(x).astype(jnp.float32)))
    )
    program = zj.build_train_step(model, optax.adamw(1e-3), zj.ZeroConfig(stage=3, precision="bf16"), mesh)
    step = program.lower(jax.ShapeDtypeStruct((8, TOKENS, HIDDEN), jnp.bfloat16)).compile()
    assert program.gathered_early == ()
    return step.as_text(), step.memory_analysis().temp_size_in_bytes


def test_sixteen_tiles_gather_a_tenth_at_a_time():
    (whole, whole_temp), (tiled, tiled_temp) = compiled(1), compiled(16)
    layer_bytes = 2 * (2 * HIDDEN * INNER + INNER + HIDDEN)
    assert hlo.peak_gathered_bytes(whole) >= layer_bytes * 0.99
    assert hlo.peak_gathered_bytes(tiled) * 10 <= hlo.peak_gathered_bytes(whole)
    assert tiled_temp * 2 <= whole_temp  # what is left are gradients and moments on their way
    for text in (whole, tiled):  # what a dense model moves, in bfloat16: 2 gathers and a reduction
        moved = hlo.collective_bytes(text, least_bytes=1 << 20)
        assert moved == {
            "all-gather": pytest.approx(2 * 2 * layer_bytes, rel=0.02),
            "reduce-scatter": pytest.approx(2 * layer_bytes, rel=0.02),
        }


def test_the_widest_mlp_that_fits_is_found():
    case = {"gpus": 8, "layers": 2, "tokens": 64}
    width, found = tiling.widest(1, **case, budget=7e9, start=tiling.STEP)
    assert found == tiling.compile_width(width, 1, **case)
    assert found.total <= 7e9 < tiling.compile_width(width + tiling.STEP, 1, **case).total
    with pytest.raises(ValueError, match=r"a width of 4096 takes \d+ bytes, more than the budget of 1000000"):
        tiling.widest(1, **case, budget=1e6, start=tiling.STEP)
