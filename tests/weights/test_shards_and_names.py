"""Weights in several files under an index, renamed, transposed, or incomplete.

They are imported into any model's state.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from weight_files import program_of

import zerojax as zj
from zerojax.weights import Place, open_weights

LAYERS, WIDTH, INNER = 3, 4, 6


def init_block(key):
    return {
        "up": jax.random.normal(key, (WIDTH, INNER)),
        "bias": jnp.zeros(INNER),
        "extra": jax.random.normal(key, (2,)),
    }


MODEL = zj.LayeredModel(
    LAYERS,
    lambda key: {"table": jax.random.normal(key, (8, WIDTH))},
    lambda p, batch, key: p["table"][batch["tokens"]],
    init_block,
    lambda p, x, key: x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["up"].T + p["extra"].sum(),
    lambda key: {"scale": jax.random.normal(key, (WIDTH,))},
    lambda p, e, x, batch, key: jnp.mean((x * p["scale"]) ** 2),
)
RENAME = {
    "wte.weight": "embed.table",
    "h.{layer}.up.weight": ("blocks.up", (1, 0)),
    "h.{layer}.up.bias": "blocks.bias",
    "h.{layer}.extra": "blocks.extra",
    "h.{layer}.mask": None,
    "norm.weight": "head.scale",
}


def tensors():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    found = {
        "wte.weight": draw(8, WIDTH),
        "norm.weight": draw(WIDTH),
        "h.1.mask": np.ones((2, 2), np.int32),
    }
    for layer in range(LAYERS):
        found |= {
            f"h.{layer}.up.weight": draw(INNER, WIDTH),
            f"h.{layer}.up.bias": draw(INNER),
            f"h.{layer}.extra": draw(2),
        }
    return found


def write(folder, found, num_files=3):
    """Write an index and its files."""
    folder.mkdir(exist_ok=True)
    names = {
        name: f"model-{n % num_files + 1:05}-of-{num_files:05}.safetensors"
        for n, name in enumerate(found)
    }
    for file in set(names.values()):
        save_file({name: found[name] for name in found if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )
    return folder


def by_function(name):
    """Rename like RENAME, as a function."""
    if name.startswith("h."):
        _, layer, rest = name.split(".", 2)
        place = RENAME[f"h.{{layer}}.{rest}"]
        name, axes = place if isinstance(place, tuple) else (place, None)
        return None if name is None else Place(name, int(layer), axes)
    return RENAME[name]


@pytest.mark.by_default("table-pinned_host", "function-device")
@pytest.mark.parametrize("tier", ["device", "pinned_host", "nvme"])
@pytest.mark.parametrize("rename", [RENAME, by_function], ids=["table", "function"])
def test_tensors_are_renamed_transposed_and_stacked_from_several_files(tmp_path, rename, tier):
    found = tensors()
    folder = write(tmp_path / "model", found)
    fields = {} if tier == "device" else {"params": tier, "grads": tier, "opt_state": tier}
    with program_of(MODEL, devices=2, swap_dir=str(tmp_path), **fields) as program:
        state = zj.import_params(program, folder, key=jax.random.key(0), rename=rename)
        pieces = dict(program.iter_params(state))
        np.testing.assert_array_equal(pieces["embed"]["table"], found["wte.weight"])
        for layer in range(LAYERS):
            np.testing.assert_array_equal(
                pieces[f"blocks/{layer}"]["up"], found[f"h.{layer}.up.weight"].T
            )
            np.testing.assert_array_equal(
                pieces[f"blocks/{layer}"]["bias"], found[f"h.{layer}.up.bias"]
            )


def test_a_file_is_read_before_an_index_as_transformers_does(tmp_path):
    folder = write(tmp_path / "model", tensors())
    save_file({"only": np.zeros(2, np.float32)}, folder / "model.safetensors")
    assert set(open_weights(folder).tensors) == {"only"}
    (folder / "model.safetensors").unlink()
    assert set(open_weights(folder).tensors) == set(tensors())


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_missing_weights_are_those_of_init(tmp_path, tier):
    found = {
        name: a for name, a in tensors().items() if "extra" not in name and name != "norm.weight"
    }
    folder = write(tmp_path / "model", found)
    fields = {} if tier == "device" else {"params": tier, "grads": tier, "opt_state": tier}
    with program_of(MODEL, devices=2, swap_dir=str(tmp_path), **fields) as program:
        key = jax.random.key(7)
        made = [
            np.asarray(p["extra"])
            for name, p in program.iter_params(program.init(key))
            if "blocks" in name
        ]
        scale = np.asarray(dict(program.iter_params(program.init(key)))["head"]["scale"])
        state = zj.import_params(program, folder, key=key, rename=RENAME, missing="init")
        pieces = dict(program.iter_params(state))
        for layer in range(LAYERS):
            np.testing.assert_array_equal(pieces[f"blocks/{layer}"]["extra"], made[layer])
            np.testing.assert_array_equal(
                pieces[f"blocks/{layer}"]["up"], found[f"h.{layer}.up.weight"].T
            )
        np.testing.assert_array_equal(pieces["head"]["scale"], scale)
        assert np.abs(made[0] - made[1]).max() > 0.1
        with pytest.raises(
            zj.CheckpointError, match=r"no blocks.extra \(in the file h.\{layer\}.extra\) \[3, 2\]"
        ):
            zj.import_params(
                program, folder, key=key, rename=RENAME, missing=lambda name: name == "head.scale"
            )


def _without(found, name):
    return {other: a for other, a in found.items() if other != name}


WRONG = {
    "missing": (
        lambda t: _without(t, "norm.weight"),
        r"no head.scale \(in the file norm.weight\) \[4\]",
    ),
    "layer": (lambda t: _without(t, "h.1.up.bias"), "lacks layers of blocks.bias: h.1.up.bias"),
    "last layer": (lambda t: _without(t, "h.2.extra"), r"It holds: no h\.2\.extra$"),
    "extra": (
        lambda t: t | {"h.0.gate": np.ones(3, np.float32)},
        r"h.0.gate \[3\], which this program's model does not have",
    ),
    "shape": (
        lambda t: t | {"wte.weight": np.ones((9, WIDTH), np.float32)},
        r"embed.table \(in .*\) \[9, 4\], and here it is",
    ),
    "of one layer": (
        lambda t: t | {"h.1.extra": np.ones(3, np.float32)},
        r"h.0.extra is \[2\] and h.1.extra is \[3\]",
    ),
    "dims": (
        lambda t: t | {"h.0.up.weight": np.ones(3, np.float32)},
        r"h.0.up.weight is \[3\], which axes \(1, 0\) do not permute",
    ),
    "dtype": (
        lambda t: t | {"norm.weight": np.ones(WIDTH, np.int32)},
        "head.scale .* of I32, which is not a supported floating dtype",
    ),
    "twice": (
        lambda t: t | {"head.scale": np.ones(WIDTH, np.float32)},
        "both belong to head.scale",
    ),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_missing_extra_and_misshapen_tensors_are_named(tmp_path, wrong):
    change, told = WRONG[wrong]
    folder = write(tmp_path / "model", change(tensors()))
    with pytest.raises(zj.CheckpointError, match=told):
        zj.import_params(program_of(MODEL), folder, key=jax.random.key(0), rename=RENAME)


def test_indexes_that_do_not_fit_their_files_are_told(tmp_path):
    folder = write(tmp_path / "model", tensors())
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    (folder / "model-00002-of-00003.safetensors").rename(folder / "x.safetensors")
    run = lambda: zj.import_params(program_of(MODEL), index, key=jax.random.key(0), rename=RENAME)  # noqa: E731
    with pytest.raises(
        zj.CheckpointError,
        match="names 3 files, 1 missing next to it: model-00002-of-00003",
    ):
        run()
    (folder / "x.safetensors").rename(folder / "model-00002-of-00003.safetensors")
    run()
    told["weight_map"]["h.9.extra"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(told))
    with pytest.raises(
        zj.CheckpointError, match=r"lists tensors that are not there: h.9.extra in model-00001"
    ):
        run()
    told["weight_map"]["h.9.extra"] = "../x.safetensors"
    index.write_text(json.dumps(told))
    with pytest.raises(zj.CheckpointError, match="files next to it are needed"):
        run()


@pytest.mark.parametrize(
    "rename", [{"a": 3}, {"a": ("b", 1)}, {"{layer}.{layer}": "b"}, 3, lambda name: 5]
)
def test_renames_of_another_form_are_refused(tmp_path, rename):
    folder = write(tmp_path / "model", tensors())
    with pytest.raises(ValueError, match="rename"):
        zj.import_params(program_of(MODEL), folder, key=jax.random.key(0), rename=rename)
