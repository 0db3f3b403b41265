"""`zj.attention` over `context`, compiled for absent H200s: what it sends, and its largest arrays."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zerojax as zj
from zerojax import aot, hlo

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("h200")]
SIZE, LENGTH, HEADS, WIDTH = 8, 131072, 8, 128
CASES = {
    "ring": {"method": "ring"},
    "ring-segments": {"method": "ring", "segments": True},
    "ring-full": {"method": "ring", "causal": False, "segments": True},
    "ulysses": {"method": "ulysses"},
    "ulysses-segments": {"method": "ulysses", "segments": True},
    "ulysses-cudnn": {"method": "ulysses", "implementation": "cudnn"},
    "gather-window": {"method": "gather", "window": 1024, "segments": True},
}


@functools.cache
def compiled(case: str) -> dict[str, str]:
    """Return the programs of forward and of backward."""
    options = dict(CASES[case])
    has_segments = options.pop("segments", False)
    mesh = aot.gpu_mesh("h200", fsdp=1, context=SIZE)

    def array(dtype, *shape):
        spec = PartitionSpec(None, "context")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    q = array(jnp.bfloat16, 1, LENGTH, HEADS, WIDTH)
    ids = array(jnp.int32, 1, LENGTH) if has_segments else None

    def forward(q, k, v, ids):
        return jax.vjp(lambda *qkv: zj.attention(*qkv, segment_ids=ids, **options), q, k, v)

    with jax.set_mesh(mesh):
        lowered = jax.jit(forward).lower(q, q, q, ids)
        o, pull = jax.eval_shape(forward, q, q, q, ids)
        placed = jax.tree.map(lambda a: array(a.dtype, *a.shape) if a.ndim > 1 else a, pull)
        pulled = jax.jit(lambda pull, do: pull(do)).lower(placed, array(o.dtype, *o.shape))
        programs = {"forward": lowered, "backward": pulled}
        return {name: program.compile().as_text() or "" for name, program in programs.items()}


def sent(case: str, phase: str) -> dict[str, int]:
    """Return how many collectives of each kind run."""
    counts = collections.Counter()
    for c in hlo.collectives(compiled(case)[phase], unknown_trips=1):
        counts[c.op] += c.times
    return dict(counts)


def beside_products(case: str, phase: str) -> int:
    """Return how many permutes run beside products."""
    spans = hlo.spans(compiled(case)[phase])
    return sum(s.times for s in spans if s.kind == "collective-permute" and s.products)


@pytest.mark.parametrize(
    ("case", "travelling", "zigzag"),
    [("ring", 2, {8}), ("ring-segments", 3, {8, 10}), ("ring-full", 3, {0})],
)
def test_a_ring_sends_each_array_c_minus_1_times_beside_products(case, travelling, zigzag):
    """Keys, values, and segment ids if any; in backward also two gradients, and once more home.

    Each array in zigzag order costs two permutes: q, k, v, ids and o in forward; do, delta, dq, dk
    and dv in backward. XLA may send ids with q, and delta with do.
    """
    turns = SIZE - 1
    forward = travelling * turns
    backward = (travelling + 2) * turns
    assert sent(case, "forward").keys() == sent(case, "backward").keys() == {"collective-permute"}
    assert sent(case, "forward")["collective-permute"] - forward in zigzag
    in_backward = {8, 10} if zigzag != {0} else {0}
    assert sent(case, "backward")["collective-permute"] - backward - 2 in in_backward
    assert beside_products(case, "forward") >= forward
    assert beside_products(case, "backward") >= backward


@pytest.mark.parametrize("case", ["ulysses", "ulysses-segments", "ulysses-cudnn"])
def test_ulysses_sends_4_and_5_all_to_alls(case):
    """Backward sends do, delta and three gradients; cuDNN computes delta itself."""
    gathers = {"all-gather": 1} if "segments" in case else {}
    assert sent(case, "forward") == {"all-to-all": 4, **gathers}
    assert sent(case, "backward") == {"all-to-all": 4 if "cudnn" in case else 5}


def test_gather_gathers_keys_and_values_and_scatters_their_gradients():
    assert sent("gather-window", "forward") == {"all-gather": 3}
    assert sent("gather-window", "backward") == {"all-gather": 3, "reduce-scatter": 2}


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("case", CASES)
def test_no_array_holds_the_scores_of_a_device(case, phase):
    largest = 0
    for dims in re.findall(r"\b(?:bf16|f32|s32|pred)\[([\d,]+)\]", compiled(case)[phase]):
        largest = max(largest, math.prod(map(int, dims.split(","))))
    assert 0 < largest <= LENGTH * HEADS * WIDTH
    assert largest < LENGTH * LENGTH // SIZE


def test_cudnns_kernel_attends_between_the_exchanges():
    text = compiled("ulysses-cudnn")
    assert 'custom_call_target="__cudnn$fmhaSoftmax"' in text["forward"]
    assert 'custom_call_target="__cudnn$fmhaSoftmaxBackward"' in text["backward"]
