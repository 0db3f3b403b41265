"""Activations split over `tensor` equal those of a program that splits nothing.

They are split by sequence parallelism and when they are saved. The table has the allowed relative
differences after 5 steps: of losses; of a parameter, over its leaf's largest element; of all
parameters, over how far they moved. In 16 bits, a leaf whose gradients are pure rounding says
nothing.

    float32     2e-6     1e-5     1e-4
    bfloat16    1e-3     -        4e-2
    float16     1e-4     -        2e-2
"""

import random

import jax
import jax.numpy as jnp
import matrix
import numpy as np
import optax
import pytest
import split_models as models
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax import memory
from zerojax.activations import SequenceParallelism, sequence_parallel

TOLERANCES = {
    "fp32": (2e-6, 1e-5, 1e-4),
    "bf16": (1e-3, np.inf, 4e-2),
    "fp16": (1e-4, np.inf, 2e-2),
}
AXES = {
    "split": ("neither", "sequence_parallel", "partition_activations", "both"),
    "model": tuple(models.MODELS),
    "mesh": tuple(name for name in models.MESHES if name != "one"),
    "stage": (0, 1, 2, 3),
    "activations": ("save", "selective", "remat", "pinned_host", "nvme"),
    "num_microbatches": (1, 3),
    "states": ("device", "pinned_host", "nvme"),
    "update": ("after_backward", "in_backward", "host"),
    "precision": ("fp32", "bf16", "fp16"),
}
QUICK = {
    split: (split, "gpt", "f2t2", 3, "selective", 1, "device", "after_backward", "fp32")
    for split in AXES["split"][1:3]
}


def named(values):
    return dict(zip(AXES, values, strict=True))


def is_valid(case):
    return not (
        (case["update"] == "host" and case["states"] == "device")
        or (case["update"] == "in_backward" and case["precision"] == "fp16")
    )


def pairs():
    """Return quick cases, and cases with all pairs of values of two axes.

    The pairs are those that occur in 600 random cases.
    """
    draw = random.Random(0)
    drawn = (named(draw.choice(values) for values in AXES.values()) for _ in range(600))
    return [
        *map(named, QUICK.values()),
        *matrix.pairwise([case for case in drawn if is_valid(case)]),
    ]


def settings_of(case, swap_dir):
    fields = {
        name: case[name] for name in ("stage", "activations", "num_microbatches", "precision")
    }
    for name in ("sequence_parallel", "partition_activations"):
        fields[name] = case["split"] in (name, "both")
    fields |= {"opt_state": case["states"], "grads": case["states"]}
    if case["stage"] == 3:
        fields["params"] = case["states"]
    fields |= (
        {"update": "after_backward", "update_on": "host"}
        if case["update"] == "host"
        else {"update": case["update"]}
    )
    return fields | {"swap_dir": str(swap_dir)}


@pytest.mark.xdist_group("split_over_tensor")  # one reference for both
@pytest.mark.by_default(*("-".join(map(str, case)) for case in QUICK.values()))
@pytest.mark.parametrize("case", pairs(), ids=matrix.name_of)
def test_split_activations_train_as_whole_ones_do(case, tmp_path):
    result = models.trained(case["model"], case["mesh"], **settings_of(case, tmp_path))
    expected = models.plain(case["model"], case["num_microbatches"], case["precision"])
    found, most = models.differences(result, expected), TOLERANCES[case["precision"]]
    assert all(a <= b for a, b in zip(found, most, strict=True)), (found, most)


# --- partition_activations ------------------------------------------------------------------------


def program_of(seq=models.SEQ, model=None, mesh=None, **fields):
    model = model or models.MODELS["gpt"](jnp.float32)
    return zj.build_train_step(
        model, optax.sgd(1e-3), zj.ZeroConfig(**fields), mesh or models.mesh_of(tensor=4)
    )


def kept_of(program, seq=models.SEQ):
    tokens = jax.ShapeDtypeStruct((models.ROWS, seq), jnp.int32)
    return program.kept({"tokens": tokens, "targets": tokens})


@pytest.mark.parametrize("activations", ["save", "selective", "remat", "pinned_host"])
def test_partition_activations_keeps_what_the_closed_form_says(activations):
    mode = "remat" if activations == "pinned_host" else activations
    program = program_of(activations=activations, partition_activations=True)
    kept = kept_of(program)
    expected = memory.layer_activation_bytes(
        models.SEQ,
        models.ROWS,
        models.WIDTH,
        models.HEADS,
        tensor=4,
        partition_activations=True,
        activations=mode,
        itemsize=4,
    )
    assert kept.num_bytes == 2 * expected
    tokens = jax.ShapeDtypeStruct((models.ROWS, models.SEQ), jnp.int32)
    tiers = program.memory({"tokens": tokens, "targets": tokens}).tiers
    assert (
        tiers["pinned_host" if activations == "pinned_host" else "device"]["activations"]
        == kept.num_bytes
    )
    assert all("tensor" in value.spec for value in kept)


def test_partition_activations_keeps_whole_what_does_not_divide_and_says_so():
    def block(p, x, key):
        return {
            "x": x["x"] + jnp.tanh(x["x"] @ p["a"]) @ p["b"],
            "odd": 2 * x["odd"] + jnp.mean(x["x"]),
        }

    model = zj.LayeredModel(
        num_layers=2,
        init_embed=lambda key: {"w": jnp.ones(())},
        embed=lambda p, batch, key: {
            "x": batch["x"] * p["w"],
            "odd": batch["x"][:, :1, 0] * p["w"],
        },
        init_block=lambda key: {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 8))},
        block=block,
        init_head=lambda key: {},
        head=lambda p, p_embed, x, batch, key: jnp.mean(x["x"] ** 2) + jnp.mean(x["odd"] ** 2),
        specs={"block": {"a": P(None, "tensor"), "b": P("tensor", None)}},
    )
    program = program_of(model=model, partition_activations=True, activations="remat", stage=0)
    kept = program.kept({"x": jax.ShapeDtypeStruct((3, 6, 8), jnp.float32)})
    by_name = {value.name: value for value in kept}
    assert by_name["x['x']"].spec[1:] == (None, "tensor")  # 3 rows of 6: the width divides
    assert by_name["x['odd']"].spec[1:] == (None,)
    assert by_name["x['odd']"].replicated == "no dim of (3, 1) divides by tensor=4"
    assert "whole: no dim of (3, 1) divides" in str(kept)


def test_partition_activations_needs_layers_and_means_nothing_without_tensor():
    with pytest.raises(ValueError, match="partition_activations=True works layer by layer"):
        program_of(model=models.gpt.unrolled_gpt(models.gpt_config()), partition_activations=True)
    alone = {"mesh": models.mesh_of(fsdp=2)}
    assert program_of(partition_activations=True, **alone).config == program_of(**alone).config


# --- sequence parallelism of any block ------------------------------------------------------------

B, T, H = 4, 8, 8


def run_block(operations, p, x):
    """Run operations on values [B, T, ...] in turn; each reads some of the existing values."""
    stream, inner = [x], []  # [B, T, H], and [B, T, F] as returned by products with split weights
    for n, (name, k) in enumerate(operations):
        z, h = stream[k % len(stream)], inner[k % len(inner)] if inner else None
        w = {leaf: a for leaf, a in p.items() if leaf.startswith(f"{n}-")}.get(f"{n}-{name}")
        if name == "column":
            inner.append(jnp.tanh(z @ w))
        elif name == "column_of_wide":
            inner.append(jnp.einsum("fh,bth->btf", w, jnp.tanh(z.astype(jnp.float32))))
        elif name == "norm":
            stream.append(z / (1 + jnp.sqrt(jnp.mean(z**2, -1, keepdims=True))))
        elif name == "whole":
            stream.append(z + z @ w)
        elif name == "mix":  # along the sequence: left to the partitioner
            stream.append(z + 0.1 * jnp.cumsum(z, 1))
        elif name == "flip":
            stream.append(z[:, ::-1] * 0.5 + stream[-1])
        elif h is None:
            continue
        elif name == "row":
            stream.append(stream[-1] + h @ w)
        elif name == "row_heads":  # contracted over two dims
            heads = h.reshape(*h.shape[:2], 4, -1)
            stream.append(stream[-1] + jnp.einsum("btnw,nwh->bth", heads, w.reshape(4, -1, H)))
        elif name == "gate":
            inner.append(h * jax.nn.sigmoid(inner[-1]))
        elif name == "attend":
            q = h.reshape(*h.shape[:2], 4, -1)
            scores = jax.nn.softmax(jnp.einsum("btnw,bsnw->bnts", q, q), -1)
            inner.append(jnp.einsum("bnts,bsnw->btnw", scores, q).reshape(h.shape))
    return stream[-1]


SPECS = {"column": P(None, "tensor"), "column_of_wide": P("tensor", None), "whole": P(), "row": P("tensor", None),
         "row_heads": P("tensor", None)}  # fmt: skip
SHAPES = {
    "column": (H, 16),
    "column_of_wide": (16, H),
    "whole": (H, H),
    "row": (16, H),
    "row_heads": (16, H),
}
OTHERS = ("norm", "mix", "flip", "gate", "attend")


@settings(deadline=None, max_examples=6)
@given(
    st.lists(
        st.tuples(st.sampled_from([*SPECS, *OTHERS]), st.integers(0, 3)), min_size=2, max_size=9
    ),
    st.booleans(),
)
def test_sequence_parallel_blocks_compute_what_they_did(operations, remat):
    check_blocks(operations, remat)


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from([*SPECS, *OTHERS]), st.integers(0, 3)), min_size=2, max_size=14
    ),
    st.booleans(),
)
def test_sequence_parallel_of_many_blocks(operations, remat):
    check_blocks(operations, remat)


def check_blocks(operations, remat):
    operations = [("column", 0), *operations]
    names = {f"{n}-{name}": name for n, (name, _) in enumerate(operations) if name in SPECS}
    rng = np.random.default_rng(0)
    p = {
        leaf: jnp.asarray(0.3 * rng.normal(size=SHAPES[name]), jnp.float32)
        for leaf, name in names.items()
    }
    x, dy = (jnp.asarray(rng.normal(size=(B, T, H)), jnp.float32) for _ in range(2))
    mesh = models.mesh_of(fsdp=2, tensor=2)

    def block(p, x, key):
        run = lambda p, x: run_block(operations, p, x)  # noqa: E731
        return (jax.checkpoint(run) if remat else run)(p, x)

    model = zj.LayeredModel(
        num_layers=1, init_embed=lambda key: {}, embed=lambda p, batch, key: batch, init_block=lambda key: p, block=block,
        init_head=lambda key: {}, head=lambda p, e, x, batch, key: jnp.mean(x),
        specs={"block": {leaf: SPECS[name] for leaf, name in names.items()}},
    )  # fmt: skip
    split = sequence_parallel(model, mesh, seen := SequenceParallelism())

    def value_and_gradients(model):
        y, derivative = jax.vjp(lambda p, x: model.block(p, x, None), p, x)
        return y, *derivative(dy)

    expected = value_and_gradients(model)
    place = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))  # noqa: E731
    with jax.set_mesh(mesh):
        p = {leaf: place(a, SPECS[names[leaf]]) for leaf, a in p.items()}
        x, dy = (place(a, P(("data", "fsdp"), "tensor")) for a in (x, dy))
        found = jax.block_until_ready(jax.jit(lambda: value_and_gradients(split))())
    assert seen.products
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * (np.abs(b).max() + 1e-3))
