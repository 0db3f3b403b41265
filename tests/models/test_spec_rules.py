"""`zj.with_specs`: rules over paths give the specs of annotations, in every form of a model.

Rules that do not fit are refused.
"""

import re

import encoder_decoder
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.models import init_params
from zerojax.sharding import broadcast_specs

CONFIG = gpt.GPTConfig(vocab=16, seq=8, hidden=8, layers=2, heads=2)
RULES = {
    r"(qkv|fc)/kernel": P(None, "tensor"),
    r"(qkv|fc)/bias|token": P("tensor"),
    r"(proj|out)/kernel": P("tensor", None),
}
TILED = {
    r"qkv/kernel|mlp/up$": P(None, "tensor"),
    r"(qkv/|up_)bias|token": P("tensor"),
    r"proj/kernel|mlp/down$": P("tensor"),
}
FUNCTIONS = {"w1$": P(None, "tensor"), "b1": P("tensor"), "w2": P("tensor")}


def by_path(model):
    """Return the spec of each split leaf, by its path in `model.specs`."""
    if isinstance(model, zj.LayeredModel):
        inits = {"embed": model.init_embed, "head": model.init_head}
        inits |= {f"block/{s.name}": s.init_block for s in model.stacks} or {
            "block": model.init_block
        }
    else:
        inits = {"": model.init}
    specs = {}
    for part, init in inits.items():
        given = model.specs
        for key in filter(None, part.split("/")):
            given = (given or {}).get(key)
        tree = jax.eval_shape(init, jax.random.key(0))
        for (path, _), spec in zip(
            jax.tree_util.tree_leaves_with_path(tree), broadcast_specs(given, tree), strict=True
        ):
            if any(spec):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                specs[f"{part}/{name}" if part else name] = tuple(spec)
    return specs


class Dense(nn.Module):
    names: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        return nn.Dense(
            8, kernel_init=nn.with_partitioning(init, (None, "tensor")) if self.names else init
        )(x)


def linen(names):
    return zj.from_flax(
        Dense(names), lambda m, b: jnp.mean(m(b) ** 2), example_batch=jnp.zeros((8, 4))
    )


def annotated(make, **changes):
    """Return two GPTs: one with its modules' annotations, and one without any."""
    return tuple(
        make(gpt.dataclasses.replace(CONFIG, tensor_axis=axis, **changes))
        for axis in ("tensor", None)
    )


@pytest.mark.parametrize(
    ("models", "rules"),
    [
        (lambda: annotated(gpt.layered_gpt), RULES),
        (lambda: annotated(gpt.unrolled_gpt), RULES),
        (lambda: annotated(gpt.layered_gpt, mlp_tiles=2), TILED),
        (lambda: (linen(True), linen(False)), {"Dense_0/kernel": P(None, "tensor")}),
        (lambda: (toys.layered(True), toys.layered()), FUNCTIONS),
        (lambda: (toys.unrolled(True), toys.unrolled()), {rf"^layers/\d+/{leaf}": spec for leaf, spec in FUNCTIONS.items()}),
    ],
    ids=["layered", "unrolled", "tiled", "linen", "functions", "list"],
)  # fmt: skip
def test_rules_give_the_specs_that_annotations_give(models, rules):
    expected, model = models()
    assert by_path(model) == {}
    split, given = by_path(expected), by_path(zj.with_specs(model, rules))
    assert {
        path: (*spec, *(None,) * (len(split[path]) - len(spec))) for path, spec in given.items()
    } == split
    assert split


def of_stacks():
    rules = {
        r"encoder/w$": P(None, "tensor"),
        r"^block/decoder/up": P(None, "tensor"),
        "decoder/down": P("tensor"),
    }
    return zj.with_specs(encoder_decoder.model(specs=None), rules)


def test_rules_name_leaves_of_stacks():
    model = of_stacks()
    assert by_path(model).keys() == {"block/encoder/w", "block/decoder/up", "block/decoder/down"}
    program = zj.build_train_step(
        model, optax.sgd(1e-2), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=4, tensor=2)
    )
    blocks = program.shardings.params["blocks"]
    assert (blocks["encoder"]["w"].spec, blocks["decoder"]["down"].spec) == (
        P(None, "fsdp", "tensor"),
        P(None, "tensor", "fsdp"),
    )


@pytest.mark.exhaustive
def test_stacks_with_rules_train_to_the_same_numbers():
    losses = []
    for model, axes in (
        (of_stacks(), {"fsdp": 2, "tensor": 2}),
        (encoder_decoder.model(specs=None), {"fsdp": 1}),
    ):
        mesh = zj.make_mesh(**axes, devices=jax.devices()[: axes["fsdp"] * axes.get("tensor", 1)])
        program = zj.build_train_step(model, optax.adamw(1e-2), zj.ZeroConfig(stage=3), mesh)
        losses.append(
            toys.run(program, program.init(jax.random.key(0)), encoder_decoder.batches(3))[0]
        )
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_rules_leave_other_specs_and_take_the_place_of_those_they_name():
    model = zj.with_specs(
        toys.layered(True), {"w1": P("tensor"), "table": P("tensor", None), "b1": P()}
    )
    assert by_path(model) == {
        "embed/table": ("tensor", None),
        "block/w1": ("tensor",),
        "block/w2": ("tensor", None),
    }
    again = zj.with_specs(model, {re.compile("W1", re.IGNORECASE): None})
    assert by_path(again) == {"embed/table": ("tensor", None), "block/w2": ("tensor", None)}


def test_rules_split_weights_that_are_frozen_in_8_bits():
    model = zj.with_specs(toys.layered(), {"w1": P(None, "tensor")})
    frozen = {"block": {"w1": True, "b1": False, "w2": False, "scale": False, "gate": False}}
    model = gpt.dataclasses.replace(model, frozen=frozen)
    mesh = zj.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    program = zj.build_train_step(
        model, optax.sgd(1e-2), zj.ZeroConfig(stage=3, frozen_dtype="int8"), mesh
    )
    encoded = jax.tree.leaves(program.shardings.frozen)
    assert any(
        "tensor" in str(sharding.spec) and "fsdp" in str(sharding.spec) for sharding in encoded
    )


def test_rules_make_no_array():
    huge = 1 << 20  # 4 TiB per weight
    functions = {
        "embed": lambda p, b, key: b,
        "block": lambda p, x, key: x,
        "head": lambda p, e, x, b, key: x.sum(),
    }
    inits = dict.fromkeys(
        ("init_embed", "init_block", "init_head"),
        lambda key: {"w": jax.random.normal(key, (huge, huge))},
    )
    before = len(jax.live_arrays())
    model = zj.with_specs(zj.LayeredModel(96, **inits, **functions), {"block/w": P(None, "tensor")})
    assert len(jax.live_arrays()) == before
    assert by_path(model) == {"block/w": (None, "tensor")}


WRONG = [
    (
        {"w7": P("tensor"), "w8": P("tensor")},
        r"no leaf is matched by 'w7', 'w8'; the paths are block/b1, .*, head/frozen$",
    ),
    ({r"w\d": P("tensor"), "block/w1": P()}, r"several do: block/w1 by '.*' and 'block/w1'$"),
    ({"b1": P(None, "tensor")}, r"'b1' gives block/b1 .*2 entries for shape \(40,\)"),
    ({"w1": P("tensor", "tensor")}, r"block/w1 .*names an axis twice"),
    ({"w1": P("fsdp")}, r"block/w1 .*ZeRO chooses the dim that 'fsdp' splits"),
    ({"w1": P(P.UNCONSTRAINED)}, r"block/w1 .*holds UNCONSTRAINED: an entry is None, an axis"),
    ({"w1": "tensor"}, r"'w1' gives 'tensor': a jax.sharding.PartitionSpec or None"),
    ({"(w1": P("tensor")}, r"'\(w1' is not a regular expression: missing \)"),
    ({1: P("tensor")}, r"rule 1 is not a regular expression"),
    ([("w1", P("tensor"))], r"takes a dict of regular expressions and specs, got list"),
]


@pytest.mark.parametrize(("rules", "message"), WRONG, ids=[message[:24] for _, message in WRONG])
def test_rules_that_do_not_fit_are_refused_with_the_paths(rules, message):
    with pytest.raises(ValueError, match=message):
        zj.with_specs(toys.layered(), rules)


def test_rules_for_stacks_of_tiles_have_no_entry_for_their_number():
    with pytest.raises(
        ValueError,
        match=r"block/mlp/up .*3 entries for shape \(2, 8, 16\), whose first dim counts tiles",
    ):
        zj.with_specs(
            gpt.layered_gpt(gpt.dataclasses.replace(CONFIG, mlp_tiles=2)),
            {"mlp/up$": P(None, None, "tensor")},
        )


def test_rules_that_do_not_fit_a_mesh_are_refused_when_building_with_all_paths():
    mesh = zj.make_mesh(fsdp=2, tensor=4)
    model = zj.with_specs(
        toys.layered(), {"table": P(None, "model"), "odd": P("tensor"), "w1": P(None, "tensor")}
    )
    odd = r"\['odd'\]: dim 0 of shape \(7, 3\) does not divide by 4 .*pad it to 8, or leave it unsharded"
    table = r"\['table'\]: .*names axis 'model'; the mesh has \('data', 'fsdp', 'tensor'\)"
    with pytest.raises(ValueError, match=f"{odd}\n.*{table}"):
        zj.build_train_step(model, optax.sgd(1e-2), zj.ZeroConfig(), mesh)


def test_rules_are_for_models():
    with pytest.raises(
        ValueError,
        match=r"takes a zerojax\.Model or LayeredModel, got Linear; see zerojax\.from_flax",
    ):
        zj.with_specs(nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))), {"kernel": P()})  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert jax.eval_shape(
        lambda k: init_params(zj.with_specs(toys.layered(), {}), k), jax.random.key(0)
    )
