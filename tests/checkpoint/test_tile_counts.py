"""A weight saved in one number of tiles is restored as any other, and as the dense weight, and back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_tiles
from matrix_of_checkpoints import DISK, assert_same, numbers
from test_resume import ON_HOST, build

import zerojax as zj
from zerojax import tiling
from zerojax.retile import retiled


def tiled_model(tiles):
    """Two stacked layers whose MLP has so many tiles, or is dense."""

    def init_block(key):
        keys = jax.random.split(key, 2)
        dense = {"up": test_tiles.draw(keys[0], 16, 32), "down": test_tiles.draw(keys[1], 32, 16)}
        return {"mlp": tiling.tile_mlp(dense, tiles) if tiles else dense, "scale": jnp.ones(16)}

    def block(p, x, key):
        del key
        x = x * p["scale"]
        if not tiles:
            return x + jax.nn.gelu(x @ p["mlp"]["up"]) @ p["mlp"]["down"]
        return x + tiling.tiled_mlp(x, p["mlp"])

    made = test_tiles.model(stochastic=False, block=block)
    return dataclasses.replace(made, init_block=init_block, tiles={"mlp": bool(tiles), "scale": False})


def test_any_number_of_tiles_is_restored_as_any_other(tmp_path):
    data, found = test_tiles.batches(2), {}
    places = [
        (4, {"stage": 3, **ON_HOST}),
        (0, {"stage": 3}),
        (8, {"stage": 3, "params": DISK, "opt_state": DISK}),
        (2, {"stage": 1}),
    ]

    def program_of(tiles, fields):
        return build(fields, tmp_path / "swap", {"fsdp": 2}, tiled_model(tiles), optax.sgd(1e-4, momentum=0.9))

    for tiles, fields in places:
        with program_of(tiles, fields) as program, zj.Checkpointer(tmp_path / str(tiles)) as ckpt:
            state = program.init(jax.random.key(0))
            if tiles != 4:
                with zj.Checkpointer(tmp_path / "4") as first:
                    state = first.restore(program)
            else:
                state, _ = program.step(state, data[0])
            ckpt.save(program, state)
            found[tiles] = float(program.step(state, data[1])[1]["loss"])
    for tiles, fields in places[1:]:
        np.testing.assert_allclose(found[tiles], found[4], rtol=2e-6, err_msg=str(fields))
        with program_of(*places[0]) as program, zj.Checkpointer(tmp_path / str(tiles)) as ckpt:
            state = ckpt.restore(program)
            with zj.Checkpointer(tmp_path / f"4 from {tiles}") as again:
                again.save(program, state)
        assert_same(numbers(tmp_path / f"4 from {tiles}", 1), numbers(tmp_path / "4", 1))


def dense_program(in_tiles, out_tiles, folder):
    def make(rngs):
        return zj.TiledDense(16, 24, in_tiles=in_tiles, num_tiles=out_tiles, rngs=rngs)

    model = zj.from_flax(make, lambda layer, batch: jnp.mean(layer(batch["x"]) ** 2))
    return build({"stage": 3, "opt_state": DISK}, folder, {"fsdp": 2}, model, optax.adam(1e-2))


def test_a_dense_layer_in_tiles_along_both_dims_is_restored_as_any_other(tmp_path):
    grids, expected = [(2, 2), (4, 1), (1, 8), (8, 3), (1, 1)], None
    for grid in grids:
        with dense_program(*grid, tmp_path / "swap") as program, zj.Checkpointer(tmp_path / str(grid)) as ckpt:
            state = program.init(jax.random.key(0))
            if grid == grids[0]:
                x = np.random.default_rng(0).standard_normal((8, 16), dtype=np.float32)
                state, _ = program.step(state, {"x": x})
            else:
                with zj.Checkpointer(tmp_path / str(grids[0])) as first:
                    state = first.restore(program)
            ckpt.save(program, state)
            in_tiles, kernel = grid[0], jax.device_get(state.params["kernel"])
        dense = np.asarray(tiling.untile_kernel(kernel, in_tiles=in_tiles))
        expected = dense if expected is None else expected
        np.testing.assert_array_equal(dense, expected)
        with dense_program(*grids[0], tmp_path / "swap") as program, zj.Checkpointer(tmp_path / str(grid)) as ckpt:
            again = ckpt.restore(program)
            with zj.Checkpointer(tmp_path / f"again {grid}") as other:
                other.save(program, again)
        assert_same(numbers(tmp_path / f"again {grid}", 1), numbers(tmp_path / str(grids[0]), 1))


class Whole:
    """A leaf in memory, read as records are."""

    def __init__(self, value):
        self.value = value

    def read(self, name, box, out):
        out[...] = self.value[tuple(slice(a, b) for a, b in box)]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("source", [None, (1, 1), (2, 1), (1, 3), (2, 3), (4, 6)])
@pytest.mark.parametrize("target", [None, (1, 1), (2, 1), (4, 1), (1, 6), (2, 3), (4, 2)])
@pytest.mark.parametrize("told", [False, True])
def test_boxes_of_tiles_are_those_of_the_dense_weight(source, target, told, stacked):
    dense = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)

    def cut(grid):
        made = (
            dense if grid is None else np.asarray(tiling.tile_kernel(jnp.asarray(dense), in_tiles=grid[0], out_tiles=grid[1]))
        )
        return np.stack([made, made + 1000]) if stacked else made

    saved, here = cut(source), cut(target)
    if saved.shape == here.shape:
        return
    one_dim = source and target and all(1 in grid for grid in (source, target))
    known = None in (source, target) or (1, 1) in (source, target) or told
    same_dim = one_dim and [n > 1 for n in source] == [n > 1 for n in target]
    name = "weights['mlp']['up']" if same_dim else "weights['kernel']"
    if not known and not same_dim:
        with pytest.raises(ValueError, match=r"may be cut along one dim or both|^$"):
            retiled(name, saved.shape, here.shape, stacked=stacked, tiled=(True, True))
        return
    flag = target is not None and (target[0] if told else True)
    how = retiled(name, saved.shape, here.shape, stacked=stacked, tiled=(source is not None, flag))
    for part in (slice(None), slice(1, 2)):
        box = tuple(range(n)[part] for n in here.shape)
        out = np.empty([len(r) for r in box], np.float32)
        how.read(Whole(saved), name, tuple((r.start, r.stop) for r in box), out)
        np.testing.assert_array_equal(out, here[tuple(slice(r.start, r.stop) for r in box)])


@pytest.mark.parametrize(
    ("saved", "here", "tiled"),
    [
        ((16, 32), (32, 16), (False, False)),  # a transposed weight is no stack of tiles
        ((16, 32), (32, 16), (True, False)),
        ((4, 8, 3), (8, 13), (True, False)),
        ((5, 8, 3), (8, 12), (True, False)),
        ((8,), (9,), (False, False)),
    ],
)
def test_other_weights_are_not_taken_for_tiles(saved, here, tiled):
    with pytest.raises(ValueError, match=r"^$"):
        retiled("weights['up']", saved, here, stacked=False, tiled=tiled)
