"""An import names a tensor with unusable numbers.

They are NaN, infinities, and values beyond the compute dtype's range.
"""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import zerojax as zj
from zerojax.weights.finite import FiniteWeights, largest_bits
from zerojax.weights.names import Tensor

WIDTH, LAYERS = 64, 2
NF4 = {"frozen_dtype": "nf4"}


def matrix(key):
    return {"w": jnp.zeros((WIDTH, WIDTH))}


MODEL = zj.LayeredModel(
    LAYERS,
    init_embed=matrix,
    embed=lambda p, batch, key: batch @ p["w"],
    init_block=lambda key: {"w": jnp.zeros((WIDTH, WIDTH)), "bias": jnp.zeros(WIDTH)},
    block=lambda p, x, key: x @ p["w"] + p["bias"],
    init_head=lambda key: {"gate": jnp.ones(())},
    head=lambda p, p_embed, x, batch, key: jnp.mean(x) * p["gate"],
    frozen={"embed": {"w": True}, "block": {"w": True, "bias": False}, "head": {"gate": False}},
)


@pytest.fixture(scope="module")
def programs():
    """Return a function that builds each program once; none is ever run."""
    built = {}

    def program(**fields):
        key = repr(fields)
        if key not in built:
            mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
            built[key] = zj.build_train_step(MODEL, optax.sgd(0.1), zj.ZeroConfig(**fields), mesh)
        return built[key]

    return program


def tree(dtype=np.float32):
    w = np.ones((WIDTH, WIDTH), dtype)
    return {
        "embed": {"w": w.copy()},
        "blocks": {
            "w": np.ones((LAYERS, WIDTH, WIDTH), dtype),
            "bias": np.ones((LAYERS, WIDTH), dtype),
        },
        "head": {"gate": np.ones((), dtype)},
    }


def flat(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def bad(dtype, *numbers):
    """Return the tree with these numbers in layer 1's matrix, from row 3 and column 5 on."""
    found = tree(dtype)
    found["blocks"]["w"][1, 3, 5 : 5 + len(numbers)] = numbers
    return found


FAULTS = {
    "nan": (
        np.float32,
        [np.nan],
        {},
        r"blocks\.w float32\[2, 64, 64\] holds 1 NaN, the first at \[1, 3, 5\]",
    ),
    "infinite": (
        ml_dtypes.bfloat16,
        [-np.inf, np.nan, np.inf],
        {"precision": "bf16"},
        r"blocks\.w bfloat16\[2, 64, 64\] holds 1 NaN and 2 infinite numbers, the first, -inf, at \[1, 3, 5\]",
    ),
    "float16": (
        np.float32,
        [65519, 65520, -1e5],
        {"precision": "fp16"},
        r"holds 2 numbers beyond float16's 65504, the first, 65520\.0, at \[1, 3, 6\].*precision='bf16'",
    ),
    "float64": (np.float64, [1e39], {}, r"holds 1 number beyond float32's 3\.40"),
    "encoded": (
        np.float16,
        [np.nan],
        NF4,
        r"blocks\.w float16\[2, 64, 64\] holds 1 NaN, the first at \[1, 3, 5\]",
    ),
    "encoded-float16": (
        np.float32,
        [7e4],
        {"precision": "fp16", **NF4},
        r"blocks\.w .* 1 number beyond float16's 65504",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_arrays_with_numbers_that_no_step_can_use_are_named(programs, fault):
    dtype, numbers, fields, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        zj.import_params(programs(**fields), bad(dtype, *numbers), key=jax.random.key(0))


def test_tensors_of_files_are_named_as_the_file_has_them(programs, tmp_path):
    program = programs()
    save_file(flat(bad(np.float32, np.nan)), tmp_path / "own.safetensors")
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "orbax", bad(np.float32, np.nan))
    for name in ("own.safetensors", "orbax"):
        with pytest.raises(
            zj.CheckpointError,
            match=rf"{name}: blocks\.w float32\[2, 64, 64\] holds 1 NaN.*\[1, 3, 5\]",
        ):
            zj.import_params(program, tmp_path / name, key=jax.random.key(0))
    stacked = bad(np.float32, np.nan)
    layers = {}
    for layer in range(LAYERS):
        layers[f"h.{layer}.w"] = np.ascontiguousarray(stacked["blocks"]["w"][layer].T)
        layers[f"h.{layer}.b"] = stacked["blocks"]["bias"][layer]
    rest = {
        "wte": stacked["embed"]["w"],
        "gate": stacked["head"]["gate"],
        "buffer": np.full(3, np.nan, np.float32),
    }
    rename = {
        "h.{layer}.w": ("blocks.w", (1, 0)), "h.{layer}.b": "blocks.bias", "wte": "embed.w", "gate": "head.gate",
        "buffer": None,
    }  # fmt: skip
    save_file(layers | rest, tmp_path / "layers.safetensors")
    # What is not read, here a buffer, may hold anything.
    with pytest.raises(
        zj.CheckpointError,
        match=r"layers\.safetensors: h\.1\.w float32\[64, 64\] holds 1 NaN.*\[5, 3\]",
    ):
        zj.import_params(
            program, tmp_path / "layers.safetensors", key=jax.random.key(0), rename=rename
        )


def test_what_rounds_into_the_compute_dtype_is_taken(programs):
    program = programs(precision="fp16")
    state = zj.import_params(program, bad(np.float32, 65519, -65519), key=jax.random.key(0))
    assert jnp.isfinite(
        state.frozen["blocks"]["w"] if isinstance(state.frozen, dict) else state.frozen[1]
    ).all()


@pytest.mark.parametrize("there", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("here", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_the_largest_number_is_where_the_cast_becomes_infinite(there, here):
    bits = largest_bits(np.dtype(there).name, np.dtype(here).name)
    unsigned = np.dtype(f"u{np.dtype(there).itemsize}")
    pair = np.asarray([bits, bits + 1], unsigned).view(there)
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(pair.astype(np.float32).astype(here).astype(np.float32))
    assert is_finite.tolist() == [True, False]


class Counting:
    """A file in memory, which counts the numbers that are read."""

    path, tiled = "a file", frozenset()

    def __init__(self, array):
        self.array, self.read_numbers = array, 0
        self.tensors = {"w": Tensor(array.shape, array.dtype.name)}

    def read(self, name, box):
        part = self.array[tuple(slice(*ends) for ends in box)]
        self.read_numbers += part.size
        return part


def test_a_sound_file_is_read_once_and_a_bad_tensor_twice_at_most():
    whole = ((0, 40), (0, 1000))
    sound = Counting(np.ones((40, 1000), np.float32))
    checked = FiniteWeights(sound, "float32", ValueError)
    for row in range(40):
        assert checked.read("w", ((row, row + 1), (0, 1000))).shape == (1, 1000)
    assert sound.read_numbers == sound.array.size
    # In any memory order, and without a first dim.
    turned = Counting(np.asfortranarray(np.arange(40_000.0).reshape(40, 1000)))
    np.testing.assert_array_equal(
        FiniteWeights(turned, "float32", ValueError).read("w", whole), turned.array
    )
    scalar = Counting(np.float32(np.nan).reshape(()))
    with pytest.raises(ValueError, match=r"w float32\[\] holds 1 NaN: every step"):
        FiniteWeights(scalar, "float32", ValueError).read("w", ())
    sound.array[[3, 30], 7] = np.nan, 1e5
    with pytest.raises(
        ValueError, match=r"1 NaN and 1 number beyond float16's 65504, the first, nan, at \[3, 7\]"
    ):
        FiniteWeights(sound, "float16", ValueError).read("w", ((30, 31), (0, 1000)))
    assert sound.read_numbers <= 2 * sound.array.size + 1000


def test_the_check_survives_an_index_of_shards(programs, tmp_path):
    tensors = flat(bad(np.float32, np.nan))
    save_file(
        {n: t for n, t in tensors.items() if n.startswith("blocks")},
        tmp_path / "model-1.safetensors",
    )
    save_file(
        {n: t for n, t in tensors.items() if not n.startswith("blocks")},
        tmp_path / "model-2.safetensors",
    )
    weight_map = {
        name: f"model-{1 if name.startswith('blocks') else 2}.safetensors" for name in tensors
    }
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    with pytest.raises(zj.CheckpointError, match=r"index\.json: blocks\.w .* holds 1 NaN"):
        zj.import_params(programs(), tmp_path, key=jax.random.key(0))
