"""Tiles as records of a streamed step.

They equal full layers, are fetched as planned, and are reported in the schedule and the accounts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from tiled_toys import (
    LAYERS,
    SEQ,
    TILED,
    D,
    H,
    batches,
    block,
    build,
    draw,
    embed,
    head,
    init_block,
    model,
)

import zerojax as zj
from host_offload.schedule.tiles import TiledSchedule
from zerojax.models import init_params
from zerojax.precision import LossScaling
from zerojax.tiling.loops import find_stacks
from zerojax.tiling.operators import tile_stack, tile_sum, tiled_mlp

HOST, DISK = "pinned_host", "nvme"


def train(config, axes, built, evaluates=False):
    """Return losses, the float32 parameters, and the late reads of all steps.

    If asked for, the losses of `eval` before and after are included.
    """
    with build(config, axes, built) as program:
        state, losses, misses = program.init(jax.random.key(0)), [], 0.0
        evaluated = [float(program.eval(state, batches(1)[0]))] if evaluates else []
        for batch in batches():
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
            misses += float(metrics.get("swap_misses", 0))
        evaluated += [float(program.eval(state, batches(1)[0]))] if evaluates else []
        return (
            np.array(losses),
            evaluated,
            {name: jax.device_get(tree) for name, tree in program.iter_params(state)},
            misses,
        )


@functools.cache
def expected(num_microbatches, clip_norm):
    """Train on one device with full layers, without streaming."""
    config = zj.ZeroConfig(stage=0, num_microbatches=num_microbatches, clip_norm=clip_norm)
    return train(config, {"fsdp": 1}, model(tiles=False), evaluates=True)


def plain(built, data):
    """Train on one device with optax alone: layers in a Python loop, no keys.

    Returns the losses and the parameters by piece.
    """
    tx = optax.sgd(1e-4, momentum=0.9)  # like `build`

    def loss_of(params, batch):
        x = built.embed(params["embed"], batch, None)
        for i in range(LAYERS):
            x = built.block(jax.tree.map(lambda a, i=i: a[i], params["blocks"]), x, None)
        return built.head(params["head"], params["embed"], x, batch, None)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.jit(lambda key: init_params(built, key))(jax.random.key(0))
    state, losses = tx.init(params), []
    for batch in data:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    layers = {
        f"blocks/{i}": jax.tree.map(lambda a, i=i: a[i], params["blocks"]) for i in range(LAYERS)
    }
    return losses, {"embed": params["embed"], **layers, "head": params["head"]}


COLUMNS, ROWS = P(None, None, "tensor"), P(None, "tensor", None)
OF_FIRST = {
    "up": COLUMNS,
    "gate": COLUMNS,
    "down": ROWS,
    "up_bias": P(None, "tensor"),
    "gate_bias": P(None, "tensor"),
}
SPECS = {"block": {"scale": P(), "mix": P(), "first": OF_FIRST, "second": P()}}
CASES = {
    "params": ({"params": HOST, "prefetch_distance": 1, "activations": "remat"}, {"fsdp": 4}),
    "device": ({"activations": "selective"}, {"fsdp": 4}),
    "in_backward": ({"params": HOST, "opt_state": HOST, "update": "in_backward", "prefetch_distance": 0}, {"fsdp": 4}),
    "tensor": ({"params": HOST, "opt_state": HOST, "prefetch_distance": 2}, {"fsdp": 2, "tensor": 2}),
    "microbatches": (
        {"params": HOST, "grads": HOST, "num_microbatches": 2, "clip_norm": 0.1, "activations": HOST},
        {"fsdp": 4},
    ),
    # mix and the biases are unsharded on each device; the other leaves of first and second are
    # sharded
    "replicated": (
        {"params": HOST, "grads": HOST, "min_shard_bytes": 1500, "activations": "remat"},
        {"fsdp": 4},
    ),
    # loops run again in backward
    "disk": ({"params": DISK, "opt_state": DISK, "grads": DISK, "activations": DISK}, {"fsdp": 4}),
    "disk_in_backward": (
        {"params": DISK, "opt_state": DISK, "update": "in_backward", "num_microbatches": 2, "prefetch_distance": 2,
         "activations": "save"}, {"fsdp": 1},
    ),
}  # fmt: skip


@pytest.mark.xdist_group("tiles")  # which share a reference
@pytest.mark.by_default("disk_in_backward")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.exhaustive if n == "device" else ()) for n in CASES]
)
def test_tiles_as_records_train_as_whole_layers_do(name, tmp_path):
    fields, axes = CASES[name]
    config = zj.ZeroConfig(
        **fields, stage=3, swap_dir=str(tmp_path) if DISK in fields.values() else None
    )
    losses, evaluated, params, misses = train(
        config, axes, model(specs=SPECS if "tensor" in axes else None), evaluates=True
    )
    expected_losses, expected_evaluated, expected_params, _ = expected(
        config.num_microbatches, config.clip_norm
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
    np.testing.assert_allclose(evaluated, expected_evaluated, rtol=2e-6)
    assert misses == 0
    toys.assert_trees_close(params, expected_params, atol=2e-6)
    # without dropout, which makes the losses of steps differ more
    assert evaluated[1] < evaluated[0]


@jax.jit
def jitted_mlp(w, x):
    return tiled_mlp(x, w)


def odd(p, x, key):
    """A block with four unusual features.

    They are a loop in a jit of its own, used twice; a gradient that a later segment reads; a
    gradient that depends on no data; and a scalar.
    """
    scale = p["scale"] + jnp.tanh(p["mix"]["bias"])
    x = x + jitted_mlp(p["second"], x)
    half = tile_sum(lambda w, s, _: (s[0] @ w) * s[1], p["mix"]["kernel"], (x[..., : D // 2], 0.5))
    x = x + jnp.concatenate([half, half], -1).astype(x.dtype) * scale
    return x + jitted_mlp({"up": p["first"]["up"], "down": p["first"]["down"]}, x)


def odd_init(key):
    p = init_block(key)
    return p | {"first": {name: p["first"][name] for name in ("up", "down")}, "unused": jnp.ones(3)}


ODD_TILES = {
    "scale": False,
    "mix": {"kernel": True, "bias": False},
    "first": True,
    "second": True,
    "unused": False,
}


@pytest.mark.exhaustive  # by default the test above trains tiles together with other leaves
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_odd_blocks_train_as_whole_layers_do(precision):
    """The model is evaluated first.

    A cached trace once made other programs of the same functions run something else.
    """
    built = dataclasses.replace(model(ODD_TILES, stochastic=False, block=odd), init_block=odd_init)
    fields = {"stage": 3, "precision": precision, "num_microbatches": 2, "activations": "remat"}
    found, programs = (
        [],
        [(built, {"params": HOST, "grads": HOST}), (dataclasses.replace(built, tiles=False), {})],
    )
    for one, tiers in programs[: 1 if precision == "fp32" else 2]:
        with build(zj.ZeroConfig(**fields, **tiers), {"fsdp": 2}, one) as program:
            state = program.init(jax.random.key(0))
            before = float(program.eval(state, batches(1)[0]))
            losses, state = toys.run(program, state, batches(3))
            found.append(([before, *losses], jax.device_get(dict(program.iter_params(state)))))
    if precision == "fp32":
        expected_losses, expected_params = plain(built, batches(3))
        found.append(([expected_losses[0], *expected_losses], expected_params))
    (losses, params), (expected_losses, expected_params) = found
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6 if precision == "fp32" else 2e-2)
    toys.assert_trees_close(params, expected_params, atol=2e-6 if precision == "fp32" else 2e-2)


# by default `test_moments_in_tiers.py` skips a step; tiles do not affect the decision
@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", [DISK, HOST])
def test_tiles_in_float16_skip_the_update_where_gradients_overflow(tier, tmp_path):
    data, found = batches(5), []
    data[1] = data[1] | {"y": data[1]["y"] + np.float32(1e6)}
    fields = {
        "stage": 3,
        "precision": "fp16",
        "loss_scaling": LossScaling(initial=2.0**4, growth_interval=3),
    }
    for tiles in (TILED, False):
        on_disk = (
            {"params": DISK, "opt_state": DISK, "swap_dir": str(tmp_path)} if tier == DISK else {}
        )
        streamed = {"params": HOST, "opt_state": HOST, "grads": HOST} | on_disk
        config = zj.ZeroConfig(**fields, **(streamed if tiles else {}))
        with build(config, {"fsdp": 2}, model(tiles)) as program:
            state, rows = program.init(jax.random.key(0)), []
            for index, batch in enumerate(data):
                before = jax.device_get(dict(program.iter_params(state))) if index == 1 else None
                state, metrics = program.step(state, batch)
                rows.append(
                    [
                        float(metrics[name])
                        for name in ("loss", "loss_scale", "grads_finite", "skipped_steps")
                    ]
                )
                if before is not None:
                    toys.assert_trees_close(
                        jax.device_get(dict(program.iter_params(state))), before, atol=0
                    )
            found.append((np.array(rows), jax.device_get(dict(program.iter_params(state)))))
    (rows, params), (expected_rows, expected_params) = found
    np.testing.assert_array_equal(rows[:, 1:], expected_rows[:, 1:])
    assert rows[:, 2:].tolist() == [[1, 0], [0, 1], [1, 1], [1, 1], [1, 1]]
    np.testing.assert_allclose(rows[:, 0], expected_rows[:, 0], rtol=2e-3)
    toys.assert_trees_close(params, expected_params, atol=2e-3)


def test_layers_of_tiles_alone_are_read_in_order(tmp_path):
    built = zj.LayeredModel(
        LAYERS, lambda k: {"w": draw(k, 8, D)}, embed, lambda k: init_block(k)["second"],
        lambda p, x, key: x + tiled_mlp(x, p), lambda k: {"out": jnp.ones(D) / D}, head, tiles=True,
    )  # fmt: skip
    config = zj.ZeroConfig(stage=3, params=DISK, opt_state=DISK, grads=DISK, swap_dir=str(tmp_path))
    losses, _, _, misses = train(config, {"fsdp": 2}, built)
    np.testing.assert_allclose(losses, plain(built, batches())[0], rtol=2e-6)
    assert misses == 0


@pytest.mark.xdist_group("tiles")
def test_bfloat16_sums_over_tiles_and_microbatches_in_float32():
    fields = {"stage": 3, "precision": "bf16", "num_microbatches": 2}
    losses, _, params, _ = train(zj.ZeroConfig(**fields, params=HOST), {"fsdp": 1}, model())
    exact, _, expected_params, _ = expected(2, None)
    _, _, whole_params, _ = train(zj.ZeroConfig(**fields), {"fsdp": 1}, model(tiles=False))

    def distance(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return np.sqrt(sum(float(np.sum(np.square(x - y))) for x, y in pairs))

    np.testing.assert_allclose(losses[:2], exact[:2], rtol=2e-2)
    assert distance(params, expected_params) <= 1.1 * distance(whole_params, expected_params)


def test_the_schedule_and_the_account_count_tiles():
    config = zj.ZeroConfig(
        stage=3, params=HOST, opt_state=HOST, prefetch_distance=1, activations="remat"
    )
    programs = [build(config, {"fsdp": 4}, model(tiles=tiles)) for tiles in (TILED, False)]
    tiled, whole = (toys.layer_schedule(program) for program in programs)
    assert isinstance(tiled, TiledSchedule)
    assert {loops.name: loops.num_tiles for loops in tiled.tiles} == {
        "first": 4,
        "mix": 4,
        "second": 2,
    }
    assert [len(loops.phase("forward").layer) for loops in tiled.tiles] == [4, 4, 2]
    assert [len(loops.phase("update").layer) for loops in tiled.tiles] == [8, 8, 4]
    text = str(tiled)
    assert "a layer is one record and 4 tiles of first, 4 tiles of mix, 2 tiles of second" in text
    assert "backward/first, in each tick: fetches params" in text
    assert tiled.peak_bytes < whole.peak_bytes / 2
    batch = batches(1)[0]
    for program in programs:
        program.check(batch)
    memory, memory_whole = (program.memory(batch) for program in programs)
    # A group's tiles are fetched once more where its loop's output is recomputed: mix and first, in
    # backward.
    leaves = jax.tree.leaves(
        {k: v for k, v in jax.eval_shape(init_block, jax.random.key(0)).items() if k == "first"}
    )
    again = LAYERS * (sum(a.size for a in leaves) + D * D) * 4 // 4
    assert memory.host_link["to_device"] - memory_whole.host_link["to_device"] == again
    assert memory.tiers["device"]["gathered"] < memory_whole.tiers["device"]["gathered"] / 2
    with pytest.raises(
        ValueError, match=r"device_budget_bytes=1000: .* bytes in flight on a device"
    ):
        build(dataclasses.replace(config, device_budget_bytes=1000), {"fsdp": 4}, model())


def test_a_budget_that_whole_layers_exceed_is_kept_by_tiles():
    fields = {
        "stage": 3,
        "params": HOST,
        "opt_state": HOST,
        "update": "in_backward",
        "prefetch_distance": 1,
    }
    with pytest.raises(ValueError, match=r"device_budget_bytes=20000: .* nothing fits"):
        build(zj.ZeroConfig(**fields, device_budget_bytes=20_000), {"fsdp": 1}, model(tiles=False))
    build(zj.ZeroConfig(**fields, device_budget_bytes=20_000), {"fsdp": 1}, model())


@pytest.mark.parametrize(
    "fields", [{"stage": 2, "opt_state": HOST}, {"params": HOST, "gather_ahead": True},
               {"params": HOST, "opt_state": HOST, "update_on": "host"},
               {"params": HOST, "opt_state": HOST, "opt_state_device_fraction": 0.5}],
    ids=lambda fields: "-".join(map(str, fields)),
)  # fmt: skip
def test_what_moves_whole_layers_says_so(fields, caplog):
    with (
        caplog.at_level("INFO", "zerojax"),
        build(zj.ZeroConfig(**({"stage": 3} | fields)), {"fsdp": 2}, model()) as program,
    ):
        assert not hasattr(toys.layer_schedule(program), "tiles")
    assert (
        "moves full layers: stacks of tiles are fetched and gathered with the rest of their layer"
        in caplog.text
    )


# --- what is not a loop over tiles ----------------------------------------------------------------


def remat(p, x, key):
    return x + jax.checkpoint(lambda p, x: tiled_mlp(x, p["second"]))(p, x)


def doubled(p, x, key):
    return x + tiled_mlp(x, {name: 2 * a for name, a in p["second"].items()})


def twice(p, x, key):
    return tiled_mlp(x + tiled_mlp(x, p["second"]), p["second"])


def never(p, x, key):
    return x * p["scale"]


def batched(p, x, key):
    return x + jax.vmap(lambda x: tiled_mlp(x, p["second"]))(x)


def mixed(p, x, key):
    return x + tiled_mlp(x, {"up": p["second"]["up"], "down": jnp.ones((2, H // 2, D))})


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (
            remat,
            r"\['second'\]\['down'\] is a stack of tiles, .* the block uses it in 'checkpoint|remat2?'",
        ),
        (doubled, r"\['second'\]\['down'\] is a stack of tiles, .* the block uses it in 'mul'"),
        (
            twice,
            r"used together in one loop, once in a block, but these are used by loops .*\[0, 1\]",
        ),
        (never, r"used together in one loop, once in a block, but these are used by loops"),
        (mixed, r"used together in one loop, once in a block"),
        (batched, r"\['second'\]\['down'\] is a stack of tiles, .* the block uses it in 'scan'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_stacks_used_in_another_way_are_refused_by_name(wrong, why):
    built = model(
        {"scale": False, "mix": False, "first": False, "second": True},
        stochastic=False,
        block=wrong,
    )
    program = build(zj.ZeroConfig(stage=3, params=HOST), {"fsdp": 2}, built)
    with pytest.raises(ValueError, match=why):
        program.check(batches(1)[0])


def test_a_loop_whose_stacks_are_not_named_is_refused():
    tiles = TILED | {"second": False}
    why = r"loop 2 of the block runs over 2 tiles of 2 stacks, but the model's `tiles` names none of them"
    with pytest.raises(ValueError, match=why):
        build(zj.ZeroConfig(stage=3, params=HOST), {"fsdp": 2}, model(tiles)).check(batches(1)[0])


def test_stacks_of_one_loop_are_held_together():
    def init(key):
        p = init_block(key)
        return {"up": {"kernel": p["second"]["up"]}, "down": {"kernel": p["second"]["down"]}}

    def block(p, x, key):
        return x + tile_sum(lambda w, x, _: (x @ w["up"]["kernel"]) @ w["down"]["kernel"], p, x)

    built = dataclasses.replace(model(True, stochastic=False, block=block), init_block=init)
    with pytest.raises(
        ValueError,
        match=r"loop 0 of the block runs over 2 tiles of 2 stacks, .* held in 2 places: name all stacks",
    ):
        build(zj.ZeroConfig(stage=3, params=HOST), {"fsdp": 2}, built).check(batches(1)[0])


@pytest.mark.parametrize(
    ("tiles", "why"),
    [
        ({"scale": False}, "tiles must mirror the parameters of one layer"),
        (TILED | {"scale": "yes"}, r"tiles holds 'yes' for \['scale'\]"),
        (TILED | {"scale": 0}, r"tiles holds 0 for \['scale'\]"),
        (
            TILED | {"first": 3},
            r"tiles holds 3 for \['first'\].*: the number along the first dim must divide them",
        ),
        (
            TILED | {"mix": True},
            r"in one module are used together, but differ in their number of tiles: .*16",
        ),
    ],
)
def test_tiles_that_do_not_fit_are_refused_at_build_time(tiles, why):
    with pytest.raises(ValueError, match=why):
        build(zj.ZeroConfig(stage=3, params=HOST), {"fsdp": 2}, model(tiles))


# --- Flax -----------------------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.qkv = zj.TiledDense(D, D, num_tiles=2, rngs=rngs)
        self.mlp = zj.TiledMLP(D, H, num_tiles=4, rngs=rngs)

    def __call__(self, x):
        return x + self.mlp(self.norm(x + self.qkv(x)))


class NnxEnd(nnx.Module):
    def __init__(self, size, *, rngs):
        self.dense = nnx.Linear(size, D, rngs=rngs)

    def __call__(self, x):
        return self.dense(x["x"] if isinstance(x, dict) else x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + zj.linen.TiledDense(D, num_tiles=2, name="qkv")(x)
        return x + zj.linen.TiledMLP(H, num_tiles=4, name="mlp")(nn.RMSNorm(name="norm")(x))


class LinenEnd(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(D)(x["x"] if isinstance(x, dict) else x)


def loss(head, embed, x, batch):
    return jnp.mean(jnp.square(jnp.mean(head(x), -1) - batch["y"]))


@pytest.mark.by_default("nnx")
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_tiled_layers_of_flax_are_known(api):
    make = lambda module, *args: lambda rngs: module(*args, rngs=rngs)  # noqa: E731
    if api == "nnx":
        parts = {"embed": make(NnxEnd, 8), "block": make(NnxBlock), "head": make(NnxEnd, D)}
    else:
        parts = {
            "embed": LinenEnd(),
            "block": LinenBlock(),
            "head": LinenEnd(),
            "example_batch": batches(1)[0],
        }
    built = zj.from_flax(**parts, num_layers=LAYERS, loss=loss)
    named = {
        jax.tree_util.keystr(path)
        for path, flag in jax.tree_util.tree_flatten_with_path(built.tiles)[0]
        if flag
    }
    assert named == {"['qkv']['kernel']", "['mlp']['up']", "['mlp']['up_bias']", "['mlp']['down']"}
    config = zj.ZeroConfig(stage=3, params=HOST)
    schedule = build(config, {"fsdp": 2}, built).schedule
    assert isinstance(schedule, TiledSchedule)
    assert {loops.name: loops.num_tiles for loops in schedule.tiles} == {"qkv": 2, "mlp": 4}
    losses, *_ = train(config, {"fsdp": 2}, built)
    np.testing.assert_allclose(losses, plain(built, batches())[0], rtol=2e-6)


def test_loops_refuse_what_they_cannot_run():
    w, x = jnp.ones((2, 3, 3)), jnp.ones((4, 3))
    with pytest.raises(ValueError, match="returns one array, not tuple"):
        tile_stack(lambda w, x: (x @ w, x), w, x)
    with pytest.raises(
        ValueError, match=r"stacks of one length, one entry for each tile, not \[2, 3\]"
    ):
        tile_sum(lambda w, x, part: x @ w, w, x, jnp.ones(3))


def test_find_stacks_leaves_out_what_is_used_besides():
    params = jax.eval_shape(init_block, jax.random.key(0))
    x = jax.ShapeDtypeStruct((2, SEQ, D), jnp.float32)
    assert find_stacks(lambda p, x: block(p, x, None), params, x) == jax.tree.map(
        lambda flag, sub: jax.tree.map(lambda _: flag, sub), TILED, params
    )
    assert not any(jax.tree.leaves(find_stacks(lambda p, x: remat(p, x, None), params, x)))
