"""Segments that save, offload and recompute differently change no number.

Values are kept by number as well as by name.
"""

import dataclasses
import functools
import itertools
import random
import re
from typing import Any

import encoder_decoder
import jax
import matrix
import numpy as np
import optax
import pytest
import tiled_toys
import toys
from jax.ad_checkpoint import checkpoint_name

import zerojax as zj
from host_offload.schedule import StackedSchedule
from zerojax.state import state_records

HOST, DISK = "pinned_host", "nvme"
LAYERS, STEPS = 5, 5
S = zj.Segment
MIXES = {
    "modes": (S(1, activations="remat"), S(1, activations="everything"), S(1, activations="save"),
              S(2, activations="selective", saved_names=("out",))),
    "host": (S(1, activations=HOST, saved_names=("#0",)), S(2, activations="remat", offloaded_names=("hidden",)),
             S(2, activations=HOST)),
    "disk": (S(2, activations=DISK), S(1, activations="save", offloaded_names=("#1",)), S(2, activations=DISK)),
    "tiers": (S(3, activations="save"), S(1, activations=DISK), S(1, activations=HOST)),
}  # fmt: skip
AXES = {
    "activations": tuple(MIXES),
    "params": ("device", HOST, DISK),
    "grads": ("device", HOST, DISK),
    "opt_state": ("device", HOST, DISK),
    "update": matrix.UPDATES,
    "num_microbatches": (1, 2),
    "prefetch_distance": (0, 1, 4),
    "gather_ahead": (False, True),
    "opt_state_device_fraction": (0.0, 0.7),
}


def init_block(key):
    """A block that marks two values, each followed by products."""
    up, down = (
        toys.draw(key, (toys.HIDDEN, toys.INNER)) / 4,
        toys.draw(key, (toys.INNER, toys.HIDDEN), 1) / 6,
    )
    return {"up": up, "down": down, "mix": toys.draw(key, (toys.HIDDEN, toys.HIDDEN), 2) / 8}


def block(p, x, key):
    hidden = checkpoint_name(jax.nn.gelu(x @ p["up"]), "hidden")
    out = checkpoint_name(jax.numpy.tanh(hidden @ p["down"]), "out")
    return x + out @ p["mix"]


def model():
    return dataclasses.replace(toys.small(), num_layers=LAYERS, init_block=init_block, block=block)


def train(config, of=None, data=None, tx=None, devices=2):
    """Return the losses, the parameters by piece, and the late reads.

    Adam takes only a small step for a gradient that is pure rounding.
    """
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    with zj.build_train_step(
        of or model(), tx or optax.adam(1e-2, eps=1e-4), config, mesh
    ) as program:
        state, losses, misses = program.init(jax.random.key(0)), [], 0.0
        for batch in data or toys.batches(STEPS, 16):
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
            misses += float(metrics.get("swap_misses", 0))
        return (
            np.asarray(losses, np.float32),
            jax.device_get(dict(program.iter_params(state))),
            misses,
        )


@functools.cache
def uniform(num_microbatches, update_on):
    """Results of a streamed step whose layers all recompute, computed once per kind of fusion."""
    del update_on
    return train(
        zj.ZeroConfig(stage=3, activations="remat", params=HOST, num_microbatches=num_microbatches)
    )


def is_valid(case):
    away, on_device = case["opt_state"] != "device", case["update"][1] == "device"
    return (away or on_device) and (not case["opt_state_device_fraction"] or (away and on_device))


def every_case():
    return [
        case
        for values in itertools.product(*AXES.values())
        if is_valid(case := dict(zip(AXES, values, strict=True)))
    ]


@functools.cache
def quick_cases():
    """Choose cases until they cover every value."""
    cases = random.Random(1).sample(
        [case for case in every_case() if case["num_microbatches"] == 2], 400
    )
    return matrix.chosen_of(cases, lambda case: set(case.items()))


def config_of(case, swap_dir=None):
    fields = {**case, "activations": MIXES[case["activations"]], "swap_dir": swap_dir}
    fields["update"], fields["update_on"] = case["update"]
    return zj.ZeroConfig(stage=3, **fields)


@pytest.mark.xdist_group("segments")  # which share references
@pytest.mark.by_default("tiers-pinned_host-pinned_host-nvme-after_backward_device-2-0-True-0.7")
@pytest.mark.parametrize("case", quick_cases(), ids=matrix.name_of)
def test_segmented_steps_equal_the_uniform_one(case, tmp_path, request):
    if case["update"][1] == "device":  # whose bound is a few ulp; on the host it is 1e-5
        request.getfixturevalue("default_fusions")
    losses, params, misses = train(config_of(case, tmp_path))
    expected, pieces, _ = uniform(case["num_microbatches"], case["update"][1])
    ulps, relative = matrix.bounds(case)
    assert np.max(np.abs(losses - expected) / np.spacing(expected)) <= ulps
    for piece, tree in params.items():
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(pieces[piece]), strict=True):
            np.testing.assert_allclose(
                a, b, rtol=0, atol=relative * np.max(np.abs(b)), err_msg=piece
            )
    # Reads arrive in the order in which the engine was asked. At a distance of 0 nothing is read
    # ahead.
    assert misses == 0 or case["prefetch_distance"] == 0 or case["gather_ahead"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", matrix.pairwise(random.Random(0).sample(every_case(), 1500)), ids=matrix.name_of
)
def test_segmented_steps_of_every_pair_equal_the_uniform_one(case, tmp_path, request):
    test_segmented_steps_equal_the_uniform_one(case, tmp_path, request)


@pytest.mark.exhaustive  # by default test_late_stores.py compares them without segments
@pytest.mark.parametrize(
    "fields",
    [
        {"update": "in_backward", "gather_ahead": True, "prefetch_distance": 2},
        {"clip_norm": 0.5},
        {"update_on": "host"},
    ],
    ids=["in_backward", "after_backward", "on_host"],
)
def test_late_stores_of_segments_equal_stores_in_time(fields, monkeypatch):
    """Stores are late if records cross a link, for each range of layers in backward order."""
    case = {
        "params": HOST,
        "grads": HOST,
        "opt_state": HOST,
        "activations": MIXES["host"],
        **fields,
    }
    config = zj.ZeroConfig(stage=3, **case)
    in_time = train(config, devices=1)
    monkeypatch.setattr(state_records, "crosses_link", lambda mesh: True)
    late = train(config, devices=1)
    np.testing.assert_allclose(late[0], in_time[0], rtol=1e-6)
    for piece, tree in late[1].items():
        toys.assert_trees_close(tree, in_time[1][piece], atol=2e-6)


OF_TWO_STACKS = {
    "host": (
        {"params": HOST, "opt_state": HOST},
        (S(2, activations=HOST), S(1, activations="remat"), S(2, activations="save")),
    ),
    "disk": (
        {"params": DISK, "grads": DISK, "opt_state": DISK, "frozen": DISK},
        (
            S(1, activations=DISK),
            S(1, activations="save"),
            S(2, activations=DISK),
            S(1, activations=HOST),
        ),
    ),
    "in_backward": (
        {"params": HOST, "opt_state": HOST, "update": "in_backward"},
        (
            S(1, activations="remat"),
            S(1, activations="save"),
            S(1, activations=HOST),
            S(2, activations="selective"),
        ),
    ),
}


@pytest.mark.exhaustive  # by default segments and stacks are tested apart
@pytest.mark.parametrize("case", OF_TWO_STACKS)
def test_segments_of_an_encoder_and_a_decoder_share_its_context(case, tmp_path):
    """Train a decoder with a frozen leaf, a context, and per-layer numbers.

    The context's cotangents are summed over the decoder's segments.
    """
    fields, segments = OF_TWO_STACKS[case]
    both = {"num_microbatches": 2}
    of, data = encoder_decoder.model(), encoder_decoder.batches(4)
    expected, pieces, _ = train(zj.ZeroConfig(stage=3, **both), of, data)
    config = zj.ZeroConfig(stage=3, swap_dir=tmp_path, activations=segments, **both, **fields)
    losses, params, misses = train(config, of, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for piece, tree in params.items():
        toys.assert_trees_close(tree, pieces[piece], atol=2e-5)
    assert misses == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fields", [{"params": HOST}, {"params": DISK, "opt_state": DISK, "grads": DISK}]
)
def test_segments_of_tiles_equal_the_uniform_step(fields, tmp_path):
    of = dataclasses.replace(tiled_toys.model(stochastic=False), num_layers=3)
    tx, data = optax.sgd(1e-4, momentum=0.9), tiled_toys.batches(3)
    expected, pieces, _ = train(zj.ZeroConfig(stage=3, activations="remat"), of, data, tx)
    segments = (S(1, activations="remat"), S(2, activations=HOST, saved_names=("#0",)))
    losses, params, misses = train(
        zj.ZeroConfig(stage=3, activations=segments, swap_dir=tmp_path, **fields), of, data, tx
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for piece, tree in params.items():
        toys.assert_trees_close(tree, pieces[piece], atol=1e-4)
    assert misses == 0


# --- schedule, bytes, state -----------------------------------------------------------------------


def build(of=None, **fields):
    if "swap_dir" in fields:
        fields["swap_dir"].mkdir(exist_ok=True)
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(
        of or model(), optax.adam(1e-2), zj.ZeroConfig(stage=3, **fields), mesh
    )


def test_the_schedule_has_loops_for_each_segment_over_the_numbers_of_the_stack(tmp_path):
    with build(activations=MIXES["disk"], params=DISK, swap_dir=tmp_path) as program:
        program.check(toys.batches(1)[0])
        schedule = program.schedule
        assert isinstance(schedule, StackedSchedule)
        assert list(schedule.stacks) == ["layers 0-1", "layer 2", "layers 3-4"]
        assert [phase.name for phase in schedule.phases[3:6]] == [
            f"{run}/backward" for run in reversed(list(schedule.stacks))
        ]
        assert schedule.phase("layers 3-4/backward").layer.tolist() == [4, 3]
        assert schedule.num_layers == LAYERS
        assert "\n\nlayers 3-4: 2 layers" in str(schedule)
        kinds = {kind: records.num_layers for kind, records in program.layout.disk.kinds.items()}
        assert kinds["params"] == LAYERS
        assert {kind: n for kind, n in kinds.items() if "activations" in kind} == {
            "activations.0-1": 2,
            "activations.3-4": 2,
        }
        kept = [
            (move.kind, move.layer)
            for move in program._moves
            if "activations" in move.kind and not move.writes
        ]
        assert kept == [
            ("activations.3-4", 1),
            ("activations.3-4", 0),
            ("activations.0-1", 1),
            ("activations.0-1", 0),
        ]


def test_bytes_of_segments_are_those_of_their_layers(tmp_path):
    """In each tier, the saved activations are the sum over segments.

    Each segment saves as much as uniform layers with its settings. Arguments equal the tiers'
    contents.
    """
    batch = toys.batches(1, 16)[0]
    segments, tiers = MIXES["disk"], ("device", HOST, DISK)

    def kept(program):
        return {
            tier: sum(value.num_bytes for value in program.kept(batch) if value.tier == tier)
            for tier in tiers
        }

    expected = dict.fromkeys(tiers, 0)
    for one in segments:
        fields: dict[str, Any] = {
            name: getattr(one, name) for name in ("activations", "saved_names", "offloaded_names")
        }
        with build(params=HOST, swap_dir=tmp_path / "one", **fields) as program:
            expected = {
                tier: n + kept(program)[tier] * one.num_layers // LAYERS
                for tier, n in expected.items()
            }
    with build(
        params=HOST, opt_state=HOST, activations=segments, swap_dir=tmp_path / "all"
    ) as program:
        assert kept(program) == expected
        assert {value.stack for value in program.kept(batch)} == {
            "layers 0-1",
            "layer 2",
            "layers 3-4",
        }
        report, state = program.memory(batch), program.init(jax.random.key(0))
        assert report.tiers[HOST]["activations"] == expected[HOST]
        assert report.tiers[DISK]["activations"] >= expected[DISK]  # records are full sectors
        batch = program.shard_batch(batch)
        state, _ = program.step(state, batch)
        stacks = program._scratch.stacks("residuals")
        assert [a.shape[0] for a in stacks] == [1]  # only the middle layer's
        leaves = jax.tree.leaves((state, batch, stacks))
        held = {kind: sum(a.addressable_shards[0].data.nbytes for a in leaves if a.sharding.memory_kind == kind)
                for kind in (HOST, "device")}  # fmt: skip
        assert report.host_argument_bytes == held[HOST]
        assert report.argument_bytes == held["device"]
        compiled = program.lower(batch).compile().memory_analysis()
        assert (
            report.argument_bytes + report.host_argument_bytes
            >= compiled.argument_size_in_bytes
            > 0
        )


@pytest.mark.exhaustive  # by default bytes over `tensor` are compared without segments
def test_bytes_over_tensor_are_those_of_their_layers():
    def sent(activations):
        config = zj.ZeroConfig(stage=3, activations=activations, params=HOST)
        mesh = zj.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
        program = zj.build_train_step(toys.layered(tensor=True), toys.optimizer(), config, mesh)
        return program.memory(toys.batches(1)[0]).collectives["tensor_all_reduce"]

    remat, save = sent("remat"), sent("save")
    assert remat > save
    mixed = sent((S(1, activations=HOST), S(2, activations="save")))
    assert 3 * mixed == remat + 2 * save


@pytest.mark.exhaustive  # a state contains no activations
def test_a_checkpoint_is_restored_into_other_segments(tmp_path):
    data = toys.batches(4, 16)
    with (
        build(activations=MIXES["modes"], opt_state=HOST) as program,
        zj.Checkpointer(tmp_path / "c") as ckpt,
    ):
        _, state = toys.run(program, program.init(jax.random.key(0)), data[:2])
        ckpt.save(program, state)
        ckpt.wait()
        with build(activations=MIXES["disk"], params=HOST, swap_dir=tmp_path / "swap") as other:
            restored = ckpt.restore(other)
            for (_, a), (_, b) in zip(
                program.iter_params(state), other.iter_params(restored), strict=True
            ):
                toys.assert_trees_close(jax.device_get(a), jax.device_get(b), atol=0)
            losses, _ = toys.run(other, restored, data[2:])
        expected, _ = toys.run(program, state, data[2:])
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


# --- values by number -----------------------------------------------------------------------------


def labels(**fields):
    """Return the names of the saved values, with their tiers."""
    with build(**fields) as program:
        return {value.name: value.tier for value in program.kept(toys.batches(1, 16)[0])}


def test_a_value_has_the_same_number_in_every_mode_and_tier(tmp_path):
    saved = labels(activations=(S(LAYERS),))
    numbered = sorted(name for name in saved if name.startswith("#"))
    assert [name.split()[:2] for name in numbered] == [
        ["#0", "dot_general"],
        ["#1", "dot_general"],
    ]  # no derivative reads mix
    assert {name for name in labels(activations="save") if name.startswith("#")} == {
        *numbered
    }  # resident
    with build(activations="selective") as program:
        batch = toys.batches(1, 16)[0]
        assert {value.name for value in program.kept(batch)} == {"x", *numbered}
    for activations in ("remat", HOST, DISK):
        fields = {"activations": activations, "swap_dir": tmp_path / activations, "params": HOST}
        tier = "device" if activations == "remat" else activations
        kept = labels(saved_names=("#1",), offloaded_names=("#0",), **fields)
        assert kept == {"x": tier, numbered[0]: HOST, numbered[1]: "device"}
    # An extra mark changes no number: a marked value is kept once, under its name.
    assert labels(activations="selective", saved_names=("hidden",)) == dict.fromkeys(
        ("x", "hidden", *numbered), "device"
    )


def test_what_is_inside_of_a_loop_is_kept_by_number():
    """A loop output that "save" keeps has a number, by which "remat" keeps it too.

    The loop is split there.
    """

    def looped(p, x, key):
        turns = jax.numpy.stack([p["mix"], 2 * p["mix"]])
        return jax.lax.scan(
            lambda x, w: (x + jax.numpy.tanh(x @ w), None), x @ p["up"] @ p["down"], turns
        )[0]

    of = dataclasses.replace(model(), block=looped)
    data = toys.batches(2, 16)
    with build(of, activations=(S(LAYERS),)) as program:
        names = [value.name for value in program.kept(data[0])]
    of_loop = next(name for name in names if "scan" in name)
    config = zj.ZeroConfig(stage=3, activations="remat", offloaded_names=(of_loop.split()[0],))
    with build(of, activations="remat", offloaded_names=config.offloaded_names) as program:
        kept = {value.name: value.tier for value in program.kept(data[0])}
    assert kept == {"x": "device", of_loop: HOST}
    expected, pieces, _ = train(zj.ZeroConfig(stage=3, activations="remat"), of, data)
    losses, params, _ = train(config, of, data)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for piece, tree in params.items():
        toys.assert_trees_close(tree, pieces[piece], atol=2e-6)


# --- refused settings -----------------------------------------------------------------------------

WRONG = {
    "num_layers": (lambda: S(0), "num_layers=0 of a Segment: an integer of at least 1 is needed"),
    "mode": (lambda: S(1, activations="disk"), "activations='disk' of a Segment is unknown: choose from 'everything', 'save'"),
    "twice": (lambda: S(1, saved_names=("a",), offloaded_names=("a",)), r"both hold \['a'\]"),
    "names": (lambda: S(1, saved_names="a"), "saved_names='a': a tuple of names is needed"),
    "config": (lambda: zj.ZeroConfig(activations="all"), "or a tuple of zerojax.Segment"),
    "element": (lambda: zj.ZeroConfig(activations=("save",)), r"activations=\('save',\) is unknown: .*zerojax.Segment"),
    "empty": (lambda: zj.ZeroConfig(activations=()), r"activations=\(\) has no segment"),
    "global_names": (
        lambda: zj.ZeroConfig(activations=(S(1),), saved_names=("a",)),
        r"saved_names=\('a',\) with 1 segments as activations: each segment has its own",
    ),
    "swap_dir": (lambda: zj.ZeroConfig(activations=(S(1), S(1, activations=DISK))), "the nvme tier needs a folder"),
    "sum": (
        lambda: build(activations=(S(2), S(2))),
        r"activations has 2 segments of 2 \+ 2 = 4 layers, and the model has 5",
    ),
    "boundary": (
        lambda: build(encoder_decoder.model(), activations=(S(1), S(2), S(2))),
        r"activations\[1\] covers layers 1 to 2 of the model, but stack 'encoder' ends with layer 1: .*give 1 layers",
    ),
    "unlayered": (lambda: build(toys.unrolled(), activations=(S(3),)), r"activations=\(Segment.*works layer by layer"),
    "budget": (
        lambda: build(activations=MIXES["modes"], params=HOST, device_budget_bytes=100),
        "bytes in flight on a device, in layers 3-4/backward",
    ),
    "mark": (
        lambda: build(activations=(S(2), S(3, saved_names=("outs",)))).check(toys.batches(1)[0]),
        r"of layers 2-4 name \['outs'\], which the block does not mark; it marks \['hidden', 'out'\]",
    ),
    "number": (
        lambda: build(activations="remat", saved_names=("#2",)).check(toys.batches(1)[0]),
        r"name \['#2'\], but in the block activations='save' keeps 2 values, #0 to #1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_about_segments_is_told(case):
    make, match = WRONG[case]
    with pytest.raises(ValueError, match=match):
        make()


def test_numbers_are_refused_where_rings_depend_on_the_mode():
    fields = {
        "sequence_parallel": True,
        "tensor_overlap": True,
        "activations": (S(LAYERS, saved_names=("#0",)),),
    }
    with pytest.raises(
        NotImplementedError,
        match=re.escape("tensor_overlap=True is not supported with values"),
    ):
        build(**fields)
