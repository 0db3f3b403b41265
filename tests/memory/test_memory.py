"""Closed forms, and a program's account against the memory that it actually holds."""

import dataclasses
import itertools
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax import memory
from zerojax.memory.report import STATE_KINDS, MemoryReport


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, lambda p, n: 16 * p),
        (1, lambda p, n: 4 * p + 12 * p / n),
        (2, lambda p, n: 2 * p + 14 * p / n),
        (3, lambda p, n: 16 * p / n),
    ],
)
def test_model_states_are_the_papers(stage, expected):
    for shards in (1, 4, 64, 1024):
        total = memory.model_state_bytes(7_500_000_000, stage, shards)["total"]
        np.testing.assert_allclose(total, expected(7.5e9, shards), rtol=1e-12)


def test_model_states_of_the_papers_figure():
    """ZeRO, figure 1: 7.5 B parameters on 64 devices take 120, 31.4, 16.6 and 1.9 GB."""
    gigabytes = [
        memory.model_state_bytes(7_500_000_000, stage, 64)["total"] / 1e9 for stage in range(4)
    ]
    np.testing.assert_allclose(gigabytes, [120, 31.4, 16.6, 1.9], atol=0.06)


def test_bytes_of_a_parameter_follow_from_the_precision():
    assert memory.state_bytes("bf16").total == 16
    assert memory.state_bytes("fp16").total == 16
    assert memory.state_bytes("fp32").total == 16  # 4 + 4 + 8: no master
    assert memory.state_bytes("bf16", keeps_fp32_grads=True).total == 20  # ZeRO-Infinity
    assert memory.state_bytes("bf16", num_microbatches=4).total == 18  # accumulated in float32
    assert memory.state_bytes("bf16", reduce_dtype="float32").total == 18  # reduced in float32
    assert memory.state_bytes("bf16", moments=4).total == 12  # one moment


@pytest.mark.parametrize(("stage", "passes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_collective_elements_are_the_papers(stage, passes):
    elements = memory.collective_elements(1_000_000, stage, 64)
    np.testing.assert_allclose(sum(elements.values()), passes * 1e6 * 63 / 64)


def test_transformer_formulas():
    assert memory.transformer_params(96, 12288) == 12 * 96 * 12288**2  # GPT-3's blocks, 174 B
    assert (
        memory.transformer_activation_bytes(1, 2048, 12288, 96, 96, remat=True)
        == 2 * 2048 * 12288 * 96
    )
    full = memory.transformer_activation_bytes(1, 2048, 12288, 96, 96, remat=False)
    np.testing.assert_allclose(full, 96 * 2048 * 12288 * (34 + 5 * 96 * 2048 / 12288))
    assert (
        memory.transformer_activation_bytes(1, 2048, 12288, 96, 96, remat=False, tensor=8)
        < full / 4
    )


@pytest.mark.by_default("0-fp16", "1-bf16", "2-fp32", "3-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_account_equals_what_devices_hold(stage, precision):
    config = zj.ZeroConfig(stage=stage, precision=precision, num_microbatches=2)
    program = zj.build_train_step(
        toys.layered(), toys.optimizer(), config, zj.make_mesh(data=2, fsdp=4)
    )
    state = program.init(jax.random.key(0))
    batch = program.shard_batch(toys.batches(1)[0])
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((state, batch)))
    report = program.memory(batch)
    assert report.argument_bytes == held
    assert set(report.tiers) == {"device", "pinned_host", "nvme"}
    assert report.num_params == sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert "opt_state" in str(report)


def test_activations_are_counted_from_the_residuals():
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)

    def kept(activations, layers):
        c = gpt.GPTConfig(layers=layers, hidden=64, heads=4, seq=32, vocab=64)
        config = zj.ZeroConfig(stage=3, activations=activations)
        program = zj.build_train_step(
            gpt.layered_gpt(c), optax.adam(1e-3), config, zj.make_mesh(fsdp=8)
        )
        return program.memory({"tokens": tokens, "targets": tokens}).tiers["device"]["activations"]

    layer_input = 2 * 32 * 64 * 4  # sequences per device x seq x hidden x float32
    index = 4 / 8  # the scan saves each layer's index, counted as split, like all saved values
    assert kept("remat", 8) - kept("remat", 4) == pytest.approx(4 * (layer_input + index), abs=4)
    assert kept("save", 8) - kept("save", 4) > 8 * 4 * layer_input


def test_gathered_is_one_layer():
    c = gpt.GPTConfig(layers=4, hidden=64, heads=4, seq=32, vocab=64)
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    program = zj.build_train_step(
        gpt.layered_gpt(c), optax.adam(1e-3), zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=8)
    )
    gathered = program.memory({"tokens": tokens, "targets": tokens}).tiers["device"]["gathered"]
    assert gathered == 4 * (12 * 64**2 + 13 * 64)


HOST = "pinned_host"
EVERYTHING = {"params": HOST, "grads": HOST, "opt_state": HOST, "activations": HOST}


def streamed(num_layers: int = toys.LAYERS, **config: Any) -> zj.Program:
    model = dataclasses.replace(toys.layered(), num_layers=num_layers)
    fields = {"activations": "remat", "gather_ahead": True, **config}
    return zj.build_train_step(
        model, toys.optimizer(), zj.ZeroConfig(**fields), zj.make_mesh(fsdp=8)
    )


def small(**config: Any) -> tuple[zj.Program, Any]:
    """Return a program that compiles fast, and a batch for it."""
    model = zj.LayeredModel(
        4,
        lambda key: toys.draw(key, (8, 16)),
        lambda p, batch, key: batch @ p,
        lambda key: {"w": toys.draw(key, (16, 16)) / 4, "scale": jnp.ones(16)},
        lambda p, x, key: x + p["scale"] * jnp.tanh(x @ p["w"]),
        lambda key: jnp.ones(16),
        lambda p, p_embed, x, batch, key: jnp.mean(jnp.square(x @ p)),
    )
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    program = zj.build_train_step(
        model, optax.adam(1e-3), zj.ZeroConfig(**{"activations": "remat", **config}), mesh
    )
    return program, program.shard_batch(jnp.ones((8, 8)))


def report_of(num_layers: int = toys.LAYERS, **config: Any) -> MemoryReport:
    return streamed(num_layers, **config).memory(toys.batches(1)[0])


def held(tree: Any, kind: str) -> int:
    """Return the bytes of one device's shards of a tree in a given memory kind."""
    leaves = jax.tree.leaves(tree)
    away = [leaf.sharding.memory_kind == HOST for leaf in leaves]
    return sum(
        a.addressable_shards[0].data.nbytes
        for a, off in zip(leaves, away, strict=True)
        if off == (kind == HOST)
    )


@pytest.mark.by_default("bf16-1-one_or_all")
@pytest.mark.parametrize(
    "counts", [(1, 4), range(5)], ids=["one_or_all", "every"]
)  # of kinds in host memory
@pytest.mark.parametrize(("precision", "count"), [("bf16", 1), ("fp32", 4)])
def test_tiers_add_up_to_the_same_totals(precision, count, counts):
    def totals(report):
        return {
            k: sum(report.tiers[t].get(k, 0) for t in report.tiers)
            for k in (*STATE_KINDS, "grads", "activations")
        }

    everywhere = [
        tiers
        for tiers in itertools.product(["device", HOST], repeat=4)
        if tiers.count(HOST) in counts
    ]
    config = {"precision": precision, "num_microbatches": count}
    on_device = report_of(**config)
    assert not any(on_device.tiers[HOST].values())
    for tiers in everywhere:
        chosen = dict(zip(("params", "grads", "opt_state", "activations"), tiers, strict=True))
        kept = {"activations": HOST if chosen["activations"] == HOST else "remat"}
        report = report_of(**config, **(chosen | kept))
        assert totals(report) == totals(on_device)
        assert report.model_state_bytes == on_device.model_state_bytes
        for kind, tier in chosen.items():
            assert (report.tiers[HOST][kind] > 0) == (tier == HOST)
    split = report_of(**config, opt_state=HOST, opt_state_device_fraction=0.5)
    assert totals(split) == totals(on_device)
    assert (
        0
        < split.tiers[HOST]["opt_state"]
        < report_of(**config, opt_state=HOST).tiers[HOST]["opt_state"]
    )


@pytest.mark.parametrize(
    "config",
    [
        {"precision": "bf16", **EVERYTHING, "num_microbatches": 2, "prefetch_distance": 2},
        {
            "precision": "bf16",
            **EVERYTHING,
            "update": "in_backward",
            "opt_state_device_fraction": 0.5,
        },
        {"precision": "fp32", "opt_state": HOST, "stage": 2},
        {**EVERYTHING, "grads_dtype": "bfloat16", "precision": "bf16", "num_microbatches": 2},
    ],
    ids=["everything", "in_backward", "stage_2", "rounded_grads"],
)
def test_account_equals_what_tiers_hold(config):
    program, batch = small(**config)
    state = program.init(jax.random.key(0))
    report = program.memory(batch)
    state, _ = program.step(state, batch)
    kept, grads = (program._scratch.stacks(use) for use in ("residuals", "grads"))
    assert report.argument_bytes == held((state, batch), "device")
    assert report.host_argument_bytes == held((state, kept, grads), HOST)
    for kind in STATE_KINDS:
        assert report.tiers[HOST][kind] == held(getattr(state, kind), HOST)
    assert report.tiers[HOST]["grads"] == held(grads, HOST)
    assert report.tiers[HOST]["activations"] == held(kept, HOST)
    assert "host link" in str(report)


@pytest.mark.by_default("0-fp32", "2-bf16")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("distance", [0, 2])
def test_each_byte_crosses_the_link_once_each_way(precision, distance):
    config = {"precision": precision, "prefetch_distance": distance}
    report = report_of(**config, **EVERYTHING)
    host, activations = report.tiers[HOST], report.tiers[HOST]["activations"]
    state = host["master"] + host["opt_state"]
    ends = sum(
        leaf.size
        // (8 if "table" in path or "frozen" in path or "bias" in path else 1)
        * leaf.dtype.itemsize
        for path, leaf in _leaves(streamed(**config).layout.abstract_state.params)
        if "blocks" not in path
    )
    blocks = host["params"] - ends
    # the update reads parameters without masters
    again = ends + blocks if precision == "fp32" else 0
    assert report.host_link == {
        "to_device": 2 * blocks + ends + host["grads"] + state + activations + again,
        "to_host": host["params"] + host["grads"] + state + activations,
    }
    gathered_late = report_of(**config, **EVERYTHING, gather_ahead=False)
    assert gathered_late.host_link == report.host_link
    summed = report_of(
        **config, **EVERYTHING, num_microbatches=4
    )  # a layer is loaded once for all microbatches
    wider = summed.tiers[HOST]["grads"] - host["grads"]
    assert summed.host_link == {way: n + wider for way, n in report.host_link.items()}
    fused = report_of(**config, **EVERYTHING, update="in_backward")
    assert fused.host_link["to_host"] == report.host_link["to_host"] - host["grads"]
    assert fused.host_link["to_device"] == report.host_link["to_device"] - host["grads"] - (
        blocks if again else 0
    )


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def test_optimizer_state_of_a_resident_model_crosses_the_link_once():
    config = zj.ZeroConfig(stage=3, precision="bf16", opt_state=HOST)
    program = zj.build_train_step(toys.unrolled(), toys.optimizer(), config, zj.make_mesh(fsdp=8))
    report = program.memory(toys.batches(1)[0])
    moved = report.tiers[HOST]["master"] + report.tiers[HOST]["opt_state"]
    assert report.host_link == {"to_device": moved, "to_host": moved}
    assert report.host_argument_bytes == moved
    largest = max(leaf.size for _, leaf in _leaves(program.layout.abstract_params)) // 8
    assert (
        report.tiers["device"]["in_flight"] == 2 * 12 * largest
    )  # one leaf's master and moments, old and new


@pytest.mark.by_default("plain", "everything")
@pytest.mark.parametrize(
    "config",
    [{}, {**EVERYTHING, "update": "in_backward"}, {"precision": "fp32"}],
    ids=["plain", "everything", "fp32"],
)
def test_an_update_on_the_host_moves_gradients_down_and_parameters_up(config):
    program, batch = small(
        **{"precision": "bf16", "opt_state": HOST, "update_on": "host", **config}
    )
    report = program.memory(batch)
    program.step(program.init(jax.random.key(0)), batch)
    traffic = program._runner.host.host.traffic
    assert {"to_device": traffic.to_device, "to_host": traffic.to_host} == {
        k: 2 * n for k, n in report.callback_link.items()
    }
    copied = {way: n - report.callback_link[way] for way, n in report.host_link.items()}
    assert any(copied.values()) == ("params" in config)
    if not config:
        params = report.tiers["device"]["params"]
        assert report.host_link == {
            "to_device": params,
            "to_host": params,
        }  # 2 + 2 bytes per parameter


DISK = "nvme"


@pytest.mark.by_default("all", "in_backward")
@pytest.mark.parametrize(
    "config",
    [
        {"opt_state": DISK},
        {
            "opt_state": DISK,
            "grads": DISK,
            "params": DISK,
            "activations": DISK,
            "prefetch_distance": 2,
        },
        {"opt_state": DISK, "params": DISK, "update": "in_backward", "precision": "fp32"},
        {"opt_state": HOST, "params": DISK, "grads": DISK, "num_microbatches": 2},
    ],
    ids=["opt_state", "all", "in_backward", "params_and_grads"],
)
def test_an_update_on_the_host_with_the_nvme_tier_is_accounted_for(config, tmp_path):
    program, batch = small(
        **{"precision": "bf16", "update_on": "host", "swap_dir": str(tmp_path), **config}
    )
    with program:
        report, state = program.memory(batch), program.init(jax.random.key(0))
        engine, traffic = program.swap.engine, program._runner.host.host.traffic
        crossed: dict[str, list[int]] = {
            "to_device": [],
            "to_host": [],
        }  # by callbacks of both devices, each on its own thread

        def counted(move: Any, way: str) -> Any:
            def call(kind: str, rank: int, layer: int, use: Any) -> None:
                def used(views: Any) -> None:
                    crossed[way].append(
                        sum(v.nbytes for v in views)
                    )  # complete with threads, unlike "+="
                    use(views)

                move(kind, rank, layer, used)

            return call

        engine.fetch, engine.store = (
            counted(engine.fetch, "to_device"),
            counted(engine.store, "to_host"),
        )
        program.step(state, batch)
        assert {way: sum(n) + getattr(traffic, way) for way, n in crossed.items()} == {
            way: 2 * n for way, n in report.callback_link.items()
        }
        assert report.host_link == report.callback_link
        assert engine.buffer_bytes == 2 * report.tiers[HOST]["buffers"]
        for kind, n in report.tiers[DISK].items():
            files = [
                path
                for path in tmp_path.rglob("c.*")
                if path.parent.parent.name.split(".")[0] in (kind, OTHER.get(kind))
            ]
            assert sum(path.stat().st_size for path in files) == 2 * n
        assert set(report.tiers[DISK]) == {kind for kind, tier in config.items() if tier == DISK}
        assert not report.tiers[HOST].get("stashed")


OTHER = {"opt_state": "master"}  # of the unstacked leaves


def test_a_delayed_update_keeps_gradients_and_parameters_twice():
    program, batch = small(precision="bf16", opt_state=HOST, update_on="host", delayed_update=True)
    report, at_once = (
        program.memory(batch),
        small(precision="bf16", opt_state=HOST, update_on="host")[0].memory(batch),
    )
    state = program.init(jax.random.key(0))
    assert (
        report.host_argument_bytes
        == held(state, HOST)
        == at_once.host_argument_bytes + report.tiers[HOST]["pending"]
    )
    assert (
        report.tiers[HOST]["stashed"]
        == report.tiers[HOST]["pending"]
        == held(state.pending.grads, HOST)
    )
    host = program._runner.host.host
    state, _ = program.step(state, batch)
    before = dataclasses.replace(host.traffic)
    program.step(state, batch)  # installs the results of the first step's gradients
    for kept, kind in ((host.stashed, "stashed"), (host.new_params, "made")):
        assert sum(a.nbytes for a in kept.values()) == 2 * report.tiers[HOST][kind]
    moved = {way: getattr(host.traffic, way) - getattr(before, way) for way in report.host_link}
    assert moved == {way: 2 * n for way, n in report.host_link.items()}
    assert report.host_link == at_once.host_link


def test_gradients_that_wait_for_the_host_are_no_argument():
    report = report_of(precision="bf16", grads=HOST, opt_state=HOST, update_on="host")
    plain = report_of(precision="bf16", grads=HOST, opt_state=HOST)
    assert report.tiers[HOST]["stashed"] == plain.tiers[HOST]["grads"] > 0
    assert report.host_argument_bytes == plain.host_argument_bytes - plain.tiers[HOST]["grads"]
    assert report.model_state_bytes == plain.model_state_bytes


@pytest.mark.exhaustive  # by default a program of 96 layers is compiled for H200s
def test_records_in_flight_do_not_depend_on_the_number_of_layers():
    def running(num_layers, **config):
        device = report_of(num_layers, precision="bf16", **EVERYTHING, **config).tiers["device"]
        return {kind: device[kind] for kind in ("grads", "gathered", "activations", "in_flight")}

    for config in (
        {},
        {"prefetch_distance": 0},
        {"update": "in_backward"},
        {"gather_ahead": False},
    ):
        assert running(6, **config) == running(12, **config)
    one, two, three = (
        running(12, prefetch_distance=d, gather_ahead=False)["in_flight"] for d in (2, 3, 4)
    )
    assert three - two == two - one > 0
    assert running(6)["gathered"] == 2 * running(6, gather_ahead=False)["gathered"]
