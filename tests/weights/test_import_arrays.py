"""A state that starts from arrays in memory holds them exactly, in any tier.

Arrays that do not fit are named.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax as zj

DISK, WIDTH, LAYERS = "nvme", 8, 3


def matrix(key):
    return {"w": jax.random.normal(key, (WIDTH, WIDTH))}


MODEL = zj.LayeredModel(
    LAYERS,
    init_embed=matrix,
    embed=lambda p, batch, key: batch @ p["w"],
    init_block=matrix,
    block=lambda p, x, key: x @ p["w"],
    init_head=lambda key: {"gate": jnp.ones(())},
    head=lambda p, p_embed, x, batch, key: jnp.mean(x) * p["gate"],
)


def arrays():
    random = np.random.default_rng(0)
    shapes = {
        "embed": {"w": (WIDTH, WIDTH)},
        "blocks": {"w": (LAYERS, WIDTH, WIDTH)},
        "head": {"gate": ()},
    }
    return jax.tree.map(
        lambda s: np.asarray(random.standard_normal(s), np.float32),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


def sharded(tree):
    """Return JAX arrays on devices outside the program, split and copied."""
    mesh = zj.make_mesh(data=2, fsdp=2, devices=jax.devices()[4:8])
    return jax.tree.map(
        lambda a: jax.device_put(a, jax.NamedSharding(mesh, P(*(None, "fsdp")[: a.ndim]))), tree
    )


FORMS = {
    "numpy": lambda tree: tree,
    "jax": lambda tree: jax.tree.map(jnp.asarray, tree),
    "sharded": sharded,
    "named": lambda tree: {
        "embed.w": tree["embed"]["w"],
        "blocks.w": tree["blocks"]["w"],
        "head.gate": float(tree["head"]["gate"]),
    },
    "bfloat16": lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree),
}


def build(**fields):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(MODEL, optax.adam(1e-3), zj.ZeroConfig(**fields), mesh)


def test_arrays_of_every_kind_are_the_first_state():
    program = build(precision="bf16")
    for name, form in FORMS.items():
        state = zj.import_params(program, form(arrays()), key=jax.random.key(3))
        expected = arrays()
        if name == "bfloat16":
            expected = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(np.float32), expected)
        jax.tree.map(np.testing.assert_array_equal, program.master_params(state), expected)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b, state, program.shardings))
        assert int(state.step) == 0


@pytest.mark.by_default("disk")
@pytest.mark.parametrize(
    "tiers",
    [{"params": DISK, "opt_state": DISK}, {"opt_state": "pinned_host"}],
    ids=["disk", "host"],
)
def test_arrays_go_to_their_tier(tiers, tmp_path):
    with build(swap_dir=str(tmp_path), **tiers) as program:
        state = zj.import_params(program, sharded(arrays()), key=jax.random.key(3))
        found, expected = dict(program.iter_params(state)), arrays()
        for layer in range(LAYERS):
            np.testing.assert_array_equal(
                found[f"blocks/{layer}"]["w"], expected["blocks"]["w"][layer]
            )
        jax.tree.map(
            np.testing.assert_array_equal,
            [found["embed"], found["head"]],
            [expected["embed"], expected["head"]],
        )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"head": {}}, r"no head\.gate \[\]"),
        ({"more": {"w": np.ones(3)}}, r"more\.w \[3\], which this program's model does not have"),
        (
            {"blocks": {"w": np.ones((2, WIDTH, WIDTH))}},
            r"blocks\.w \[2, 8, 8\], and here it is \[3, 8, 8\]",
        ),
        (
            {"embed": {"w": np.ones((WIDTH, WIDTH), int)}},
            r"embed\.w of int64, which is not a supported floating dtype",
        ),
        (
            {"embed": {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}},
            r"embed\.w is a ShapeDtypeStruct",
        ),
        ({"embed": {"w": object()}}, r"embed\.w is a object"),
        ({"embed.w": np.ones((WIDTH, WIDTH))}, r"both embed\.w"),
    ],
    ids=["missing", "extra", "misshapen", "integers", "abstract", "object", "twice"],
)
def test_arrays_that_do_not_fit_are_named(change, match):
    with pytest.raises(ValueError, match=match):
        zj.import_params(build(), arrays() | change, key=jax.random.key(0))


def test_arrays_that_were_donated_are_named():
    tree = FORMS["jax"](arrays())
    tree["blocks"]["w"].delete()
    with pytest.raises(ValueError, match=r"blocks\.w was donated"):
        zj.import_params(build(), tree, key=jax.random.key(0))
