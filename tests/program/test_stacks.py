"""Several stacks of layers, such as an encoder and a decoder.

They equal a plain loop in every stage and tier.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any

import encoder_decoder as model_of
import jax
import numpy as np
import optax
import pytest
import tiled_toys
import toys
from encoder_decoder import DECODER, ENCODER, HIDDEN, INNER
from safetensors.numpy import load_file

import zerojax as zj
from zerojax.models import init_params

STEPS = 8
HOST, DISK = "pinned_host", "nvme"
STEPS_OF = {
    **{f"stage_{stage}": {"stage": stage} for stage in range(4)},
    "remat": {"activations": "remat"},
    "selective": {"activations": "selective"},
    "opt_state": {"stage": 1, "opt_state": HOST},
    "host": {"params": HOST, "opt_state": HOST, "grads": HOST, "activations": HOST},
    "fraction": {"params": HOST, "opt_state": HOST, "opt_state_device_fraction": 0.5},
    "gather_ahead": {
        "params": HOST,
        "opt_state": HOST,
        "gather_ahead": True,
        "prefetch_distance": 2,
    },
    "nvme": {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": DISK, "frozen": DISK},
    "in_backward": {"params": DISK, "opt_state": DISK, "update": "in_backward"},
    "on_host": {"params": HOST, "opt_state": HOST, "grads": HOST, "update_on": "host"},
    "on_host_in_backward": {"opt_state": DISK, "update_on": "host", "update": "in_backward"},
    "on_host_from_disk": {"params": DISK, "opt_state": DISK, "grads": DISK, "update_on": "host"},
}
TX = optax.adam(1e-2)


@functools.cache
def expected(count):
    """Return the first parameters, the metrics of every step, and the last parameters."""
    params = first = jax.jit(lambda key: init_params(model_of.model(), key))(jax.random.key(0))
    opt_state, step, metrics = TX.init(params), model_of.plain_step(count, TX), []
    for batch in model_of.batches(STEPS):
        params, opt_state, values = step(params, opt_state, batch)
        metrics.append(jax.device_get(values))
    return jax.device_get(first), metrics, jax.device_get(params)


def build(fields, count=1, tmp_path=None, model=None, mesh=None):
    config = zj.ZeroConfig(
        **{"stage": 3, "num_microbatches": count, "swap_dir": tmp_path, **fields}
    )
    mesh = mesh or zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(model or model_of.model(), TX, config, mesh)


def of_piece(params, piece):
    """Return the part of a tree of stacks that a piece of `iter_params` contains."""
    part, *layer = piece.split("/")
    return (
        params[part]
        if not layer
        else jax.tree.map(lambda a: a[int(layer[1])], params[part][layer[0]])
    )


@pytest.mark.xdist_group("stacks")  # which share a reference
@pytest.mark.by_default("nvme-1")
@pytest.mark.parametrize(("name", "count"), [*itertools.product(STEPS_OF, (1, 2, 4))])
def test_an_encoder_and_a_decoder_equal_a_plain_loop(name, count, tmp_path):
    first, metrics, params = expected(count)
    with build(STEPS_OF[name], count, tmp_path) as program:
        state = program.init(jax.random.key(0))
        names = []
        for piece, tree in program.iter_params(state):
            names.append(piece)
            toys.assert_trees_close(tree, of_piece(first, piece), atol=1e-6)
        layers = [
            *(f"blocks/encoder/{n}" for n in range(2)),
            *(f"blocks/decoder/{n}" for n in range(3)),
        ]
        assert names == ["embed", *layers, "head"]
        got: Mapping[str, Any] = {}
        for batch, want in zip(model_of.batches(STEPS), metrics, strict=True):
            state, got = program.step(state, batch)
            jax.block_until_ready(state)
            for metric, value in want.items():
                np.testing.assert_allclose(got[metric], value, rtol=1e-5, atol=1e-6, err_msg=metric)
        assert (
            got.get("swap_misses", 0) == 0
        )  # reads arrive in the order in which the engine was asked
        for piece, tree in program.iter_params(state):
            toys.assert_trees_close(tree, of_piece(params, piece), atol=1e-4)
        batch = model_of.batches(1)[0]
        want, of_layers = model_of.plain_loss(params, batch)
        got = program.eval(state, batch)
        np.testing.assert_allclose(got["loss"], want, rtol=1e-5)
        np.testing.assert_allclose(got["square"], of_layers["square"], rtol=1e-5)
        assert program.apply(state, batch).shape == (model_of.BATCH, model_of.TO, model_of.VOCAB)


def test_the_schedule_runs_stack_by_stack_and_records_are_those_of_a_stack(tmp_path):
    with build(STEPS_OF["nvme"], 2, tmp_path) as program:
        program.check(model_of.batches(1)[0])
        order = [phase.name for phase in toys.layer_schedule(program).phases]
        stacks = ("encoder", "decoder")
        assert order == [
            *(f"{name}/forward" for name in stacks),
            *(f"{name}/backward" for name in reversed(stacks)),
            *(f"{name}/update" for name in stacks),
        ]
        assert toys.layer_schedule(program).num_layers == 5
        for text in (
            str(toys.layer_schedule(program)),
            toys.layer_schedule(program).timeline(),
            toys.layer_schedule(program).timeline_svg(),
        ):
            assert "encoder" in text
            assert "decoder" in text
        kinds = {
            kind: records.num_layers
            for kind, records in program.layout.disk.kinds.items()
            if records.num_layers > 1
        }
        each = {f"{kind}.{name}": n for kind in ("params", "grads", "opt_state", "activations") for name, n in
                (("encoder", 2), ("decoder", 3))}  # fmt: skip
        assert kinds == each | {"frozen.decoder": 3}
        # Forward, backward from the last stack on, update; consecutive reads of one stack are one
        # entry.
        of_layers = [
            move.kind
            for move in program._moves
            if move.kind in each and "params" in move.kind and not move.writes
        ]
        order = ["params.encoder", "params.decoder", "params.encoder", "params.decoder"]
        assert [kind for kind, _ in itertools.groupby(of_layers)] == order


@pytest.mark.exhaustive  # by default test_activations.py compares the masks of one stack
def test_resident_and_streamed_steps_draw_the_same_masks():
    runs = []
    for fields in (
        {"stage": 2},
        {"stage": 3, "params": HOST, "opt_state": HOST, "activations": "selective"},
    ):
        program = build(fields, 2, model=model_of.model(stochastic=True))
        losses, state = toys.run(program, program.init(jax.random.key(0)), model_of.batches(3))
        runs.append((losses, dict(program.iter_params(state))))
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-5)
    for piece, tree in runs[0][1].items():
        toys.assert_trees_close(tree, runs[1][1][piece], atol=1e-4)
    _, metrics, _ = expected(2)
    assert abs(runs[0][0][0] - metrics[0]["loss"]) > 1e-3  # there were masks


@pytest.mark.exhaustive
def test_one_stack_in_the_form_of_several_is_the_same_model():
    """The same keys, numbers and metrics, with other names in the tree."""
    block = toys.layered()
    stacks = (zj.Stack("layers", block.num_layers, block.init_block, block.block),)
    one = dataclasses.replace(block, num_layers=None, init_block=None, block=None, stacks=stacks)
    runs = []
    for model in (block, one):
        program = build({"params": HOST, "opt_state": HOST}, model=model)
        losses, state = toys.run(program, program.init(jax.random.key(0)), toys.batches(2))
        runs.append((losses, jax.device_get(program.params(state))))
    assert runs[0][0] == runs[1][0]
    jax.tree.map(
        np.testing.assert_array_equal, runs[0][1]["blocks"], runs[1][1]["blocks"]["layers"]
    )


def block(p, x, key):
    return x


ONE = {"num_layers": 2, "init_block": toys.init_block, "block": block}
NOTHING = {"per_layer": None, "specs": None, "frozen": False}
WRONG = {
    "both": (ONE, "a LayeredModel with stacks is given init_block, block: set them on each Stack"),
    "twice": (
        {
            "stacks": [
                zj.Stack("a", 1, toys.init_block, block),
                zj.Stack("a", 2, toys.init_block, block),
            ]
        },
        r"the stacks have the names \['a', 'a'\]: use different names",
    ),
    "none": ({"stacks": ()}, "a LayeredModel needs num_layers, init_block, block, or `stacks`"),
    "other": ({"stacks": ["encoder"]}, "stacks must be a sequence of zerojax.Stack"),
    "specs": (
        {"specs": {"block": {"encode": None}}},
        r"specs\['block'\] has keys \['encode'\].*\['encoder', 'decoder'\]",
    ),
    "per_layer": (
        {"per_layer": np.ones(5)},
        "per_layer=.*: a dict by the names of the stacks is needed",
    ),
    "length": (
        {"per_layer": {"decoder": np.ones(2)}},
        "stack 'decoder': per_layer has shape .2,.*number of layers, 3",
    ),
    "tiles": ({"tiles": {"head": True}}, r"tiles has keys \['head'\]"),
    "frozen": ({"frozen": {"block": {"w": True}}}, r"frozen\['block'\] has keys \['w'\]"),
    "flag": ({"per_layer": True}, "per_layer=True: a dict by the names of the stacks is needed"),
    "enter": (
        {
            "stacks": [
                zj.Stack("a", 1, toys.init_block, model_of.decode, lambda p, x, batch: (x, None))
            ]
        }
        | NOTHING,
        r"stack 'a': enter is called as enter\(p_embed, x, batch, key\), but it is enter\(p, x, batch\)",
    ),
    "state": (
        {"init_state": {"block": lambda key: None}},
        r"init_state\['block'\]=.*a dict by the names of the stacks",
    ),
    "call": (
        {
            "stacks": [zj.Stack("a", 1, toys.init_block, block, model_of.enter)],
            "per_layer": None,
            "specs": None,
            "frozen": False,
        },
        r"stack 'a': block is called as block\(p, x, key, context, layer\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_about_stacks_is_told(case):
    fields, match = WRONG[case]
    with pytest.raises(ValueError, match=match):
        model_of.model(**fields)


def test_a_stack_tells_what_it_needs():
    with pytest.raises(
        ValueError, match="the name of a stack must be an identifier, such as 'encoder', got '1'"
    ):
        zj.Stack("1", 2, toys.init_block, block)
    with pytest.raises(
        ValueError, match="num_layers of stack 'encoder'=0: an integer of at least 1 is needed"
    ):
        zj.Stack("encoder", 0, toys.init_block, block)
    with pytest.raises(ValueError, match="block, enter of stack 'encoder' must be a function"):
        zj.Stack("encoder", 2, toys.init_block, None, 3)  # pyright: ignore[reportArgumentType]
    stacks = (
        zj.Stack(
            "a", 1, toys.init_block, lambda p, x, key, context, layer: x, lambda p, x, batch, key: x
        ),
    )
    model = dataclasses.replace(
        toys.layered(), num_layers=None, init_block=None, block=None, stacks=stacks
    )
    with pytest.raises(
        ValueError,
        match=r"the enter of a stack must return \(x, context\), where context may be None; got",
    ):
        zj.build_train_step(
            model, TX, zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8), batch=toys.batches(1)[0]
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("fields", [{"stage": 3}, STEPS_OF["host"]])
def test_stacks_with_tensor_parallel_blocks(fields):
    _, metrics, _ = expected(1)
    mesh = zj.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    program = build(fields, mesh=mesh)
    losses, _ = toys.run(program, program.init(jax.random.key(0)), model_of.batches(STEPS))
    np.testing.assert_allclose(losses, [m["loss"] for m in metrics], rtol=1e-5)


@pytest.mark.exhaustive  # by default checkpoints of one stack are restored into every tier
@pytest.mark.xdist_group("stacks")
def test_a_checkpoint_is_restored_into_another_tier_and_exported_by_stack(tmp_path):
    _, metrics, _ = expected(2)
    with build(STEPS_OF["on_host"], 2) as program, zj.Checkpointer(tmp_path / "c") as ckpt:
        losses, state = toys.run(program, program.init(jax.random.key(0)), model_of.batches(2))
        ckpt.save(program, state)
        ckpt.wait()
        with build(STEPS_OF["in_backward"], 2, tmp_path) as other:
            rest, _ = toys.run(other, ckpt.restore(other), model_of.batches(4)[2:])
    np.testing.assert_allclose(losses + rest, [m["loss"] for m in metrics[:4]], rtol=1e-5)
    zj.export_safetensors(tmp_path / "c", tmp_path / "out")
    names = {name: a.shape for name, a in load_file(tmp_path / "out").items()}
    assert names["blocks.encoder.w"] == (ENCODER, HIDDEN, HIDDEN)
    assert names["blocks.decoder.up"] == (DECODER, HIDDEN, INNER)


def counting_encode(p, x, key, state):
    y, loss = model_of.encode(p, x, key)
    return (y, loss), {"calls": state["calls"] + 1}


STATE = {"opt_state": HOST}
BASE = {"frozen": {"block": {"encoder": True}}}
OTHERS = {
    "muon": (optax.contrib.muon(1e-2), {}, {}, {"stage": 3}),
    "muon_on_host": (optax.contrib.muon(1e-2), {}, {}, {"params": HOST, "opt_state": HOST}),
    "averages": (
        optax.chain(optax.adam(1e-2), zj.Ema(0.9)),
        {},
        {},
        {"params": HOST, "opt_state": HOST},
    ),
    "base_on_host": (TX, BASE, {}, {"frozen": HOST}),
    "base_in_8_bits": (TX, BASE, {"stage": 3, "frozen_dtype": "int8"}, {"frozen": HOST}),
    "delayed": (
        TX,
        {},
        {"stage": 3, "precision": "bf16", "update_on": "host", "delayed_update": True} | STATE,
        {"params": HOST},
    ),
    "state": (
        TX,
        {
            "stacks": [
                zj.Stack("encoder", ENCODER, model_of.init_encoder, counting_encode),
                model_of.model().stacks[1],
            ],
            "init_state": {"block": {"encoder": lambda key: {"calls": jax.numpy.int32(0)}}},
        },
        {},
        {"stage": 3, "activations": "remat"},
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", OTHERS)
def test_what_else_there_is_is_of_each_stack(case):
    """Train with two configs of one model, and compare."""
    tx, of_model, both, other = OTHERS[case]
    runs = []
    for fields in ({"stage": 0} | both, {"stage": 3} | both | other):
        mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
        with zj.build_train_step(
            model_of.model(**of_model), tx, zj.ZeroConfig(**fields), mesh
        ) as program:
            losses, state = toys.run(program, program.init(jax.random.key(0)), model_of.batches(4))
            pieces = dict(program.iter_params(state))
            if case == "averages":
                pieces |= {
                    f"{name} averaged": tree for name, tree in program.iter_params(state, ema=True)
                }
            if case == "state":
                assert state.model_state["blocks"]["encoder"]["calls"].tolist() == [4, 4]
            runs.append((losses, jax.device_get(pieces)))
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-5)
    toys.assert_trees_close(runs[0][1], runs[1][1], atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fields",
    [
        {"opt_state": HOST},
        {"params": DISK, "opt_state": DISK, "grads": DISK},
        {"gather_ahead": True},
    ],
)
def test_tiles_of_one_of_two_stacks_are_records(fields, tmp_path):
    of_one = tiled_toys.model(stochastic=False)
    stacks = [
        zj.Stack(name, n, of_one.init_block, of_one.block)
        for name, n in (("first", 2), ("last", 3))
    ]
    changes = {"num_layers": None, "init_block": None, "block": None, "specs": None}
    model = dataclasses.replace(of_one, **changes, stacks=stacks, tiles={"last": of_one.tiles})
    runs = []
    for config in (
        {"stage": 0},
        {"stage": 3, "num_microbatches": 2, "params": HOST, "swap_dir": tmp_path, **fields},
    ):
        mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
        with zj.build_train_step(
            model, optax.sgd(1e-4, momentum=0.9), zj.ZeroConfig(**config), mesh
        ) as program:
            losses, state = toys.run(
                program, program.init(jax.random.key(0)), tiled_toys.batches(3)
            )
            runs.append((losses, jax.device_get(dict(program.iter_params(state)))))
            if fields.get("params") == DISK and program.layout.disk is not None:
                kinds = {
                    kind for kind in program.layout.disk.kinds if kind.startswith("params.tiles")
                }
                assert kinds == {
                    "params.tiles.last.first",
                    "params.tiles.last.second",
                    "params.tiles.last.mix",
                }
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-5)
    toys.assert_trees_close(runs[0][1], runs[1][1], atol=1e-4)


def test_errors_of_a_stack_name_it():
    def narrow(p, x, key, context, layer):
        y, loss = model_of.decode(p, x, key, context, layer)
        return y.astype("bfloat16"), loss

    stacks = [
        model_of.model().stacks[0],
        dataclasses.replace(model_of.model().stacks[1], block=narrow),
    ]
    texts = dataclasses.replace(
        model_of.model().stacks[1], enter=lambda p, x, batch, key: (x, {"kind": "text"})
    )
    for fields in ({"stage": 1}, {"params": HOST}):
        with pytest.raises(ValueError, match="a block must return x as it got it") as found:
            build(fields, model=model_of.model(stacks=stacks)).check(model_of.batches(1)[0])
        assert found.value.__notes__[0] == "This error is from stack 'decoder'."
        with pytest.raises(
            ValueError,
            match=r"the context of a stack must be a tree of arrays, but \['kind'\] is str 'text'",
        ):
            build(fields, model=model_of.model(stacks=[stacks[0], texts])).check(
                model_of.batches(1)[0]
            )
    told = r"device_budget_bytes=7000: .* bytes in flight on a device, in decoder/.*; prefetch_distance=(\d+) fits, with \d+ bytes"
    fields = {"params": HOST, "opt_state": HOST, "prefetch_distance": 3}
    with pytest.raises(ValueError, match=told) as found:
        build(fields | {"device_budget_bytes": 7000})
    distance = int(re.findall(told, str(found.value))[0])
    build(
        fields | {"device_budget_bytes": 7000, "prefetch_distance": distance}
    )  # the suggested value works, and is the largest
    with pytest.raises(ValueError, match="device_budget_bytes=7000"):
        build(fields | {"device_budget_bytes": 7000, "prefetch_distance": distance + 1})


@pytest.mark.by_default("save")
@pytest.mark.parametrize(
    "fields", [{"params": HOST, "activations": "save"}, {"params": HOST}], ids=["save", "remat"]
)
def test_complex_numbers_are_differentiated_between_and_inside_of_layers(fields):
    """A model whose context, layer input and saved value are complex."""

    def turn(p, x, key, context, layer):
        spectrum = jax.numpy.fft.fft(x["real"] @ p["w"], axis=1)
        spectrum = spectrum * spectrum
        real = x["real"] + jax.numpy.tanh((spectrum.real + spectrum.imag) @ p["w"])
        return {"real": real, "turned": x["turned"] + 0.1 * spectrum * context["phase"]}

    def enter(p, x, batch, key):
        return {"real": x, "turned": x * (1 + 0.5j)}, {"phase": jax.numpy.exp(1j * x), "half": 0.5}

    def head(p, p_embed, x, batch, key):
        loss = model_of.head(p, p_embed, x["real"][:, : model_of.TO], batch, key)
        return loss + jax.numpy.mean(jax.numpy.abs(x["turned"]) ** 2)

    model = model_of.model(
        stacks=[zj.Stack("turns", 2, model_of.init_encoder, turn, enter)],
        head=head,
        predict=None,
        **NOTHING,
    )
    runs = []
    for config in ({"stage": 0}, fields):
        program = build(config, model=model)
        losses, state = toys.run(program, program.init(jax.random.key(0)), model_of.batches(3))
        runs.append((losses, jax.device_get(dict(program.iter_params(state)))))
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-5)
    toys.assert_trees_close(runs[0][1], runs[1][1], atol=1e-4)
