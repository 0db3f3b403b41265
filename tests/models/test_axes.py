"""Rules map axis names to mesh axes, in parameters and in constraints of modules."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import models_of_others as others
import optax
import pytest
from flax.linen.spmd import with_logical_constraint
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.models.axes import AxisNames

RULES = (
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("embed", "fsdp"),
    ("both", ("data", "tensor")),
    ("none", None),
)


@pytest.mark.parametrize(
    ("names", "spec"),
    [
        (("vocab", "none"), P("tensor", None)),
        (("embed", "vocab"), P(None, "tensor")),  # ZeRO owns fsdp
        (("heads", "vocab"), P(None, "tensor")),  # the first rule has the axis
        (("both", None), P("tensor", None)),
        (("layers", "tensor"), P(None, "tensor")),  # no rule matches it; the axis is used unchanged
        ((("heads", "embed"), "none"), P("tensor", None)),
        ((), P()),
    ],
)
def test_a_spec_is_what_the_first_rules_give(names, spec):
    assert AxisNames(RULES).spec("w", names) == spec


def test_without_rules_names_are_axes_and_those_of_zero_are_dropped():
    assert AxisNames().spec("w", ("fsdp", "tensor", "embed", ("data", "tensor"))) == P(
        None, "tensor", "embed", "tensor"
    )
    with nn.logical_axis_rules((("embed", "tensor"),)):
        assert AxisNames().spec("w", ("embed",)) == P("tensor")
        assert AxisNames(()).spec("w", ("embed",)) == P(
            None
        )  # passed rules take precedence over those in scope
    assert AxisNames().spec("w", ("embed",), (("embed", "tensor"),)) == P("tensor")  # a leaf's own


def test_rules_may_refuse_names():
    with pytest.raises(
        ValueError, match=r"module\.w.*axis_rules has no rule for the name 'layers'"
    ):
        AxisNames((*RULES, ("*", "refuse"))).spec("module.w", ("layers", "embed"))
    with pytest.raises(ValueError, match=r"module\.w.*refuses the name 'layers'"):
        AxisNames((*RULES, ("layers", "refuse"))).spec("module.w", ("layers", "embed"))
    with pytest.raises(ValueError, match="pairs are needed"):
        AxisNames(("vocab", "tensor"))


def test_what_was_dropped_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "zerojax"):
        others.stacked(None)
    (record,) = [r for r in caplog.records if "axes" in r.getMessage()]
    assert (
        "'layers' (no rule for it) of 2 parameters, 'data' (ZeRO assigns it) of 2 parameters"
        in record.getMessage()
    )
    assert record.levelno == logging.WARNING


def test_modules_constrain_activations_by_the_rules():
    names = ("batch", None, "mlp")
    rules = (("batch", ("data", "fsdp")), ("mlp", "tensor"))

    def traced(names_of: AxisNames) -> str:
        def run(x: jax.Array) -> jax.Array:
            with names_of.while_run():
                return with_logical_constraint(x, names)

        with jax.set_mesh(zj.make_mesh(fsdp=4, tensor=2)):
            return str(jax.make_jaxpr(run)(jnp.ones((8, 2, 8))))

    assert "sharding_constraint" not in traced(AxisNames())
    assert "spec=P(UNCONSTRAINED, None, 'tensor')" in traced(AxisNames(rules))
    assert "sharding_constraint" not in traced(AxisNames(rules, {}))
    assert "spec=P(UNCONSTRAINED, None, 'tp')" in traced(AxisNames(rules, {"tp": "tensor"}))


@pytest.mark.parametrize("name", ["gemma", "qwen3"])
def test_what_a_model_constrains_itself_needs_mesh_axes(name):
    (batch,), shard = (
        others.tokens(1),
        {"gemma": others.constrained, "qwen3": others.resharded}[name],
    )
    make = lambda rngs: others.Gemma(others.GemmaSharding.fsdp_tp_sharding(), shard, rngs)  # noqa: E731
    mesh = zj.make_mesh(fsdp=4, tensor=2)
    model = zj.from_flax(make, others.of_tokens, axis_rules=(("tp", "tensor"),))
    with pytest.raises(ValueError, match="tp"):
        zj.build_train_step(model, optax.sgd(0.1), zj.ZeroConfig(), mesh, batch=batch)
    zj.build_train_step(
        others.MODELS[name][0](batch), optax.sgd(0.1), zj.ZeroConfig(), mesh, batch=batch
    )
