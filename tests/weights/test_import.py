"""A state imported from exported weights equals `program.init` with those weights.

This applies to any stage and tier.
"""

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import toys
from flax import nnx
from matrix_of_checkpoints import DISK, HOST, Place, assert_same, build
from weight_files import AWKWARD, awkward, program_of, save

import zerojax as zj
from zerojax.tiling.weights import untile_mlp
from zerojax.weights.initial_opt_state import Copy, initial_values

EXPORTS = {"orbax": zj.export_orbax, "safetensors": zj.export_safetensors}


def weights_in(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in found.items() if name.startswith("weights")}


def imported(
    program: zj.Program, source: pathlib.Path, directory: pathlib.Path
) -> dict[str, np.ndarray]:
    """Import, and return all numbers of the state."""
    return save(program, zj.import_params(program, source, key=jax.random.key(3)), directory)


PAIRS = [
    (Place(3, "device"), Place(3, DISK, "2"), "orbax"),
    (Place(3, HOST), Place(0, "device", "2", "bf16"), "safetensors"),
    (Place(3, DISK, "2"), Place(2, HOST, "4", "fp32"), "orbax"),
]


@pytest.mark.by_default(*("-".join(map(str, pair)) for pair in PAIRS[1:]))
@pytest.mark.parametrize(("source", "target", "form"), PAIRS, ids=str)
def test_round_trip_from_tier_to_tier(source, target, form, tmp_path):
    with build(source, tmp_path / "swap") as program:
        expected = save(program, program.init(jax.random.key(0)), tmp_path / "source")
    EXPORTS[form](tmp_path / "source", tmp_path / "out")
    with build(target, tmp_path / "swap") as program:
        found = imported(program, tmp_path / "out", tmp_path / "target")
        assert_same(weights_in(found), weights_in(expected))
        assert found["step"] == 0
        for name, value in found.items():
            if name.startswith("opt_state"):
                np.testing.assert_array_equal(value, np.zeros_like(value), err_msg=name)


@pytest.mark.parametrize(
    ("place", "fields"),
    [
        (Place(3, "device", "2"), {"moments": "bfloat16"}),
        (Place(2, HOST, "2", "bf16"), {"opt_state_device_fraction": 0.4}),
        (Place(3, HOST, "2", "bf16"), {"update_on": "host", "delayed_update": True}),
    ],
    ids=str,
)
def test_imported_is_init(place, fields, tmp_path):
    with build(place, tmp_path, **fields) as program:
        state = program.init(jax.random.key(3))
        save(program, state, tmp_path / "c")
        for form, export in EXPORTS.items():
            export(tmp_path / "c", tmp_path / form)
            found = zj.import_params(program, tmp_path / form, key=jax.random.key(3))
            assert jax.tree.structure(found) == jax.tree.structure(state)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
                assert a.sharding.memory_kind == b.sharding.memory_kind
                if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                    a, b = jax.random.key_data(a), jax.random.key_data(b)
                np.testing.assert_array_equal(a, b)


def test_bfloat16_is_read_as_float32(tmp_path):
    with program_of(awkward()) as program:
        expected = weights_in(save(program, program.init(jax.random.key(0)), tmp_path / "c"))
        for form, export in EXPORTS.items():
            export(tmp_path / "c", tmp_path / form, dtype=jnp.bfloat16)
            found = imported(program, tmp_path / form, tmp_path / f"again-{form}")
            narrow = {
                name: value.astype(jnp.bfloat16).astype(np.float32)
                for name, value in expected.items()
            }
            assert_same(weights_in(found), narrow)


def tree_of(found: dict[str, np.ndarray]) -> dict:
    """Return the awkward tree under the names of other libraries."""
    own = {name: found[inner] for name, inner in AWKWARD.items()}
    return {
        "layers": [{"w": own["layers.0.w"]}, {"w": own["layers.1.w"]}],
        "gate": own["gate"],
        "none": own["none"],
        'it\'s "odd" / here': own['it\'s "odd" / here'],
        "numbers": {"7": {"Ä": own["numbers.7.Ä"]}},
    }


def test_files_of_others(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    with program_of(awkward()) as program:
        expected = save(program, program.init(jax.random.key(0)), tmp_path / "c")
        tensors = {
            name: np.asarray(expected[own], np.float64 if "w" in name else np.float32)
            for name, own in AWKWARD.items()
        }
        save_file(tensors, tmp_path / "safetensors", {"format": "np"})
        data = (tmp_path / "safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little") + 3  # unaligned tensors
        (tmp_path / "odd").write_bytes(
            length.to_bytes(8, "little") + data[8 : length + 5] + b"   " + data[length + 5 :]
        )
        tree = tree_of(expected)
        del tree["none"]  # which Orbax cannot hold
        for name, options in {
            "ocdbt": {},
            "zarr": {"use_ocdbt": False},
            "zarr3": {"use_zarr3": True},
        }.items():
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as writer:
                writer.save(
                    tmp_path / name, args=ocp.args.PyTreeSave(jax.tree.map(jnp.asarray, tree))
                )
        for name in ("safetensors", "odd"):
            assert_same(
                weights_in(imported(program, tmp_path / name, tmp_path / f"again-{name}")),
                weights_in(expected),
            )
    whole = awkward()

    def without(key: jax.Array) -> dict:
        made = whole.init(key)
        return {name: value for name, value in made.items() if name != "none"}

    del expected[AWKWARD["none"]]
    with program_of(zj.Model(without, whole.loss)) as program:
        for name in ("ocdbt", "zarr", "zarr3"):
            assert_same(
                weights_in(imported(program, tmp_path / name, tmp_path / f"again-{name}")),
                weights_in(expected),
            )


def test_nnx_model(tmp_path):
    def linear(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(4, 4, rngs=rngs)

    parts = {"embed": lambda rngs: _Embed(rngs), "block": linear, "head": linear}
    model = zj.from_flax(
        **parts, num_layers=3, loss=lambda head, embed, x, batch: jnp.mean(head(x) ** 2)
    )
    with (
        program_of(model, devices=2, stage=3) as program,
        program_of(model, params=HOST, opt_state=HOST) as other,
    ):
        expected = save(program, program.init(jax.random.key(0)), tmp_path / "c")
        for form, export in EXPORTS.items():
            export(tmp_path / "c", tmp_path / form)
            assert_same(
                weights_in(imported(other, tmp_path / form, tmp_path / f"again-{form}")),
                weights_in(expected),
            )


class _Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        return batch["x"] * self.scale


def test_tiles_are_cut_anew(tmp_path):
    def model(tiles: int) -> zj.LayeredModel:
        return zj.from_flax(
            embed=lambda rngs: _Embed(rngs),
            block=lambda rngs: zj.TiledMLP(4, 16, num_tiles=tiles, rngs=rngs),
            head=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
            num_layers=2,
            loss=lambda head, embed, x, batch: jnp.mean(head(x) ** 2),
        )

    with program_of(model(4), stage=3, params=HOST, opt_state=HOST) as program:
        expected = weights_in(save(program, program.init(jax.random.key(0)), tmp_path / "c"))
        zj.export_safetensors(tmp_path / "c", tmp_path / "tiled")
        with program_of(model(2)) as other:
            found = imported(other, tmp_path / "tiled", tmp_path / "two")
            assert found["weights['blocks']['up']"].shape[1] == 2
            zj.export_orbax(tmp_path / "two", tmp_path / "fewer")
        assert_same(weights_in(imported(program, tmp_path / "fewer", tmp_path / "again")), expected)
        dense = ocp.StandardCheckpointer().restore(tmp_path / "fewer")
        tiles = [{name: w[layer] for name, w in dense["blocks"].items()} for layer in range(2)]
        dense["blocks"] = jax.tree.map(lambda *a: np.stack(a), *map(untile_mlp, tiles))
        with ocp.StandardCheckpointer() as writer:
            writer.save(tmp_path / "dense", dense)
        assert_same(
            weights_in(imported(program, tmp_path / "dense", tmp_path / "from-dense")), expected
        )


# --- optimizers -----------------------------------------------------------------------------------

PARAMS = {
    "w": jax.ShapeDtypeStruct((3, 50), jnp.float32),
    "b": jax.ShapeDtypeStruct((5,), jnp.float32),
}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=0.25),
    "adagrad": optax.adagrad(0.1, initial_accumulator_value=0.3),
    "copies": optax.contrib.schedule_free_adamw(0.1),
    "particles": optax.contrib.cocob(),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_init_makes_is_read_off_its_trace(name):
    tx = OPTIMIZERS[name]
    params = jax.tree.map(
        lambda a: 1.0 + jnp.arange(a.size, dtype=a.dtype).reshape(a.shape), PARAMS
    )
    weights = jax.tree.leaves(params)
    made = initial_values(tx.init, PARAMS)
    for found, expected in zip(made, jax.tree.leaves(tx.init(params)), strict=True):
        assert found is not None
        value = (
            weights[found.index]
            if isinstance(found, Copy)
            else np.broadcast_to(found, expected.shape)
        )
        assert value.shape == expected.shape
        np.testing.assert_array_equal(value, expected)
    assert any(isinstance(found, Copy) for found in made) == (name in ("copies", "particles"))


def keeping(what: Callable[[jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Return Adam that also keeps part of each initial weight."""
    tx = optax.adam(0.1)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner = tx.update(updates, state[0], params)
        return updates, (inner, state[1])

    return optax.GradientTransformation(
        lambda params: (tx.init(params), jax.tree.map(what, params)), update
    )


@pytest.mark.parametrize("tier", ["device", HOST])
def test_copies_of_weights_are_the_imported_ones(tier, tmp_path):
    model = awkward() if tier == "device" else toys.layered()
    with program_of(
        model, keeping(lambda w: w), params=tier, grads=tier, opt_state=tier
    ) as program:
        expected = save(program, program.init(jax.random.key(0)), tmp_path / "c")
        zj.export_orbax(tmp_path / "c", tmp_path / "out")
        found = imported(program, tmp_path / "out", tmp_path / "again")
        assert_same(found, expected | {"key": found["key"]})


def test_state_that_is_computed_from_weights(tmp_path):
    halving = keeping(lambda w: w / 2)
    noise = optax.GradientTransformation(
        lambda params: jax.random.split(jax.random.PRNGKey(7)),
        lambda updates, state, params=None: (updates, state),
    )
    with program_of(awkward(), optax.chain(halving, noise), devices=2) as program:
        expected = save(program, program.init(jax.random.key(3)), tmp_path / "c")
        zj.export_safetensors(tmp_path / "c", tmp_path / "out")
        assert_same(imported(program, tmp_path / "out", tmp_path / "again"), expected)
    message = r"tx.init computes opt_state\[1\]\['gate'\] from the weights, as neither"
    with (
        program_of(awkward(), halving, opt_state=HOST) as program,
        pytest.raises(ValueError, match=message),
    ):
        zj.import_params(program, tmp_path / "out", key=jax.random.key(0))


# --- refused inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", EXPORTS)
def test_other_models_are_refused_before_anything_is_touched(form, tmp_path):
    def save_as(name: str, tree: dict) -> pathlib.Path:
        path = tmp_path / f"{form}-{name}"
        if form == "orbax":
            with ocp.StandardCheckpointer() as writer:
                writer.save(path, tree)
        else:
            flat = jax.tree_util.tree_flatten_with_path(tree)[0]
            tensors = {
                jax.tree_util.keystr(p, simple=True, separator="."): np.asarray(a) for p, a in flat
            }
            pytest.importorskip("safetensors.numpy").save_file(tensors, path)
        return path

    tree = {
        "a": np.ones((4, 2), np.float32),
        "b": {"c": np.ones(3, np.float32), "d": np.ones(2, np.float32)},
    }
    model = zj.Model(lambda key: jax.tree.map(jnp.asarray, tree), lambda p, b, k: jnp.float32(0))
    wrong = {
        "missing": ({"a": tree["a"], "b": {"c": tree["b"]["c"]}}, r"It holds: no b.d \[2\]$"),
        "extra": (
            tree | {"z": np.ones(1, np.float32)},
            r"It holds: z \[1\], which this program's model does not have$",
        ),
        "misshapen": (
            tree | {"a": np.ones((2, 4), np.float32)},
            r"It holds: a \[2, 4\], and here it is \[4, 2\]$",
        ),
        "tiles": (
            tree | {"a": np.ones((1, 4, 2), np.float32)},
            r"It holds: a \[1, 4, 2\], and here it is \[4, 2\]$",
        ),
        "integers": (
            tree | {"a": np.ones((4, 2), np.int32)},
            r"It holds: a of (int32|I32), which is not a supported floating dtype",
        ),
        "many": (
            {f"x{n}": np.ones(1, np.float32) for n in range(9)},
            r"no a \[4, 2\]; no b.c .*; and 4 more$",
        ),
    }
    (tmp_path / "swap").mkdir()
    with program_of(model, opt_state=DISK, swap_dir=str(tmp_path / "swap"), stage=2) as program:
        state = program.init(jax.random.key(0))
        for name, (other, message) in wrong.items():
            with pytest.raises(zj.CheckpointError, match=message):
                zj.import_params(program, save_as(name, other), key=jax.random.key(0))
        assert [leaf.tolist() for _, leaf in program.iter_params(state)] == [
            a.tolist() for a in jax.tree.leaves(tree)
        ]


def test_files_that_are_none(tmp_path):
    with program_of(awkward()) as program:
        save(program, program.init(jax.random.key(0)), tmp_path / "c")
        zj.export_safetensors(tmp_path / "c", tmp_path / "out")
        data = (tmp_path / "out").read_bytes()
        (tmp_path / "cut").write_bytes(data[:-1])
        (tmp_path / "short").write_bytes(b"\1")
        (tmp_path / "text").write_text("no safetensors at all")
        header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}).encode()
        (tmp_path / "lies").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        (tmp_path / "empty").mkdir()
        (tmp_path / "steps").mkdir()
        zj.export_orbax(tmp_path / "c", tmp_path / "steps" / "default")
        shutil.copytree(tmp_path / "steps" / "default", tmp_path / "lost")
        (tmp_path / "lost" / "gate" / ".zarray").unlink()
        messages = {
            "cut": "is cut off: ",
            "short": "is not a safetensors file",
            "text": "is not a safetensors file",
            "lies": r"a float32\[1\] cannot be at bytes 0 to 8",
            "absent": "absent does not exist",
            "empty": "has no _METADATA$",
            "steps": "default in it has one",
            "c/0/state": "has no _METADATA$",
            "lost": "cannot be read as a checkpoint of Orbax: .*gate",
        }
        for name, message in messages.items():
            with pytest.raises(zj.CheckpointError, match=message):
                zj.import_params(program, tmp_path / name, key=jax.random.key(0))
        for key in (0, jax.random.split(jax.random.key(0))):
            with pytest.raises(ValueError, match="import_params takes"):
                zj.import_params(program, tmp_path / "out", key=key)
