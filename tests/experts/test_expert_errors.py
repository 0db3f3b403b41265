"""What `zj.moe` refuses, with the repair."""

from typing import Any

import expert_layers as layers
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

import zerojax as zj
from zerojax.experts.loss import ExpertStats

X, P = layers.tokens(), layers.weights()
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no expert": ({"top_k": 0}, r"top_k=0.* from 1 to the number of experts, 8"),
    "too many experts": ({"top_k": 9}, r"top_k=9.* from 1 to the number of experts, 8"),
    "a float": ({"top_k": 2.0}, r"top_k=2.0, .* must be an integer from 1 to"),
    "capacity 0": ({"capacity_factor": 0}, r"capacity_factor=0: .*, or None to drop no token"),
    "negative capacity": ({"capacity_factor": -1.0}, r"capacity_factor=-1.0: a positive"),
    "capacity nan": ({"capacity_factor": float("nan")}, r"capacity_factor=nan"),
    "activation": ({"activation": "gelu"}, r"activation='gelu' must be a function"),
    "two dims": ({"x": X[0]}, r"x must have tokens in three dims, \[B, T, H\]"),
    "no tokens": ({"x": X[:0]}, r"none of them 0, got x\[0, 8, 16\]"),
    "width": ({"x": X[..., :8]}, r"up\[E, H, F\] = \[8, 16, 24\], x must be \[8, 8, 16\]"),
    "router": ({"router": P["router"].T}, r"router must be \[16, 8\], got .*router\[8, 16\]"),
    "one expert's weight": ({"up": P["up"][0]}, r"up must be \[E, H, F\]"),
    "down": ({"down": P["up"]}, r"down must be \[8, 24, 16\]"),
    "gate": ({"gate": P["down"]}, r"gate must be \[8, 16, 24\]"),
    "integers": ({"x": X.astype(jnp.int32)}, r"x must be float32, bfloat16 or float16"),
    "integer router": ({"router": P["router"].astype(jnp.int32)}, r"router must be floating"),
    "mixed dtypes": ({"x": X.astype(jnp.bfloat16)}, r"up must have the dtype of x, bfloat16: pass"),
}


@pytest.mark.parametrize("case", CASES)
def test_moe_refuses(case):
    changed, message = CASES[case]
    with pytest.raises(ValueError, match=f"moe: .*{message}"):
        zj.moe(**{"x": X, **P, **changed})


def test_moe_refuses_explicit_axes():
    kinds = (AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("expert",), kinds, devices=jax.devices()[:2])
    message = "moe: the mesh in scope has explicit axes, expert, .* zj.make_mesh"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        zj.moe(X, **P)


def test_one_expert_is_refused_over_several_devices():
    p = jax.tree.map(lambda a: a[:1] if a.ndim == 3 else a[:, :1], P)
    message = r"moe: 1 expert does not divide by the mesh's expert=2: choose expert=1, or 2 experts"
    with (
        jax.set_mesh(zj.make_mesh(fsdp=4, expert=2)),
        pytest.raises(ValueError, match=message),
    ):
        zj.moe(X, **p, top_k=1)


def test_moe_refuses_experts_that_do_not_divide_by_the_axis():
    p = jax.tree.map(lambda a: a[:6] if a.ndim == 3 else a[:, :6], P)
    mesh = zj.make_mesh(fsdp=2, expert=4)
    message = r"moe: 6 experts do not divide by the mesh's expert=4: choose a divisor of 6 as expert, or 8"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        zj.moe(X, **p)


@pytest.mark.parametrize(
    "case",
    ["no expert", "too many experts", "capacity 0", "capacity nan", "activation"],
)
def test_modules_refuse_the_same_when_they_are_built(case):
    changed, message = CASES[case]
    with pytest.raises(ValueError, match=f"moe: .*{message}"):
        zj.MoE(layers.WIDTH, layers.INNER, layers.EXPERTS, rngs=nnx.Rngs(0), **changed)
    with pytest.raises(ValueError, match=f"moe: .*{message}"):
        zj.linen.MoE(layers.INNER, layers.EXPERTS, **changed)


def test_modules_need_an_expert():
    message = "moe: num_experts=0: an integer of at least 1 is needed"
    with pytest.raises(ValueError, match=message):
        zj.MoE(layers.WIDTH, layers.INNER, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        zj.linen.MoE(layers.INNER, 0)


def test_the_loss_of_experts_needs_numbers_as_weights():
    stats = ExpertStats(*jnp.ones(3))
    with pytest.raises(ValueError, match=r"expert_loss: balance=None: a finite number is needed"):
        zj.expert_loss(stats, balance=None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("stats", [None, (1.0, 2.0, 0.0)])
def test_the_loss_of_experts_needs_their_statistics(stats):
    message = rf"stats must be an ExpertStats, got {type(stats).__name__}: pass the second result"
    with pytest.raises(TypeError, match=message):
        zj.expert_loss(stats)
