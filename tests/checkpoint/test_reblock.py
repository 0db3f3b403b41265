"""Arrays of 8- or 4-bit weights read for other shards.

Each block gets its own numbers, or the read is refused.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import storage
from zerojax.checkpoint.retile import reblocked

NAME = "weights['w']#nf4."


class Arrays:
    """Records of arrays, instead of files."""

    def __init__(self, arrays):
        self.arrays = arrays

    def read(self, name, box, out):
        out[...] = self.arrays[name][tuple(slice(*ends) for ends in box)]


def named(tree):
    return {
        NAME + jax.tree_util.keystr(path, simple=True): a
        for path, a in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def read(saved, shapes, lead):
    """Return arrays of these shapes, each read in two boxes along its last dim."""
    found = {}
    for name, shape in shapes.items():
        how = reblocked(name, shapes, {other: a.shape for other, a in saved.items()}, lead)
        found[name] = np.empty(shape, saved[name].dtype)
        half = shape[-1] // 2
        for start, stop in ((0, half), (half, shape[-1])):
            if start < stop:
                box = (*((0, n) for n in shape[:-1]), (start, stop))
                how.read(Arrays(saved), name, box, found[name][..., start:stop])
    return found


def abstract(shards, lead=()):
    layout = storage.choose_layout("nf4", (16, 1024), shards)
    return named(storage.abstract_encoded(layout, (*lead, 16, 1024)).q)


def blocks_groups(groups, blocks):
    """Return the number stored for each block's group, in the order of blocks."""
    for dim, size in enumerate(blocks.shape):
        groups = np.repeat(groups, size // groups.shape[dim], axis=dim)
    return groups.reshape(-1)


@pytest.mark.parametrize(
    ("before", "after"), [((1, 1), (1, 4)), ((1, 2), (1, 4)), ((1, 1), (2, 1))]
)
def test_each_block_has_its_own_numbers_and_those_of_its_group(before, after):
    """Two layers whose arrays count their elements."""
    shapes = {name: a.shape for name, a in abstract(after, (2,)).items()}
    saved = {name: np.arange(a.size).reshape(a.shape) for name, a in abstract(before, (2,)).items()}
    found = read(saved, shapes, 1)
    for name in ("codes", "scales"):
        np.testing.assert_array_equal(
            found[NAME + name].reshape(-1), saved[NAME + name].reshape(-1)
        )
    for name in ("steps", "means"):
        there = blocks_groups(saved[NAME + name], saved[NAME + "scales"])
        np.testing.assert_array_equal(
            blocks_groups(found[NAME + name], found[NAME + "scales"]), there
        )


def test_a_group_of_several_saved_ones_and_another_weight_are_refused():
    whole, cut = (
        {name: a.shape for name, a in abstract(shards).items()} for shards in ((1, 1), (1, 4))
    )
    with pytest.raises(
        ValueError,
        match=r"a group of scales of weights\['w'\] here has blocks of several saved groups",
    ):
        reblocked(NAME + "steps", whole, cut, 0)
    with pytest.raises(ValueError, match=r"^$"):
        reblocked(NAME + "codes", whole, {**cut, NAME + "codes": (16, 1024)}, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", ["int8", "nf4"])
@pytest.mark.parametrize("shape", [(16, 1024), (1024, 16), (64, 256), (4, 64, 64), (128, 192)])
def test_what_is_read_for_other_shards_decodes_to_the_same_bits(shape, format):
    weight = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    encoded = {}
    for shards in itertools.product((1, 2, 4, 8), repeat=len(shape)):
        divides = all(size % n == 0 for size, n in zip(shape, shards, strict=True))
        if (
            divides
            and sum(n > 1 for n in shards) < 2
            and storage.refusal(format, shape, shards) is None
        ):
            encoded[shards] = storage.encode(
                weight, storage.choose_layout(format, shape, shards), "xla"
            )
    counts = {"read": 0, "refused": 0}
    for before, after in itertools.product(encoded.values(), repeat=2):
        if before.layout.moved != after.layout.moved:
            continue  # under other names in a checkpoint
        saved, here = (
            {name: np.asarray(a) for name, a in named(each.q).items()} for each in (before, after)
        )
        try:
            found = read(saved, {name: a.shape for name, a in here.items()}, 0)
        except ValueError:
            assert format == "nf4"
            counts["refused"] += 1
            continue
        arrays = [jnp.asarray(found[name]) for name in here]
        decoded = storage.decode(
            jax.tree.unflatten(jax.tree.structure(after), arrays), jnp.float32, "xla"
        )
        np.testing.assert_array_equal(decoded, storage.decode(before, jnp.float32, "xla"))
        counts["read"] += 1
    assert counts["read"] > len(encoded)  # each as it is, and some as others
