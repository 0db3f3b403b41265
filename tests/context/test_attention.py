"""`zj.attention` over `context` against the plain formula: values and gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from plain_attention import plain_attention

import zerojax as zj

B, T, N, D = 2, 64, 16, 8
OPTIONS = {
    "causal": {},
    "full": {"causal": False},
    "segments": {"segments": True},
    "window": {"window": 20, "segments": True},
    "cap": {"cap": 1.5},
}
KV_HEADS = {"N": N, "N4": N // 4, "1": 1}
CASES = [
    pytest.param(*case, id="-".join(map(str, case)))
    for case in itertools.product(
        ("ring", "ulysses", "gather"), OPTIONS, KV_HEADS, (2, 4, 8), (1, 2), ("float32", "bfloat16")
    )
    if case[3] * case[4] <= 8
]
LIMITS = {"float32": 5e-6, "bfloat16": 2e-2}
"""Largest difference allowed, relative to the largest element.

In bf16, the rounding of the result alone is 2^-9; weights and slopes are rounded too, and enter sums
of many terms. The plain formula in bf16 differs from float32 by about as much (see
`test_bf16_is_as_exact_as_the_plain_formula_in_bf16`).
"""


@functools.cache
def operands(kv_heads, dtype):
    rng = np.random.default_rng(0)
    shapes = [(B, T, N, D), (B, T, kv_heads, D), (B, T, kv_heads, D), (B, T, N, D)]
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    # Sorted numbers: some chunks of a segment hold no key that another chunk sees.
    return arrays, np.sort(rng.integers(0, 4, (B, T)), 1).astype(np.int32)


def value_and_grads(attend, arrays):
    q, k, v, do = arrays

    def total(q, k, v):
        o = attend(q, k, v)
        return jnp.sum((o * do).astype(jnp.float32)), o

    (_, o), grads = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(q, k, v)
    return [np.asarray(a, np.float32) for a in (o, *grads)]


@functools.cache
def expected(options, kv_heads):
    """Return what the plain formula gives in float32 for the operands in bf16 or float32."""
    results = {}
    chosen = dict(OPTIONS[options])
    for dtype in LIMITS:
        arrays, ids = operands(kv_heads, dtype)
        given = dict(chosen, segment_ids=ids if chosen.get("segments") else None)
        given.pop("segments", None)
        wide = [a.astype(jnp.float32) for a in arrays]
        results[dtype] = value_and_grads(functools.partial(plain_attention, **given), wide)
    return results


def on_mesh(arrays, axes, method, options, dtype, block=6):
    chosen = dict(OPTIONS[options])
    ids = operands(arrays[1].shape[2], dtype)[1] if chosen.pop("segments", False) else None
    mesh = zj.make_mesh(data=1, devices=jax.devices()[: int(np.prod(list(axes.values())))], **axes)

    def attend(q, k, v):
        return zj.attention(q, k, v, segment_ids=ids, method=method, block=block, **chosen)

    with jax.set_mesh(mesh):
        tensor = axes.get("tensor", 1)
        placed = []
        for a in arrays:
            heads = "tensor" if a.shape[2] % tensor == 0 else None
            spec = PartitionSpec("fsdp", "context", heads)
            placed.append(jax.device_put(a, NamedSharding(mesh, spec)))
        return value_and_grads(attend, placed)


def check(got, want, limit):
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        assert np.max(np.abs(a - b)) <= limit * np.max(np.abs(b)), name


@pytest.mark.by_default(
    "ring-causal-N-4-2-float32",
    "ring-window-1-2-1-float32",
    "ring-full-N4-2-1-bfloat16",
    "ulysses-segments-N4-4-2-float32",
    "gather-window-N4-4-1-float32",
    "gather-cap-1-2-1-bfloat16",
)
@pytest.mark.parametrize(("method", "options", "kv", "context", "tensor", "dtype"), CASES)
def test_attention_equals_the_plain_formula(method, options, kv, context, tensor, dtype):
    arrays = operands(KV_HEADS[kv], dtype)[0]
    axes = {"fsdp": 1 if context * tensor > 4 else 2, "context": context, "tensor": tensor}
    got = on_mesh(arrays, axes, method, options, dtype)
    check(got, expected(options, KV_HEADS[kv])[dtype], LIMITS[dtype])


@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_a_chunk_without_a_visible_key_adds_nothing(method):
    """Each eighth of the sequence is a segment, so that other devices' keys are all invisible."""
    arrays = operands(N // 4, "float32")[0]
    ids = np.repeat(np.arange(8, dtype=np.int32), T // 8)[None].repeat(B, 0)
    with jax.set_mesh(zj.make_mesh(fsdp=2, context=4)):
        got = value_and_grads(
            lambda *qkv: zj.attention(*qkv, segment_ids=ids, method=method, block=4), arrays
        )
    want = value_and_grads(functools.partial(plain_attention, segment_ids=ids), arrays)
    check(got, want, LIMITS["float32"])


def test_bf16_is_as_exact_as_the_plain_formula_in_bf16():
    arrays = operands(N, "bfloat16")[0]
    exact = expected("causal", N)["bfloat16"]
    got = on_mesh(arrays, {"fsdp": 2, "context": 4}, "ring", "causal", "bfloat16")
    plain = value_and_grads(plain_attention, arrays)

    def error(found):
        pairs = zip(found, exact, strict=True)
        return max(np.max(np.abs(a - b)) / np.max(np.abs(b)) for a, b in pairs)

    assert error(got) <= 1.2 * error(plain)
    assert error(plain) <= LIMITS["bfloat16"]


def test_inside_a_shard_map_it_is_one_devices():
    q, k, v, do = operands(N // 4, "float32")[0]
    mesh = zj.make_mesh(fsdp=2, context=4)
    spec = PartitionSpec(None, None, "context")
    with jax.set_mesh(mesh):
        alone = jax.shard_map(zj.attention, in_specs=spec, out_specs=spec, check_vma=False)
        got = value_and_grads(alone, (q, k, v, do))
    check(got, value_and_grads(plain_attention, (q, k, v, do)), LIMITS["float32"])


@pytest.mark.parametrize("axes", [(), ("fsdp",)], ids=["all axes", "fsdp"])
def test_inside_a_shard_map_that_counts_what_varies(axes):
    q, k, v, do = (a[:2, :8] for a in operands(N // 4, "float32")[0])
    k = v = k[:1]  # the same on all devices, which see one row of the queries each
    spec = PartitionSpec("fsdp")
    whole = PartitionSpec()
    with jax.set_mesh(zj.make_mesh(fsdp=2, context=4)):
        specs = {"in_specs": (spec, whole, whole), "out_specs": spec}
        # Empty names stand for all axes. With fsdp alone, attention exchanges over context.
        alone = jax.shard_map(
            functools.partial(zj.attention, method="ring"), axis_names=set(axes), **specs
        )
        got = value_and_grads(alone, (q, k, v, do))

    def plain(q, k, v):
        return plain_attention(q, jnp.repeat(k, 2, 0), jnp.repeat(v, 2, 0))

    check(got, value_and_grads(plain, (q, k, v, do)), LIMITS["float32"])


def test_rows_that_do_not_divide_are_not_split():
    arrays = [a[:1] for a in operands(N // 4, "float32")[0]]
    with jax.set_mesh(zj.make_mesh(fsdp=2, context=4)):
        got = value_and_grads(functools.partial(zj.attention, method="ring"), arrays)
    check(got, value_and_grads(plain_attention, arrays), LIMITS["float32"])
