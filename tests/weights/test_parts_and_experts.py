"""One tensor of a file may hold several parameters, and one parameter several tensors.

Both are read piece by piece, and an export joins the parts to the same bits.
"""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from weight_files import program_of

import zerojax as zj
from zerojax.weights import DividedFile, Part, Place, Tensor
from zerojax.weights.renamed import RenamedFile

LAYERS, EXPERTS, WIDTH, INNER = 2, 3, 4, 6
Q, K = 4, 2


def tensors():
    """Return a file with fused, interleaved, separate and stacked tensors."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    found = {"vision.a.b": draw(2), "norm": draw(WIDTH)}
    for layer in range(LAYERS):
        found |= {
            f"h.{layer}.qkv": draw(Q + 2 * K, WIDTH),  # rows
            f"h.{layer}.gate_up": draw(EXPERTS, WIDTH, 2 * INNER),  # every second column, stacked
            f"h.{layer}.grouped": draw(3 * (K + 1), WIDTH),  # rows, in three groups
        }
        for expert in range(EXPERTS):
            found[f"h.{layer}.experts.{expert}.down"] = draw(WIDTH, INNER)
    return found


RENAME = {
    "h.{layer}.qkv": [
        Place("blocks.q", axes=(1, 0), part=Part(0, 0, Q)),
        Place("blocks.k", axes=(1, 0), part=Part(0, Q, Q + K)),
        Place("blocks.v", axes=(1, 0), part=Part(0, Q + K, Q + 2 * K)),
    ],
    "h.{layer}.gate_up": [
        Place("blocks.gate", part=Part(2, 0, 1, 2)),
        Place("blocks.up", part=Part(2, 1, 2, 2)),
    ],
    "h.{layer}.grouped": [
        Place("blocks.many", part=Part(0, 0, K, K + 1)),
        Place("blocks.one", part=Part(0, K, K + 1, K + 1)),
    ],
    "h.{layer}.experts.{expert}.down": ("blocks.down", (1, 0)),
    "vision.{rest}": None,
}


def expected(found):
    """Return the parameters."""
    layers = range(LAYERS)
    qkv = np.stack([found[f"h.{n}.qkv"].T for n in layers])
    gate_up = np.stack([found[f"h.{n}.gate_up"] for n in layers])
    grouped = np.stack([found[f"h.{n}.grouped"].reshape(3, K + 1, WIDTH) for n in layers])
    down = [[found[f"h.{n}.experts.{e}.down"].T for e in range(EXPERTS)] for n in layers]
    return {
        "norm": found["norm"],
        "blocks.q": qkv[..., :Q],
        "blocks.k": qkv[..., Q : Q + K],
        "blocks.v": qkv[..., Q + K :],
        "blocks.gate": gate_up[..., ::2],
        "blocks.up": gate_up[..., 1::2],
        "blocks.many": grouped[:, :, :K].reshape(LAYERS, 3 * K, WIDTH),
        "blocks.one": grouped[:, :, K],
        "blocks.down": np.asarray(down),
    }


class Memory:
    """A file in memory that records which elements are read."""

    def __init__(self, arrays):
        self.path, self.tiled, self.arrays = "memory", frozenset(), arrays
        self.tensors = {name: Tensor(a.shape, a.dtype.name) for name, a in arrays.items()}
        self.boxes = []

    def read(self, name, box):
        self.boxes.append((name, box))
        return self.arrays[name][tuple(slice(a, b) for a, b in box)]


def test_any_box_is_read_from_the_boxes_that_hold_it():
    found = tensors()
    memory = Memory(found)
    file = RenamedFile(memory, RENAME)
    params = expected(found)
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
        name: array.shape for name, array in params.items()
    }
    rng = np.random.default_rng(1)
    for name, array in params.items():
        for _ in range(12):
            box = tuple(tuple(sorted(rng.choice(n + 1, 2, replace=False))) for n in array.shape)
            part = array[tuple(slice(a, b) for a, b in box)]
            np.testing.assert_array_equal(file.read(name, box), part)
    # One layer's keys: two rows of one tensor, and two of their columns.
    memory.boxes.clear()
    file.read("blocks.k", ((1, 2), (1, 3), (0, K)))
    assert memory.boxes == [("h.1.qkv", ((Q, Q + K), (1, 3)))]
    memory.boxes.clear()
    file.read("blocks.down", ((0, 1), (1, 3), (0, 2), (0, WIDTH)))
    assert memory.boxes == [(f"h.0.experts.{e}.down", ((0, WIDTH), (0, 2))) for e in (1, 2)]


def test_joined_parts_are_the_tensors():
    found = tensors()
    divided = DividedFile(Memory(found), RENAME)
    assert set(divided.parts) == set(found) - {"vision.a.b"}
    assert divided.parts["h.0.qkv"] == ["h.0.qkv[0:4]", "h.0.qkv[4:6]", "h.0.qkv[6:8]"]
    rng = np.random.default_rng(2)
    for name in divided.parts:
        for _ in range(12):
            box = tuple(
                tuple(sorted(rng.choice(n + 1, 2, replace=False))) for n in found[name].shape
            )
            part = found[name][tuple(slice(a, b) for a, b in box)]
            np.testing.assert_array_equal(divided.join(name, box, divided.read), part)


@pytest.mark.by_default("nvme")
@pytest.mark.parametrize("tier", ["device", "pinned_host", "nvme"])
def test_parts_and_experts_are_imported_into_every_tier(tmp_path, tier):
    found = tensors()
    save_file(found, tmp_path / "model.safetensors")
    params = expected(found)

    def init(key):
        blocks = {
            name.removeprefix("blocks."): np.zeros(a.shape[1:], np.float32)
            for name, a in params.items()
            if name != "norm"
        }
        del key
        return jax.tree.map(jax.numpy.asarray, blocks)

    model = zj.LayeredModel(
        LAYERS,
        lambda key: {},
        lambda params, batch, key: batch["x"],
        init,
        lambda params, x, key: x,
        lambda key: {"norm": jax.numpy.zeros(WIDTH)},
        lambda params, embed, x, batch, key: jax.numpy.mean(x * params["norm"]),
    )
    fields = {} if tier == "device" else {"params": tier, "grads": tier, "opt_state": tier}
    rename = RENAME | {"norm": "head.norm"}
    with program_of(model, devices=2, swap_dir=str(tmp_path), **fields) as program:
        state = zj.import_params(program, tmp_path, key=jax.random.key(0), rename=rename)
        pieces = dict(program.iter_params(state))
        for layer in range(LAYERS):
            for name, array in pieces[f"blocks/{layer}"].items():
                np.testing.assert_array_equal(array, params[f"blocks.{name}"][layer])


REFUSED = {
    "gap": ({"h.{layer}.qkv": RENAME["h.{layer}.qkv"][:2]}, r"is not made up of its parts"),
    "twice": ({"h.{layer}.qkv": ["blocks.q", "blocks.k"]}, "give each a zerojax.weights.Part"),
    "past the end": (
        {"h.{layer}.qkv": Place("blocks.q", part=Part(0, 0, 9))},
        r"h\.0\.qkv \[8, 4\] is not made up of its parts along dim 0, blocks\.q\[0:9\]",
    ),
    "period": (
        {"h.{layer}.qkv": [Place("a", part=Part(0, 0, 1, 3)), Place("b", part=Part(0, 1, 3, 3))]},
        "is not made up of its parts",
    ),
    "rest": ({"vision.{rest}": "a"}, "{rest} ends the names of tensors that are not read"),
    "expert": (
        {"h.{layer}.experts.{expert}.down": "blocks.down", "h.0.experts.1.down": None},
        r"lacks experts of blocks.down: h\.0\.experts\.1\.down",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_parts_that_do_not_fit_are_refused(name):
    change, message = REFUSED[name]
    with pytest.raises((ValueError, zj.CheckpointError), match=message):
        RenamedFile(Memory(tensors()), RENAME | change)
