"""Collectives, bytes and live parameters in programs compiled for 64 (and 512) absent H200s.

The model is a GPT in bfloat16, as a scan over 8 layers (1.6 B parameters) and as 4 separate Flax
blocks.
"""

import dataclasses
import functools
import time
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax import aot, hlo, memory
from zerojax.memory.report import MemoryReport
from zerojax.program import gathering

CONFIG = gpt.GPTConfig(
    layers=8,
    hidden=4096,
    heads=32,
    seq=512,
    vocab=4096,
    dtype=jnp.bfloat16,
    tied=False,
    attention="xla",
)
LAYER_BYTES = 2 * (12 * CONFIG.hidden**2 + 13 * CONFIG.hidden)
pytestmark = pytest.mark.xdist_group(
    "h200"
)  # tests share compiled programs, so they share a process
KINDS = {"layered": gpt.layered_gpt, "unrolled": gpt.unrolled_gpt}
INVOLUNTARY = "nvoluntary full rematerialization"
GPUS = 64
# Below stage 3, both kinds are built by the same code. For the slow kind, separate blocks, only
# stage 3 is compiled by default.
STAGES = [
    pytest.param(
        kind, stage, marks=[pytest.mark.exhaustive] if kind == "unrolled" and stage < 3 else []
    )
    for kind in KINDS
    for stage in (0, 1, 2, 3)
]


@dataclasses.dataclass(frozen=True)
class Compiled:
    config: gpt.GPTConfig
    program: zj.Program
    text: str
    stats: Any
    report: MemoryReport

    def elements(self) -> dict[str, float]:
        """Return the elements moved by each collective, divided by P, without scalars."""
        return {
            op: n / 2 / self.config.num_params
            for op, n in hlo.collective_bytes(self.text, least_bytes=1024).items()
        }


@functools.cache
def _compile(
    kind: str, mesh_axes: tuple[tuple[str, int], ...], config_fields: tuple[tuple[str, Any], ...]
) -> Compiled:
    axes = dict(mesh_axes)
    # Separate blocks compile in seconds each: four show as much as eight.
    c = dataclasses.replace(
        CONFIG,
        layers=8 if kind == "layered" else 4,
        tensor_axis="tensor" if axes.get("tensor", 1) > 1 else None,
    )
    mesh = aot.gpu_mesh("h200", hosts=8, gpus_per_host=8, **axes)
    config = zj.ZeroConfig(precision="bf16", clip_norm=1.0, **dict(config_fields))
    program = zj.build_train_step(KINDS[kind](c), optax.adamw(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((GPUS * config.num_microbatches, c.seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    compiled = program.lower(batch).compile()
    return Compiled(
        c, program, compiled.as_text(), compiled.memory_analysis(), program.memory(batch)
    )


def compile_step(
    capfd: Any, kind: str, axes: dict[str, int] | None = None, **config: Any
) -> Compiled:
    """Compile once for each argument, and fail if the partitioner could not shard something."""
    result = _compile(kind, tuple(sorted((axes or {}).items())), tuple(sorted(config.items())))
    assert INVOLUNTARY not in capfd.readouterr().err
    return result


def test_the_partitioners_warning_is_seen_when_there_is_one(capfd):
    """The control of every such check: a reshape that splits a sharded dim unevenly."""
    mesh = aot.gpu_mesh("h200", hosts=2, gpus_per_host=8, data=2, fsdp=4, tensor=2)

    def split(x):
        x = (
            jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp"))).reshape(6, 8, 16)
            * 2
        )
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "fsdp")))

    x = jax.ShapeDtypeStruct((48, 16), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    jax.jit(split).lower(x).compile()
    assert INVOLUNTARY in capfd.readouterr().err


@pytest.mark.by_default("layered-3")
@pytest.mark.parametrize(("kind", "stage"), STAGES)
def test_collectives_move_2p_2p_3p_elements(capfd, kind, stage):
    gathers, scatters, reduces = [(0, 0, 1), (1, 1, 0), (1, 1, 0), (2, 1, 0)][stage]
    c = compile_step(capfd, kind, stage=stage)
    moved = c.elements()
    for op, expected in (
        ("all-gather", gathers),
        ("reduce-scatter", scatters),
        ("all-reduce", reduces),
    ):
        np.testing.assert_allclose(moved.get(op, 0), expected, rtol=0.02, atol=1e-3, err_msg=op)
    assert set(moved) <= {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    # The look-up's gradient: a device's rows, and its shard of the table.
    rows = CONFIG.seq * CONFIG.hidden + CONFIG.vocab * CONFIG.hidden / GPUS if stage else 0
    np.testing.assert_allclose(moved.get("all-to-all", 0) * c.config.num_params, rows, rtol=1e-3)
    # and the closed form: bytes sent over a ring are those of full operands times (N - 1) / N
    ring = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    for name, passes in ring.items():
        sent = (
            moved.get(name.replace("_", "-"), 0)
            * 2
            * c.config.num_params
            * passes
            * (GPUS - 1)
            / GPUS
        )
        np.testing.assert_allclose(
            sent,
            c.report.collectives[name],
            rtol=0.02,
            atol=2e-3 * c.config.num_params,
            err_msg=name,
        )


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("layered", 3),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("unrolled", 3), *((k, 2) for k in KINDS))
        ),
    ],
)
def test_gathers_are_bfloat16(capfd, kind, stage):
    c = compile_step(capfd, kind, stage=stage)
    wide = sum(
        g.num_bytes * g.times
        for g in hlo.collectives(c.text)
        if g.op == "all-gather" and g.dtype != "bf16"
    )
    assert wide < 0.001 * c.config.num_params


@pytest.mark.by_default("layered-3")
@pytest.mark.parametrize(("kind", "stage"), STAGES)
def test_argument_bytes_equal_the_account(capfd, kind, stage):
    c = compile_step(capfd, kind, stage=stage)
    np.testing.assert_allclose(c.stats.argument_size_in_bytes, c.report.argument_bytes, rtol=0.01)
    closed = memory.model_state_bytes(c.config.num_params, stage, GPUS)
    held = closed["total"] - closed["grads"]  # gradients are not an argument
    np.testing.assert_allclose(c.stats.argument_size_in_bytes, held, rtol=0.01)


@pytest.mark.by_default("layered")  # test_on_use.py checks on CPUs what separate blocks gather
@pytest.mark.parametrize("kind", KINDS)
def test_stage_3_gathers_a_layer_at_a_time(capfd, kind):
    c = compile_step(capfd, kind, stage=3)
    # From 0.11 on, XLA starts the gathers of separate blocks earlier: a limit of this version,
    # described in docs/gather_on_use.md.
    ahead = (
        0
        if kind == "layered" or jax.__version_info__ < (0, 11)
        else 1
        if jax.__version_info__ < (0, 12)
        else 2.5
    )
    assert 0 < hlo.peak_gathered_bytes(c.text) <= (1 + ahead) * LAYER_BYTES
    device = c.stats.temp_size_in_bytes
    assert device < c.report.tiers["device"]["activations"] + (2 + ahead) * LAYER_BYTES


@pytest.mark.exhaustive  # by default the test above has layers that are not recomputed
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_stage_3_with_remat_gathers_a_layer_at_a_time(capfd, num_microbatches):
    c = compile_step(
        capfd, "layered", stage=3, activations="remat", num_microbatches=num_microbatches
    )
    assert 0 < hlo.peak_gathered_bytes(c.text) <= 1.01 * LAYER_BYTES
    np.testing.assert_allclose(c.elements()["all-gather"], 2 * num_microbatches, rtol=0.02)
    np.testing.assert_allclose(c.elements()["reduce-scatter"], num_microbatches, rtol=0.02)
    sums = 1.2 * c.report.tiers["device"]["grads"] if num_microbatches > 1 else 0
    assert (
        c.stats.temp_size_in_bytes < 2.5 * LAYER_BYTES + sums
    )  # of 8 layers; activations are 32 MiB of it


# by default the test above covers remat of layers, and the one before it separate blocks
@pytest.mark.exhaustive
def test_remat_of_separate_blocks_keeps_what_crosses_the_cuts(capfd):
    saved = compile_step(capfd, "unrolled", stage=3)
    c = compile_step(capfd, "unrolled", stage=3, activations="remat")
    assert hlo.peak_gathered_bytes(c.text) <= LAYER_BYTES
    np.testing.assert_allclose(c.elements()["all-gather"], 2, rtol=0.02)
    # "save" keeps only products, a sixth of which crosses the cuts.
    less = saved.report.tiers["device"]["activations"] - c.report.tiers["device"]["activations"]
    assert (
        c.report.tiers["device"]["activations"] < 0.2 * saved.report.tiers["device"]["activations"]
    )
    assert saved.stats.temp_size_in_bytes - c.stats.temp_size_in_bytes > 0.5 * less


@pytest.mark.exhaustive
def test_without_rematerialised_units_many_layers_stay_gathered(capfd, monkeypatch):
    """The control of the test above: with annotations alone, layers stay gathered.

    The program looks like ZeRO-3, but holds the full model.
    """
    build_rule = gathering.build_rule
    monkeypatch.setattr(
        gathering, "build_rule", lambda *a: dataclasses.replace(build_rule(*a), remat=False)
    )
    c = compile_step(capfd, "unrolled", stage=3, min_shard_bytes=1)  # a separate key in the cache
    assert hlo.peak_gathered_bytes(c.text) > 4 * LAYER_BYTES


# by default test_activations_for_h200.py and test_reductions_for_h200.py compile steps over
# `tensor`
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_program_moves_its_share(capfd, kind):
    c = compile_step(capfd, kind, {"tensor": 2}, stage=3)
    moved = c.elements()
    np.testing.assert_allclose(moved["all-gather"], 1, rtol=0.01)  # half of each split leaf, twice
    np.testing.assert_allclose(moved["reduce-scatter"], 0.5, rtol=0.005)
    np.testing.assert_allclose(c.stats.argument_size_in_bytes, c.report.argument_bytes, rtol=0.01)
    sbh = (
        2 * CONFIG.seq * CONFIG.hidden * 2
    )  # bytes of the stream on a device: 2 of the 64 sequences
    by_axis = hlo.collective_bytes(c.text, sbh // 64, mesh=c.program.mesh)
    # Megatron's: 2 + 2 per layer, the look-up's, and that of the head's input in backward.
    assert by_axis.pop("tensor") == {"all-reduce": (4 * c.config.layers + 2) * sbh}
    assert by_axis.keys() == {"fsdp"}
    if kind == "layered":
        # For the gradients of embedding and head, a device reduces its part of the vocabulary.
        table, positions = 2 * CONFIG.vocab * CONFIG.hidden // 2, 2 * CONFIG.seq * CONFIG.hidden
        ends = [
            e
            for e in hlo.collectives(c.text)
            if e.op == "reduce-scatter" and e.times == 1 and e.dtype == "bf16"
        ]
        assert sum(e.num_bytes for e in ends) == 2 * table + positions


ON_HOST = {"params": "pinned_host", "grads": "pinned_host", "opt_state": "pinned_host"}


@pytest.mark.exhaustive  # by default the test above covers full logits of an untied head
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loss_tiles", [0, 4])
@pytest.mark.parametrize(
    ("axes", "fields"),
    [
        ({"fsdp": 1, "tensor": 8}, {"stage": 0}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"stage": 2}),
        ({"fsdp": 2, "tensor": 4}, {"stage": 3}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"stage": 3, **ON_HOST}),
    ],
    ids=["stage_0", "stage_2", "stage_3", "streamed"],
)
def test_the_vocabulary_stays_split_over_tensor(capfd, axes, fields, loss_tiles, tied):
    c = gpt.GPTConfig(
        layers=2, hidden=512, heads=8, seq=256, vocab=4096, dtype=jnp.bfloat16, tied=tied, tensor_axis="tensor",
        loss_tiles=loss_tiles, attention="xla",
    )  # fmt: skip
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=8, **axes)
    config = zj.ZeroConfig(precision="bf16", **fields)
    program = zj.build_train_step(gpt.layered_gpt(c), optax.adamw(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((16, c.seq), jnp.int32)
    text = str(program.lower({"tokens": tokens, "targets": tokens}).compile().as_text())
    assert INVOLUNTARY not in capfd.readouterr().err
    sbh = 2 * c.seq * c.hidden * 16 // mesh.shape["data"] // mesh.shape["fsdp"]
    moved = hlo.collective_bytes(text, sbh // 64, 1, mesh=mesh)
    assert moved.pop("tensor") == {"all-reduce": (4 * c.layers + 2) * sbh}
    assert not [axes for axes in moved if "tensor" in axes or axes == "other"]
    # The gradient of a table is reduced over the batch axes by its part of the vocabulary.
    part = 2 * c.vocab * c.hidden // mesh.shape["tensor"]
    assert all(
        e.num_bytes <= 2 * part + 2 * 16 * c.hidden**2
        for e in hlo.collectives(text, 1)
        if e.op == "reduce-scatter"
    )


# by default test_equivalence.py trains over data and fsdp, and test_memory.py counts its
# collectives
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_hybrid_sharding_reduces_shards_across_replicas(capfd, kind):
    c = compile_step(capfd, kind, {"data": 8}, stage=3)
    moved = c.elements()
    np.testing.assert_allclose(moved["all-gather"], 2, rtol=0.02)
    np.testing.assert_allclose(moved["reduce-scatter"], 1, rtol=0.02)
    np.testing.assert_allclose(moved["all-reduce"], 1 / 8, rtol=0.02)  # of each shard, across nodes
    np.testing.assert_allclose(c.stats.argument_size_in_bytes, c.report.argument_bytes, rtol=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "axes", [{"data": 8}, {"data": 4, "tensor": 2}, {}], ids=["data8", "data4-tensor2", "fsdp64"]
)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_tied_table_that_fsdp_does_not_divide_is_reduced_once(capfd, kind, axes, stage):
    c = dataclasses.replace(CONFIG, layers=2, hidden=512, heads=8, seq=128, vocab=4097, tied=True)
    config = zj.ZeroConfig(stage=stage, precision="bf16")
    mesh = aot.gpu_mesh("h200", hosts=8, gpus_per_host=8, **axes)
    program = zj.build_train_step(KINDS[kind](c), optax.adamw(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((GPUS, c.seq), jnp.int32)
    text = program.lower({"tokens": tokens, "targets": tokens}).compile().as_text()
    assert INVOLUNTARY not in capfd.readouterr().err
    if "tensor" in axes:
        # parameters without annotations are replicated over `tensor`, and XLA reduces them
        # differently
        return
    moved = hlo.collective_bytes(text, least_bytes=1024)
    np.testing.assert_allclose(
        moved["reduce-scatter"], 2 * c.num_params, rtol=0.005
    )  # 1.25 if it were reduced twice


@pytest.mark.exhaustive  # by default the test with remat covers four microbatches too
def test_microbatches_multiply_gathers_and_keep_memory(capfd):
    c = compile_step(capfd, "layered", stage=3, num_microbatches=4)
    np.testing.assert_allclose(c.elements()["all-gather"], 8, rtol=0.02)
    np.testing.assert_allclose(c.elements()["reduce-scatter"], 4, rtol=0.02)
    one = compile_step(capfd, "layered", stage=3)
    grads = c.report.tiers["device"]["grads"]
    assert c.stats.temp_size_in_bytes < one.stats.temp_size_in_bytes + 1.2 * grads


# by default the planner plans a trillion parameters, and the tests above compile for 64 GPUs
@pytest.mark.exhaustive
def test_a_trillion_parameters_compile_for_512_gpus(capfd):
    c = gpt.GPTConfig(
        layers=128,
        hidden=25600,
        heads=160,
        seq=1024,
        vocab=50304,
        dtype=jnp.bfloat16,
        attention="xla",
    )
    assert c.num_params > 1e12
    start = time.monotonic()
    config = zj.ZeroConfig(stage=3, precision="bf16", clip_norm=1.0, activations="remat")
    program = zj.build_train_step(
        gpt.layered_gpt(c),
        optax.adamw(1e-3),
        config,
        aot.gpu_mesh("h200", hosts=64, gpus_per_host=8),
    )
    tokens = jax.ShapeDtypeStruct((512, c.seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    compiled = program.lower(batch).compile()
    assert time.monotonic() - start < 60
    report, closed = program.memory(batch), memory.model_state_bytes(c.num_params, 3, 512)
    assert report.num_params == c.num_params
    np.testing.assert_allclose(report.model_state_bytes, closed["total"], rtol=1e-6)
    np.testing.assert_allclose(
        compiled.memory_analysis().argument_size_in_bytes, report.argument_bytes, rtol=1e-6
    )
    layer = 2 * (12 * c.hidden**2 + 13 * c.hidden)
    assert 0 < hlo.peak_gathered_bytes(compiled.as_text()) <= 2 * layer
    assert INVOLUNTARY not in capfd.readouterr().err


def test_unknown_chip_is_refused():
    with pytest.raises(ValueError, match=r"'v100' is unknown: choose from .*h200, h100"):
        aot.gpu_mesh("v100")
