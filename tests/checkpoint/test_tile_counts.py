"""A weight saved in one number of tiles is restored in another, as the dense weight, and back."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiled_toys
from matrix_of_checkpoints import DISK, assert_same, numbers
from test_resume import ON_HOST, build

import zerojax as zj
from zerojax import tiling
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.retile import retiled


def tiled_model(tiles):
    """Return two stacked layers with an MLP of `tiles` tiles, or a dense one."""

    def init_block(key):
        keys = jax.random.split(key, 2)
        dense = {"up": tiled_toys.draw(keys[0], 16, 32), "down": tiled_toys.draw(keys[1], 32, 16)}
        return {"mlp": tiling.tile_mlp(dense, tiles) if tiles else dense, "scale": jnp.ones(16)}

    def block(p, x, key):
        del key
        x = x * p["scale"]
        if not tiles:
            return x + jax.nn.gelu(x @ p["mlp"]["up"]) @ p["mlp"]["down"]
        return x + tiling.tiled_mlp(x, p["mlp"])

    made = tiled_toys.model(stochastic=False, block=block)
    return dataclasses.replace(
        made, init_block=init_block, tiles={"mlp": bool(tiles), "scale": False}
    )


def test_any_number_of_tiles_is_restored_as_any_other(tmp_path):
    data, found = tiled_toys.batches(2), {}
    places = [
        (4, {"stage": 3, **ON_HOST}),
        (0, {"stage": 3}),
        (8, {"stage": 3, "params": DISK, "opt_state": DISK}),
        (2, {"stage": 1}),
    ]

    def program_of(tiles, fields):
        return build(
            fields,
            tmp_path / "swap",
            {"fsdp": 2},
            tiled_model(tiles),
            optax.sgd(1e-4, momentum=0.9),
        )

    with program_of(*places[0]) as first:
        for tiles, fields in places:
            with contextlib.ExitStack() as stack:
                program = first if tiles == 4 else stack.enter_context(program_of(tiles, fields))
                if tiles == 4:
                    state, _ = program.step(program.init(jax.random.key(0)), data[0])
                else:
                    state = restored(program, tmp_path / "4")
                with zj.Checkpointer(tmp_path / str(tiles)) as ckpt:
                    ckpt.save(program, state)
                    found[tiles] = float(program.step(state, data[1])[1]["loss"])
            np.testing.assert_allclose(found[tiles], found[4], rtol=2e-6, err_msg=str(fields))
            with zj.Checkpointer(tmp_path / f"4 from {tiles}") as again:
                again.save(first, restored(first, tmp_path / str(tiles)))
            assert_same(numbers(tmp_path / f"4 from {tiles}", 1), numbers(tmp_path / "4", 1))


def restored(program, directory):
    with zj.Checkpointer(directory) as ckpt:
        return ckpt.restore(program)


def dense_program(in_tiles, out_tiles, folder):
    def make(rngs):
        return zj.TiledDense(16, 24, in_tiles=in_tiles, num_tiles=out_tiles, rngs=rngs)

    model = zj.from_flax(make, lambda layer, batch: jnp.mean(layer(batch["x"]) ** 2))
    return build({"stage": 3, "opt_state": DISK}, folder, {"fsdp": 2}, model, optax.adam(1e-2))


def test_a_dense_layer_in_tiles_along_both_dims_is_restored_as_any_other(tmp_path):
    grids, expected = [(2, 2), (4, 1), (1, 8), (8, 3), (1, 1)], None
    with dense_program(*grids[0], tmp_path / "first") as first:
        for grid in grids:
            with contextlib.ExitStack() as stack:
                if grid == grids[0]:
                    x = np.random.default_rng(0).standard_normal((8, 16), dtype=np.float32)
                    program, state = first, first.step(first.init(jax.random.key(0)), {"x": x})[0]
                else:
                    program = stack.enter_context(dense_program(*grid, tmp_path / "swap"))
                    state = restored(program, tmp_path / str(grids[0]))
                with zj.Checkpointer(tmp_path / str(grid)) as ckpt:
                    ckpt.save(program, state)
                in_tiles, kernel = grid[0], jax.device_get(state.params["kernel"])
            dense = np.asarray(tiling.untile_kernel(kernel, in_tiles=in_tiles))
            expected = dense if expected is None else expected
            np.testing.assert_array_equal(dense, expected)
            with zj.Checkpointer(tmp_path / f"again {grid}") as other:
                other.save(first, restored(first, tmp_path / str(grid)))
            assert_same(
                numbers(tmp_path / f"again {grid}", 1), numbers(tmp_path / str(grids[0]), 1)
            )


def saved_and_restored(folder, source, target, tx=None):
    """Return a model's weights, and another model's weights after restoring them."""
    mesh = zj.make_mesh(devices=jax.devices()[:1])
    programs = [
        zj.build_train_step(m, tx or optax.adam(1e-2), zj.ZeroConfig(stage=0), mesh)
        for m in (source, target)
    ]
    state = programs[0].init(jax.random.key(0))
    with zj.Checkpointer(folder) as ckpt:
        ckpt.save(programs[0], state)
        return state.params, ckpt.restore(programs[1]).params


def linen_model(layer):
    return zj.from_flax(
        layer, lambda m, b: jnp.mean(m(b["x"]) ** 2), example_batch={"x": jnp.ones((4, 16))}
    )


@pytest.mark.parametrize(("there", "here"), [(1, 4), (4, 1), (2, 4)])
def test_a_linen_mlp_goes_from_any_tiles_to_one_and_back(there, here, tmp_path):
    models = [linen_model(zj.linen.TiledMLP(24, num_tiles=n, gated=True)) for n in (there, here)]
    weights, restored = saved_and_restored(tmp_path, *models)
    jax.tree.map(
        np.testing.assert_array_equal, tiling.untile_mlp(restored), tiling.untile_mlp(weights)
    )


def test_a_linen_dense_layer_goes_to_one_tile(tmp_path):
    models = [linen_model(zj.linen.TiledDense(24, num_tiles=n, in_tiles=n)) for n in (2, 1)]
    weights, restored = saved_and_restored(tmp_path, *models)
    np.testing.assert_array_equal(
        restored["kernel"][0], tiling.untile_kernel(weights["kernel"], in_tiles=2)
    )


def function_model(in_tiles, out_tiles, flag):
    def init(key):
        return {
            "up": tiling.tile_kernel(
                jax.random.normal(key, (16, 16)), in_tiles=in_tiles, out_tiles=out_tiles
            )
        }

    return zj.Model(
        init,
        lambda p, b, _: jnp.mean(tiling.tiled_dense(b["x"], p["up"], in_tiles=in_tiles)),
        tiles={"up": flag},
    )


def test_a_weight_with_the_name_of_an_mlps_is_not_taken_for_it(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"\['up'\] \[4, 8, 8\], .*set the model's tiles to say how many of 2"
    ):
        saved_and_restored(tmp_path / "a", function_model(2, 2, True), function_model(2, 1, True))
    weights, restored = saved_and_restored(
        tmp_path / "b", function_model(2, 2, True), function_model(2, 1, 2)
    )
    found, expected = (tiling.untile_kernel(tree["up"], in_tiles=2) for tree in (restored, weights))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_exported_tiles_are_imported_as_any_others(form, tmp_path):
    """An optimizer whose moments start at a constant."""
    mesh = zj.make_mesh(devices=jax.devices()[:1])
    config = zj.ZeroConfig(stage=0)
    source, target = (
        zj.build_train_step(function_model(*grid, grid[0]), optax.adam(1e-2), config, mesh)
        for grid in ((2, 2), (4, 2))
    )
    state = source.init(jax.random.key(0))
    with zj.Checkpointer(tmp_path / "c") as ckpt:
        ckpt.save(source, state)
    getattr(zj, f"export_{form}")(tmp_path / "c", tmp_path / "out")
    imported = zj.import_params(target, tmp_path / "out", key=jax.random.key(1))
    found = tiling.untile_kernel(imported.params["up"], in_tiles=4)
    np.testing.assert_array_equal(found, tiling.untile_kernel(state.params["up"], in_tiles=2))
    assert not np.any(imported.opt_state[0].mu["up"])


def test_moments_that_are_not_like_their_weights_are_not_restored_in_other_tiles(tmp_path):
    """For a factored moment in 4 tiles, row moments have the same shape in every grid."""
    models = [function_model(2, 2, 2), function_model(4, 1, 4)]
    with pytest.raises(
        CheckpointError,
        match=r"v_row\['up'\] \[4, .*is not shaped like its weight, and so is not converted",
    ):
        saved_and_restored(
            tmp_path / "a", *models, tx=optax.adafactor(1e-2, min_dim_size_to_factor=4)
        )
    weights, restored = saved_and_restored(
        tmp_path / "b", *models, tx=optax.adafactor(1e-2)
    )  # nothing is factored
    found, expected = (
        tiling.untile_kernel(tree["up"], in_tiles=n) for tree, n in ((restored, 4), (weights, 2))
    )
    np.testing.assert_array_equal(found, expected)


class Whole:
    """A leaf in memory that is read like a record."""

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
            dense
            if grid is None
            else np.asarray(
                tiling.tile_kernel(jnp.asarray(dense), in_tiles=grid[0], out_tiles=grid[1])
            )
        )
        return np.stack([made, made + 1000]) if stacked else made

    saved, here = cut(source), cut(target)
    if saved.shape == here.shape:
        return
    one_dim = source and target and all(1 in grid for grid in (source, target))
    known = None in (source, target) or (1, 1) in (source, target) or told
    same_dim = one_dim and [n > 1 for n in source] == [n > 1 for n in target]
    if not known and not same_dim:
        with pytest.raises(ValueError, match=r"may be cut along one dim or both|^$"):
            retiled(saved.shape, here.shape, stacked=stacked, tiled=(True, True), is_mlp=False)
        return
    flag = target is not None and (target[0] if told else True)
    tiled = (source is not None, flag)
    how = retiled(
        saved.shape, here.shape, stacked=stacked, tiled=tiled, is_mlp=bool(same_dim) and not told
    )
    for part in (slice(None), slice(1, 2)):
        box = tuple(range(n)[part] for n in here.shape)
        out = np.empty([len(r) for r in box], np.float32)
        how.read(Whole(saved), "w", tuple((r.start, r.stop) for r in box), out)
        np.testing.assert_array_equal(out, here[tuple(slice(r.start, r.stop) for r in box)])


@pytest.mark.parametrize(
    ("saved", "here", "tiled"),
    [
        ((16, 32), (32, 16), (False, False)),  # a transposed weight is not a stack of tiles
        ((16, 32), (32, 16), (True, False)),
        ((4, 8, 3), (8, 13), (True, False)),
        ((5, 8, 3), (8, 12), (True, False)),
        ((8,), (9,), (False, False)),
    ],
)
def test_other_weights_are_not_taken_for_tiles(saved, here, tiled):
    with pytest.raises(ValueError, match=r"^$"):
        retiled(saved, here, stacked=False, tiled=tiled, is_mlp=False)
