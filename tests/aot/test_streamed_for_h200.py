"""Streamed steps compiled for 8 absent H200s: memory, host link, collectives, overlap.

The layers are MLPs of three 4096 x 4096 matrices in bfloat16, on few tokens, so activations are
comparatively small.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from jax.sharding import PartitionSpec as P

import zerojax as zj
from host_offload.schedule import HEAD_PIECES, UNSTACKED_PIECES
from zerojax import aot, hlo
from zerojax.compat import GPU_JAXLIB, jaxlib_version
from zerojax.memory.report import MemoryReport

pytestmark = pytest.mark.xdist_group(
    "h200"
)  # tests share compiled programs, so they share a process
HIDDEN, VOCAB, SEQ, BATCH, GPUS, LAYERS = 4096, 512, 64, 2, 8, 24
LAYER_PARAMS = 3 * HIDDEN**2 + HIDDEN
LAYER_BYTES = 2 * LAYER_PARAMS
MATRIX_SHARD = 2 * HIDDEN**2 // GPUS
ACTIVATION_BYTES = 2 * BATCH * SEQ * HIDDEN  # a layer's input on one GPU
SMALL = 1 << 21  # below: scalars, activations, leaves that are not stacked
LAST_LOADS_ARE_LATE = jax.__version_info__ < (0, 12)
"""XLA before 0.12 overlaps the loads of a tick's last turn with gradient reductions.

The products here are small; in a model of 6.7 B, every load overlaps with products.
"""
INVOLUNTARY = "nvoluntary full rematerialization"

HOST = "pinned_host"
ALL = {"params": HOST, "grads": HOST, "opt_state": HOST, "activations": HOST}
AHEAD = {**ALL, "gather_ahead": True}
SEGMENTS = (
    zj.Segment(8, activations=HOST),
    zj.Segment(8, activations="remat", offloaded_names=("#1",)),
    zj.Segment(8, activations=HOST, saved_names=("#0",)),
)
CASES: dict[str, dict[str, Any]] = {
    "all": ALL,
    "all_96_layers": {**ALL, "layers": 96},
    "all_distance_0": {**ALL, "prefetch_distance": 0},
    "all_distance_2": {**ALL, "prefetch_distance": 2},
    "ahead": AHEAD,
    "ahead_distance_2": {**AHEAD, "prefetch_distance": 2},
    "microbatches": {**ALL, "num_microbatches": 4},
    "in_backward": {**AHEAD, "update": "in_backward"},
    "half_of_opt_state": {"opt_state": HOST, "opt_state_device_fraction": 0.5, "clip_norm": 1.0},
    "fp32": {**ALL, "precision": "fp32"},
    "tensor": {**AHEAD, "mesh": (("fsdp", 4), ("tensor", 2))},
    "segments": {**ALL, "activations": SEGMENTS},
    "segments_in_backward": {**AHEAD, "activations": SEGMENTS, "update": "in_backward"},
    "large_ends": {
        "opt_state": HOST,
        "update": "in_backward",
        "activations": "remat",
        "layers": 12,
        "vocab": 16384,
    },
    "update_on_host": {"opt_state": HOST, "update_on": "host", "activations": "remat"},
    "update_on_host_all": {**ALL, "update_on": "host"},
}
QUICK = ["all", "in_backward", "update_on_host_all"]
"""Cases that are compiled without `-m exhaustive`."""
RESIDENT = {"resident": {"opt_state": HOST}, "resident_on_device": {}}


def init_block(key: Any) -> Any:
    return {name: jax.random.normal(key, (HIDDEN, HIDDEN)) for name in "abc"} | {
        "scale": jnp.ones(HIDDEN)
    }


def block(p: Any, x: Any, key: Any) -> Any:
    return x + jax.nn.gelu(jax.nn.gelu((x * p["scale"]) @ p["a"]) @ p["b"]) @ p["c"]


def init_ends(key: Any, vocab: int = VOCAB) -> tuple[Any, Any]:
    return jax.random.normal(key, (vocab, HIDDEN)), jax.random.normal(key, (HIDDEN, vocab))


def head(out: Any, table: Any, x: Any, batch: Any, key: Any) -> Any:
    logits = (x @ out).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))


def layered(layers: int, tensor: bool, vocab: int = VOCAB) -> zj.LayeredModel:
    specs = {"a": P(None, "tensor"), "b": P("tensor", None), "c": P(), "scale": P()}
    return zj.LayeredModel(
        layers,
        lambda key: init_ends(key, vocab)[0],
        lambda table, batch, key: table[batch["tokens"]],
        init_block,
        block,
        lambda key: init_ends(key, vocab)[1],
        head,
        specs={"block": specs} if tensor else None,
    )


def unrolled(layers: int) -> zj.Model:
    def loss(params: Any, batch: Any, key: Any) -> Any:
        x = params["table"][batch["tokens"]]
        for p in params["layers"]:
            x = block(p, x, key)
        return head(params["out"], None, x, batch, key)

    def init(key: Any) -> Any:
        table, out = init_ends(key)
        return {"table": table, "out": out, "layers": [init_block(key) for _ in range(layers)]}

    return zj.Model(init, loss)


@dataclasses.dataclass(frozen=True)
class Compiled:
    program: zj.Program
    text: str
    stats: Any
    report: MemoryReport

    @property
    def temp_layers(self) -> float:
        """Return bytes in addition to the arguments, in layers of the compute dtype."""
        return self.stats.temp_size_in_bytes / LAYER_BYTES

    def beside(self, *kinds: str) -> list[hlo.Span]:
        """Return the transfers of loops with many iterations, and what they overlap with."""
        return [
            s
            for s in hlo.spans(self.text)
            if s.kind in kinds and s.times > 1 and s.num_bytes > SMALL
        ]


@pytest.fixture(autouse=True)
def _sharded(capfd):
    """Fail if the partitioner could not shard something."""
    yield
    assert INVOLUNTARY not in capfd.readouterr().err


@functools.cache
def compiled(name: str) -> Compiled:
    fields = dict({**CASES, **RESIDENT}[name])
    axes = dict(fields.pop("mesh", ()))
    layers, vocab = fields.pop("layers", LAYERS), fields.pop("vocab", VOCAB)
    model = unrolled(2) if name in RESIDENT else layered(layers, "tensor" in axes, vocab)
    config = zj.ZeroConfig(**{"stage": 3, "precision": "bf16", **fields})
    program = zj.build_train_step(
        model, optax.adamw(1e-3), config, aot.gpu_mesh("h200", gpus_per_host=GPUS, **axes)
    )
    tokens = jax.ShapeDtypeStruct((BATCH * GPUS * config.num_microbatches, SEQ), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    result = program.lower(batch).compile()
    return Compiled(program, result.as_text(), result.memory_analysis(), program.memory(batch))


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.by_default("all-1")
@pytest.mark.parametrize(
    ("name", "distance"),
    [
        ("all_distance_0", 0),
        ("all", 1),
        ("all_96_layers", 1),
        ("all_distance_2", 2),
        ("ahead", 1),
        ("ahead_distance_2", 2),
    ],
)
def test_the_device_holds_a_few_layers_however_many_there_are(name, distance):
    c = compiled(name)
    gathered_ahead = int(c.program.config.gather_ahead)
    held = c.stats.argument_size_in_bytes + c.stats.temp_size_in_bytes
    assert held < (distance + 3 + gathered_ahead) * LAYER_BYTES + (distance + 3) * ACTIVATION_BYTES


@pytest.mark.exhaustive  # by default the test above holds a few layers of 24
def test_device_bytes_are_equal_at_24_and_96_layers():
    few, many = compiled("all"), compiled("all_96_layers")
    np.testing.assert_allclose(
        few.stats.temp_size_in_bytes, many.stats.temp_size_in_bytes, rtol=0.01
    )
    assert many.stats.host_argument_size_in_bytes > 3.9 * few.stats.host_argument_size_in_bytes


@pytest.mark.by_default(*QUICK)
@pytest.mark.parametrize("name", CASES)
def test_the_account_equals_the_compiled_arguments(name):
    c = compiled(name)
    assert c.report.host_argument_bytes == c.stats.host_argument_size_in_bytes
    assert c.report.argument_bytes == c.stats.argument_size_in_bytes


@pytest.mark.by_default(*QUICK)
@pytest.mark.parametrize("name", CASES)
def test_no_state_is_held_twice_in_host_memory(name):
    c = compiled(name)
    assert c.stats.host_temp_size_in_bytes == 0
    assert c.stats.host_output_size_in_bytes == c.stats.host_alias_size_in_bytes  # updated in place
    copies = hlo.host_copies(c.text, unknown_trips=1)
    of_leaf = 4 * CASES[name].get("vocab", VOCAB) * HIDDEN  # that is not stacked
    assert max((copy.num_bytes for copy in copies), default=0) <= of_leaf
    assert all(copy.direction != "host_to_host" for copy in copies)


def test_optimizer_state_of_a_resident_model_is_updated_leaf_by_leaf():
    c, on_device = compiled("resident"), compiled("resident_on_device")
    assert c.report.argument_bytes == c.stats.argument_size_in_bytes
    assert c.report.host_argument_bytes == c.stats.host_argument_size_in_bytes
    assert c.stats.host_temp_size_in_bytes == 0
    leaf = 12 * HIDDEN**2 // GPUS  # the largest leaf's master and moments
    # Each array has a piece of 1 MiB that is loaded, the result computed from it, and the previous
    # piece.
    in_pieces = 3 * 3 * (1 << 20)
    assert c.report.tiers["device"]["in_flight"] == in_pieces
    assert c.stats.temp_size_in_bytes <= on_device.stats.temp_size_in_bytes + 2.1 * leaf
    assert (
        c.stats.host_argument_size_in_bytes > 6 * leaf
    )  # so that the test above would show all of them at the same time


# --- the link to the host -------------------------------------------------------------------------


@pytest.mark.by_default(*QUICK, "resident")
@pytest.mark.parametrize("name", [*CASES, "resident"])
def test_every_record_crosses_the_link_as_often_as_the_account_says(name):
    c = compiled(name)
    copied = hlo.host_link_bytes(c.text, unknown_trips=1)
    for way, expected in c.report.host_link.items():
        np.testing.assert_allclose(
            copied[way], expected - c.report.callback_link[way], rtol=1e-3, err_msg=way
        )


@pytest.mark.by_default(*QUICK, "resident")
@pytest.mark.parametrize("name", [*CASES, "resident"])
def test_slices_of_host_memory_are_at_the_records_asked_for(name):
    """Older versions of jaxlib are refused where a step would run.

    They use the addresses of other records.
    """
    text = compiled(name).text
    slices = hlo.host_slices(text, unknown_trips=1)
    assert bool(slices) == (name != "update_on_host")
    if jaxlib_version() >= GPU_JAXLIB:
        assert all(s.proven for s in slices)
    elif slices:
        assert hlo.unsafe_host_slices(text, unknown_trips=1)


def test_an_update_on_the_host_moves_4_bytes_a_parameter():
    c = compiled("update_on_host")
    shard = c.report.num_params // GPUS
    assert c.report.host_link == {"to_device": 2 * shard, "to_host": 2 * shard}
    everything = compiled("update_on_host_all")
    assert everything.report.callback_link == {"to_device": 0, "to_host": 2 * shard}
    assert sum(everything.report.host_link.values()) < 0.2 * sum(
        compiled("all").report.host_link.values()
    )


# --- collectives ----------------------------------------------------------------------------------


@pytest.mark.by_default("all-1", "in_backward-1", "microbatches-4")
@pytest.mark.parametrize(
    ("name", "scatters"), [("all", 1), ("ahead", 1), ("in_backward", 1), ("microbatches", 4)]
)
def test_a_layer_is_gathered_twice_whatever_the_microbatches(name, scatters):
    c = compiled(name)
    moved = hlo.collective_bytes(c.text, SMALL, unknown_trips=1)
    elements = {
        op: n / 2 / c.report.num_params for op, n in moved.items() if n > 1e-3 * c.report.num_params
    }
    assert set(elements) == {"all-gather", "reduce-scatter"}
    np.testing.assert_allclose(elements["all-gather"], 2, rtol=0.02)
    np.testing.assert_allclose(elements["reduce-scatter"], scatters, rtol=0.02)
    sent = {op: 2 * n * c.report.num_params * (GPUS - 1) / GPUS for op, n in elements.items()}
    np.testing.assert_allclose(sent["all-gather"], c.report.collectives["all_gather"], rtol=0.02)
    np.testing.assert_allclose(
        sent["reduce-scatter"], c.report.collectives["reduce_scatter"], rtol=0.02
    )


@pytest.mark.by_default("all", "in_backward", "microbatches")
@pytest.mark.parametrize("name", ["all", "ahead", "in_backward", "microbatches"])
def test_gradients_are_reduced_to_their_shards_inside_the_backward_loop(name):
    found = [
        c
        for c in hlo.collectives(compiled(name).text, unknown_trips=1)
        if c.op == "reduce-scatter" and c.times > 1
    ]
    reduced = sum(c.num_bytes * c.times for c in found)
    assert (
        reduced >= (LAYERS - 3) * LAYER_BYTES
    )  # each of the first tick and the last two is a loop of its own
    assert all(c.num_bytes <= 1.01 * LAYER_BYTES for c in found)


# 9 seconds; by default test_compiled_for_h200 splits a resident model over `tensor`
@pytest.mark.exhaustive
def test_over_fsdp_and_tensor_no_activation_is_replicated():
    """Rows of the look-up's gradient are sent to their shards.

    Left to itself, XLA of jax 0.11 and 0.12 sums full activations.
    """
    c = compiled("tensor")
    stream = 2 * ACTIVATION_BYTES  # from 4 devices over fsdp to 8
    found = [
        e
        for e in hlo.collectives(c.text, unknown_trips=1, mesh=c.program.mesh)
        if e.num_bytes == stream
    ]
    assert {(e.op, e.axes) for e in found if e.axes != "tensor"} == {("all-to-all", "fsdp")}
    assert sum(e.times for e in found if e.axes == "fsdp") == 1
    gathered = [
        e.num_bytes for e in hlo.collectives(c.text, unknown_trips=1) if e.op == "all-gather"
    ]
    assert min(gathered) == 4 * BATCH * GPUS * SEQ  # tokens, int32: 4 KiB


# --- overlap --------------------------------------------------------------------------------------


@pytest.mark.by_default("in_backward")
@pytest.mark.parametrize("name", ["ahead", "ahead_distance_2", "in_backward"])
def test_with_gather_ahead_gathers_and_fetches_run_beside_products(name):
    c = compiled(name)
    gathers = c.beside("all-gather")
    loops = {s.computation for s in gathers}
    assert (
        len(loops) >= 2
    )  # forward and backward; at distance 2 also a loop for the ticks that fetch nothing more
    assert all(s.is_async and s.products >= 2 for s in gathers)
    fetches = [
        s for s in c.beside("to_device") if s.computation in loops and s.num_bytes == MATRIX_SHARD
    ]
    assert len({s.computation for s in fetches}) == 2
    assert all(s.is_async for s in fetches)
    # A layer's record that is updated in backward is loaded in turns, and the last turn has the
    # last product.
    least = 1 if name == "in_backward" else 2
    assert sum(s.products < least for s in fetches) <= (
        1 if name == "in_backward" and LAST_LOADS_ARE_LATE else 0
    )


def test_without_gather_ahead_a_layer_waits_for_its_gather_and_not_for_its_fetch():
    """The control of the test above."""
    c = compiled("all")
    gathers = c.beside("all-gather")
    assert len(gathers) == 2
    assert all(s.products == 0 for s in gathers)
    loops = {s.computation for s in gathers}
    fetches = [s for s in c.beside("to_device") if s.computation in loops]
    assert len(fetches) == 6  # three matrices, forward and backward
    assert all(s.is_async and s.products >= 2 for s in fetches)


@pytest.mark.exhaustive  # a control
def test_without_distance_a_layer_waits_for_its_fetch_too():
    c = compiled("all_distance_0")
    loops = {s.computation for s in c.beside("all-gather")}
    assert all(s.products == 0 for s in c.beside("to_device") if s.computation in loops)


def test_backward_loads_and_stores_at_once_beside_its_products():
    """Every load and every store of a record overlaps with products.

    The last load ends before the update.
    """
    c = compiled("in_backward")
    loops = {s.computation for s in c.beside("to_host")}
    (backward,) = (
        name for name in loops if any(s.computation == name for s in c.beside("reduce-scatter"))
    )
    moves = [s for s in c.beside("to_device", "to_host") if s.computation == backward]
    stored = [s for s in moves if s.kind == "to_host"]
    assert len(stored) == 12  # master, two moments and the parameters of three matrices
    assert len(moves) == 24
    assert all(s.is_async for s in moves)
    assert all(s.products >= 1 for s in stored)
    alone = [s for s in moves if not s.products]
    assert sum(s.num_bytes for s in alone) <= (
        LAYER_BYTES * 7 / GPUS / 4 if LAST_LOADS_ARE_LATE else 0
    )


def test_the_head_is_stored_beside_backward_and_the_embedding_is_loaded_while_the_last_record_is_stored():
    c = compiled("in_backward")
    spans = [s for s in hlo.spans(c.text) if s.times == 1 and s.is_async]
    of_end = 4 * VOCAB * HIDDEN // GPUS  # a master or a moment, of the head or of the embedding

    def moves(kind: str, computation: str, num_bytes: int = of_end) -> list[hlo.Span]:
        return [
            s
            for s in spans
            if (s.kind, s.computation, s.num_bytes) == (kind, computation, num_bytes)
        ]

    names = {s.computation for s in spans}
    (drain,) = (
        name
        for name in names
        if len(moves("to_device", name)) == 3 and len(moves("to_host", name)) == 3
    )
    assert len(moves("to_host", drain, 2 * MATRIX_SHARD)) == 9  # the last layer's
    (outside,) = (name for name in names - {drain} if len(moves("to_device", name)) == 3)
    assert all(s.products >= 1 for s in moves("to_device", outside))  # the head's
    (first,) = (name for name in names - {drain} if len(moves("to_host", name)) == 3)
    assert len(moves("to_device", first, 2 * MATRIX_SHARD)) == 9
    assert sum(s.products >= 1 for s in moves("to_host", first)) >= 2


@pytest.mark.exhaustive  # by default test_in_pieces.py updates such ends on CPUs
def test_ends_that_are_larger_than_a_layer_are_stored_while_their_next_rows_are_loaded():
    c = compiled("large_ends")
    of_piece = 4 * 16384 * HIDDEN // GPUS // 32
    ticks = toys.layer_schedule(c.program).phase("backward").ticks()
    loads = [
        op
        for _, ops in ticks
        for op in ops
        if (op.verb, op.record.leaves) == ("load", UNSTACKED_PIECES)
    ]
    assert [op.num_bytes for op in loads] == 32 * [3 * of_piece]  # a master and two moments
    spans = [s for s in hlo.spans(c.text) if s.times == 31 and s.kind in ("to_device", "to_host")]
    loops = sorted({s.computation for s in spans})
    assert (
        len(loops) == 1
    )  # the embedding's; the first piece and the last store are loops of their own
    moved = [(s.kind, s.num_bytes) for s in spans]
    assert sorted(moved) == [("to_device", of_piece)] * 3 + [("to_host", of_piece)] * 3
    assert all(s.is_async for s in spans)


def test_a_head_that_is_larger_than_a_layer_crosses_the_link_beside_the_products_of_backward():
    c = compiled("large_ends")
    of_piece = 4 * 16384 * HIDDEN // GPUS // 8
    phase = toys.layer_schedule(c.program).phase("backward")
    loads = {
        op.num_bytes
        for _, ops in phase.ticks()
        for op in ops
        if (op.verb, op.record.leaves) == ("load", HEAD_PIECES)
    }
    ticks = [phase.list_ticks(HEAD_PIECES, verb) for verb in ("load", "store")]
    assert (loads, ticks) == ({3 * of_piece}, [list(range(8)), list(range(1, 9))])  # of 12 ticks
    spans = [
        s
        for s in hlo.spans(c.text)
        if s.kind in ("to_device", "to_host") and s.num_bytes == of_piece
    ]
    # The first tick stores nothing yet. Seven ticks load a piece and store another. The next tick
    # stores the last one.
    moved = collections.Counter((s.kind, s.times) for s in spans)
    assert moved == {("to_device", 1): 3, ("to_device", 7): 3, ("to_host", 7): 3, ("to_host", 1): 3}
    assert all(s.is_async and s.products >= 1 for s in spans)
