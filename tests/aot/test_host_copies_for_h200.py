"""Host link moves of a streamed step, by copies and by kernels, compiled for one H200."""

import collections
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from zerojax import aot, hlo
from zerojax.compat import jaxlib_version
from zerojax.program.compile import compiler_options
from zerojax.state import state_records

D, L = 16, 4
H = "pinned_host"
FUSION = "xla_gpu_enable_dynamic_slice_fusion"


def program(**config) -> zj.Program:
    model = zj.LayeredModel(
        L,
        lambda k: jnp.ones((8, D)),
        lambda p, b, k: p[b["tokens"]],
        lambda k: {"w": jax.random.normal(k, (D, D))},
        lambda p, x, k: x + jnp.tanh(x @ p["w"]),
        lambda k: {"w": jnp.ones((D, 8))},
        lambda p, e, x, b, k: jnp.mean((x @ p["w"]) ** 2),
    )
    config = {"precision": "bf16", "activations": "remat", "update": "in_backward"} | config
    return zj.build_train_step(
        model, optax.adamw(1e-3), zj.ZeroConfig(**config), aot.gpu_mesh("h200", gpus_per_host=1)
    )


BATCH = {"tokens": jax.ShapeDtypeStruct((4, 4), jnp.int32)}


@pytest.mark.exhaustive
@pytest.mark.xdist_group("h200")
@pytest.mark.parametrize(
    "config",
    [{"opt_state": H}, {"params": H, "grads": H, "opt_state": H}],
    ids=["opt_state", "all"],
)
def test_host_copies_are_those_of_the_thunks(tmp_path, config):
    zero = program(**config)
    found = zero.host_copies(BATCH)
    compiled = zero.lower(BATCH).compile({"xla_dump_to": str(tmp_path)})
    text = compiled.as_text()
    assert text is not None
    total = hlo.host_link_bytes(text, unknown_trips=1)
    assert {way: found.by_copies[way] + found.by_kernels[way] for way in total} == total
    assert found.source == "thunks"
    # Each asynchronous thunk of the dump that touches host memory is a move of the program, by a
    # kernel if it starts one.
    (sequence,), (metadata,) = (
        tmp_path.glob("*.thunk_sequence.txt"),
        tmp_path.glob("*.thunk_metadata.txt"),
    )
    names = {
        int(n): name
        for name, n in re.findall(r'annotation: "(.*)"\s+thunk_id: (\d+)', metadata.read_text())
    }
    starts = {
        int(n): kind
        for n, kind in re.findall(r"(\d+): kAsyncStart.*\n\s+\d+: (k\w+)", sequence.read_text())
    }
    shapes = dict(re.findall(r"^\s+%(\S+) = (.*?) [\w-]+-start\(", text, re.MULTILINE))
    told = {names[n]: kind for n, kind in starts.items() if "S(5)" in shapes[names[n]]}
    assert len(told) > 10
    moves = {m.instruction: m.by for m in found.moves if m.instruction in shapes}
    assert moves == {
        name: "kernel" if kind == "kCustomKernel" else "copy" for name, kind in told.items()
    }
    # Records that are indexed by the schedule's order are named by their leaves.
    stacks = {
        "state.master['blocks']['w']",
        "state.opt_state[0].mu['blocks']['w']",
        "state.opt_state[0].nu['blocks']['w']",
    }
    assert stacks <= {m.leaf for m in found.moves}
    moves = [m for m in found.moves if m.leaf in stacks]
    assert {(m.num_bytes, m.shape) for m in moves} == {(4 * D * D, f"f32[{L},{D},{D}]")}
    # Each record moves once per direction; a record of a loop may be moved before or after it.
    times = {
        (leaf, way): sum(m.times for m in moves if (m.leaf, m.direction) == (leaf, way))
        for leaf in stacks
        for way in total
    }
    assert times == dict.fromkeys(times, L)
    # The dump's own text, in its own notation, gives the same moves.
    dumped = hlo.host_traffic(hlo.dumped_text(tmp_path), hlo.read_thunks(tmp_path), 1)
    assert dumped.moves == found.moves
    assert hlo.simulate(text, thunks=hlo.read_thunks(tmp_path)).traffic.moves == found.moves


@pytest.mark.xdist_group("h200")
def test_nothing_that_moves_host_memory_is_in_a_cuda_graph_unless_the_config_says_so():
    in_graphs = {
        asked: [
            m.instruction
            for m in program(opt_state=H, cuda_graphs=asked).host_copies(BATCH).moves
            if m.in_graph
        ]
        for asked in (False, True)
    }
    assert in_graphs[False] == []
    assert len(in_graphs[True]) >= 6  # at least the master and two moments, each in both directions


@pytest.mark.xdist_group("h200")
def test_no_callback_is_called_from_two_places():
    """The fusion of a callback with its slices clones the callback in XLA before 0.12.

    The fusion is XLA's default from 0.11 on.
    """
    zero = program(opt_state=H, update_on="host", update="after_backward", clip_norm=1.0)
    options, others = (
        compiler_options(p.model, p.layout) or {} for p in (zero, program(opt_state=H))
    )
    assert options[FUSION] is False
    assert FUSION not in others

    def calls(options):
        text = str(zero.lower(BATCH).compile(options).as_text())
        found = re.findall(
            r'custom_call_target="xla_buffer_python_gpu_callback".*?backend_config=\{index = (\d+)',
            text,
        )
        return collections.Counter(found)

    once = calls({})
    assert set(once.values()) == {1}
    assert calls({FUSION: True}) == (
        once if jaxlib_version() >= (0, 12) else once + collections.Counter("0")
    )


@pytest.mark.xdist_group("h200")
def test_records_are_not_copied_out_of_stacks_on_the_device():
    """XLA copies a slice whose address it knows.

    For host memory it must; on the device a copy only takes memory.
    """
    on_device, on_host = (
        str(program(**config).lower(BATCH).compile().as_text()) for config in ({}, {"opt_state": H})
    )
    assert "dynamic_slice_config" not in on_device
    assert "dynamic_slice_config" in on_host


@pytest.mark.xdist_group("h200")
@pytest.mark.by_default("embedding alone")
@pytest.mark.parametrize(
    ("vocab", "has_norm", "config"),
    [
        pytest.param(4096, False, {"opt_state": H}, id="embedding alone"),
        pytest.param(4096, True, {"opt_state": H, "params": H, "update": "in_backward"}, id="norm"),
        pytest.param(1024, False, {"opt_state": H}, id="small"),
    ],
)
def test_embedding_and_head_larger_than_a_layer_cross_the_link_once(vocab, has_norm, config):
    """The compiled copies match the step's list of operations, including leaves in pieces."""
    width = 512
    model = zj.LayeredModel(
        4,
        lambda k: {"table": jnp.ones((vocab, width))},
        lambda p, b, k: p["table"][b["tokens"]],
        lambda k: {"w": jnp.ones((width, width)), "v": jnp.ones((width, width))},
        lambda p, x, k: x + jnp.tanh(x @ p["w"]) @ p["v"],
        lambda k: {"out": jnp.ones((width, vocab))} | ({"n": jnp.ones(width)} if has_norm else {}),
        lambda p, e, x, b, k: jnp.mean((x * p.get("n", 1) @ p["out"]) ** 2),
    )
    config = zj.ZeroConfig(precision="bf16", **config)
    mesh = aot.gpu_mesh("h200", gpus_per_host=1)
    program = zj.build_train_step(model, optax.adamw(1e-3), config, mesh)
    copies, operations = program.host_copies(BATCH), program.operations(BATCH)
    listed = {"to_device": operations.moved("up"), "to_host": operations.moved("down")}
    assert listed == program.memory(BATCH).host_link
    for way, num_bytes in listed.items():
        compiled = sum(
            move.num_bytes * move.times for move in copies.moves if move.direction == way
        )
        assert compiled == num_bytes, (way, compiled, num_bytes)


@pytest.mark.exhaustive
@pytest.mark.xdist_group("h200")
def test_a_resident_step_moves_nothing():
    assert program(update="after_backward", stage=0).host_copies(BATCH).moves == ()


@pytest.mark.exhaustive
@pytest.mark.xdist_group("h200")
def test_autotune_predicts_each_setting_from_its_compiled_program(monkeypatch):
    monkeypatch.setattr(state_records, "crosses_link", lambda mesh: True)
    base = program(params=H, opt_state=H)
    tuned = zj.autotune(
        base.model,
        base.tx,
        base.config,
        base.mesh,
        BATCH,
        distances=(1, 2),
        groups=(2, 3),
        rates=hlo.Rates(link=1e6),
    )
    settings = [(step.config.prefetch_distance, step.config.link_groups) for step in tuned.tried]
    assert settings[:2] == [(1, None), (2, None)]
    assert [groups for _, groups in settings[2:]] == [2, 3]
    for step in tuned.tried:
        assert step.simulation.traffic.source == "thunks"
        assert step.simulation.floor_seconds <= step.simulation.seconds
        assert step.num_bytes < 1 << 20
    fastest = min(step.simulation.seconds for step in tuned.tried)
    (chosen,) = (step for step in tuned.tried if step.config == tuned.config)
    assert chosen.simulation.seconds <= fastest / 0.995
    assert "<- fastest" in str(tuned)
