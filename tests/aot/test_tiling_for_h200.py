"""Tiled models compiled for absent H200s gather or fetch one tile at a time."""

import dataclasses
import functools

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest
import tiling
from flax import nnx

import zerojax as zj
from zerojax import aot, hlo
from zerojax.sharding.specs import named
from zerojax.state.host_memory import is_away

pytestmark = pytest.mark.xdist_group("h200")
HIDDEN, INNER, TOKENS = 16384, 65536, 512


class Net(nnx.Module):
    """Two MLPs on a stream."""

    def __init__(self, num_tiles, *, rngs):
        make = functools.partial(
            zj.TiledMLP, HIDDEN, INNER, num_tiles=num_tiles, dtype=jnp.bfloat16
        )
        self.mlps = nnx.List([make(rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


@functools.cache
def compiled(num_tiles):
    """Return the text of the compiled step, and its temporary bytes per device."""
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=8, fsdp=8)
    model = zj.from_flax(
        lambda rngs: Net(num_tiles, rngs=rngs),
        lambda net, x: jnp.mean(jnp.square(net(x).astype(jnp.float32))),
    )
    program = zj.build_train_step(
        model, optax.adamw(1e-3), zj.ZeroConfig(stage=3, precision="bf16"), mesh
    )
    step = program.lower(jax.ShapeDtypeStruct((8, TOKENS, HIDDEN), jnp.bfloat16)).compile()
    assert program.gathered_early == ()
    return step.as_text(), step.memory_analysis().temp_size_in_bytes


# by default the test of a streamed layer on eight GPUs checks that its tiles are gathered
@pytest.mark.exhaustive
def test_sixteen_tiles_gather_a_tenth_at_a_time():
    (whole, whole_temp), (tiled, tiled_temp) = compiled(1), compiled(16)
    layer_bytes = 2 * (2 * HIDDEN * INNER + INNER + HIDDEN)
    assert hlo.peak_gathered_bytes(whole) >= layer_bytes * 0.99
    assert hlo.peak_gathered_bytes(tiled) * 10 <= hlo.peak_gathered_bytes(whole)
    assert tiled_temp * 2 <= whole_temp  # the remainder is gradients and moments in flight
    for text in (whole, tiled):  # traffic of a dense model, in bfloat16: 2 gathers and a reduction
        moved = hlo.collective_bytes(text, least_bytes=1 << 20)
        assert moved == {
            "all-gather": pytest.approx(2 * 2 * layer_bytes, rel=0.02),
            "reduce-scatter": pytest.approx(2 * layer_bytes, rel=0.02),
        }


# --- the streamed step ----------------------------------------------------------------------------


UPDATES = {
    "after_backward": {"grads": "pinned_host", "update": "after_backward"},
    "in_forward": {"grads": "pinned_host", "update": "in_forward"},
    "in_backward": {},
}


@functools.cache
def compiled_stream(gpus, num_tiles, update):
    fields = tiling.STREAM | UPDATES[update]
    program, batch = tiling.streamed_program(HIDDEN, num_tiles, gpus, 2, TOKENS, **fields)
    step = program.lower(batch).compile()
    return step.as_text(), step.memory_analysis(), program.memory(batch)


# by default eight GPUs hold a tile, and a layer larger than the budget trains on one GPU
@pytest.mark.exhaustive
@pytest.mark.parametrize("update", UPDATES)
def test_on_one_gpu_sixteen_tiles_hold_a_tenth_of_a_layer(update):
    (_, whole, whole_account), (text, tiled, account) = (
        compiled_stream(1, n, update) for n in (1, 16)
    )
    layer_bytes = 2 * 2 * HIDDEN * 4 * HIDDEN
    assert whole_account.tiers["device"]["gathered"] == pytest.approx(layer_bytes, rel=0.001)
    assert account.tiers["device"]["gathered"] * 10 <= whole_account.tiers["device"]["gathered"]
    assert tiled.temp_size_in_bytes * 10 <= whole.temp_size_in_bytes
    # all bytes besides the arguments are in the account, including a tile's parameters
    extra = sum(
        account.tiers["device"][kind] for kind in ("grads", "gathered", "activations", "in_flight")
    )
    assert tiled.temp_size_in_bytes <= 1.1 * extra
    assert hlo.unsafe_host_slices(text, 1) == []
    assert hlo.host_link_bytes(text, 1) == account.host_link


@pytest.mark.exhaustive  # by default the test above compiles a tiled step, for one GPU
def test_on_eight_gpus_a_streamed_layer_is_gathered_by_tiles():
    text, stats, account = compiled_stream(8, 16, "after_backward")
    layer_bytes = 2 * 2 * HIDDEN * 4 * HIDDEN
    assert hlo.peak_gathered_bytes(text) <= layer_bytes / 10
    # all bytes besides the arguments are in the account, including a tile's parameters
    extra = sum(
        account.tiers["device"][kind] for kind in ("grads", "gathered", "activations", "in_flight")
    )
    assert stats.temp_size_in_bytes <= 1.1 * extra
    assert hlo.unsafe_host_slices(text, 1) == []
    moved = hlo.collective_bytes(text, least_bytes=1 << 20, unknown_trips=1)
    assert moved == {"all-gather": 2 * 2 * layer_bytes, "reduce-scatter": 2 * layer_bytes}
    assert hlo.host_link_bytes(text, 1) == account.host_link


def test_a_layer_larger_than_the_budget_trains_within_it():
    """One layer's parameters take 17 GB in bfloat16, and its state 120 GB.

    The program has 8 GB of device memory.
    """
    budget, hidden = 8_000_000_000, 32768
    fields = {**tiling.STREAM, "device_budget_bytes": budget}
    with pytest.raises(ValueError, match=f"device_budget_bytes={budget}: .*nothing fits"):
        tiling.streamed_program(hidden, 1, 1, 2, TOKENS, **fields)
    program, batch = tiling.streamed_program(hidden, 64, 1, 2, TOKENS, **fields)
    compiled = program.lower(batch).compile().memory_analysis()
    assert 2 * 2 * hidden * 4 * hidden > 2 * budget
    assert compiled.argument_size_in_bytes + compiled.temp_size_in_bytes <= budget
    assert init_bytes(program) <= budget / 4  # for a layer of 34 GB in float32


def init_bytes(program):
    """Return the temporary bytes of a compiled `init`."""
    whole = named(program.mesh, ())
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)
    empty = [a for a in jax.tree.leaves(program.layout.abstract_state) if is_away(a)]
    with jax.set_mesh(program.mesh):
        return (
            program._init.jitted.lower(key, empty, number)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )


@pytest.mark.exhaustive
def test_the_widest_mlp_that_fits_is_found():
    case = {"gpus": 8, "layers": 2, "tokens": 64}
    width, found = tiling.widest(1, **case, budget=7e9, start=tiling.STEP)
    assert found == tiling.compile_width(width, 1, **case)
    assert found.total <= 7e9 < tiling.compile_width(width + tiling.STEP, 1, **case).total
    with pytest.raises(
        ValueError, match=r"a width of 4096 takes \d+ bytes, more than the budget of 1000000"
    ):
        tiling.widest(1, **case, budget=1e6, start=tiling.STEP)


# --- on the kernel of pallas_kernels.matmul -------------------------------------------------------


def gpt_step(implementation, axes, **fields):
    """Return a GPT's compiled step.

    The result is the kernels of each loop that has any, collective bytes by kind, and temporaries.
    """
    sizes = gpt.GPTConfig(
        layers=4,
        hidden=1024,
        heads=8,
        seq=1024,
        vocab=1024,
        dtype=jnp.bfloat16,
        mlp_tiles=4,
        attention="xla",
    )
    tensor_axis = "tensor" if axes.get("tensor", 1) > 1 else None
    c = dataclasses.replace(sizes, mlp_implementation=implementation, tensor_axis=tensor_axis)
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=4, **axes)
    program = zj.build_train_step(
        gpt.layered_gpt(c), optax.adamw(1e-3), zj.ZeroConfig(precision="bf16", **fields), mesh
    )
    tokens = jax.ShapeDtypeStruct((8, c.seq), jnp.int32)
    step = program.lower({"tokens": tokens, "targets": tokens}).compile()
    text = step.as_text()
    computations = text.split("\n}\n")
    kernels = [
        [line for line in c.splitlines() if 'custom_call_target="mosaic_gpu_v2"' in line]
        for c in computations
    ]
    moved = hlo.collective_bytes(text, least_bytes=1 << 16, unknown_trips=1)
    return [lines for lines in kernels if lines], moved, step.memory_analysis().temp_size_in_bytes


HOST = {"params": "pinned_host", "grads": "pinned_host", "opt_state": "pinned_host"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "fields"),
    [
        ({"fsdp": 4}, {"stage": 3}),
        ({"fsdp": 2, "tensor": 2}, {"stage": 3}),
        ({"fsdp": 4}, {**HOST, "num_microbatches": 2}),
        ({"fsdp": 2, "tensor": 2}, HOST),
    ],
    ids=["resident", "resident-tensor", "streamed", "streamed-tensor"],
)
def test_a_tiled_step_holds_the_kernel_forward_and_backward_and_moves_what_it_did(axes, fields):
    loops, moved, temp = gpt_step("mosaic", axes, **fields)
    # Only forward has the down product, which is added to the sum in place.
    in_place = [sum("output_to_operand_aliasing" in line for line in lines) for lines in loops]
    forward = [(len(lines), n) for lines, n in zip(loops, in_place, strict=True) if n]
    backward = [len(lines) for lines, n in zip(loops, in_place, strict=True) if not n]
    assert forward
    assert set(forward) == {(2, 1)}  # up with its bias and activation; down
    assert backward
    assert set(backward) == {1}  # up, recomputed
    none, expected, expected_temp = gpt_step(None, axes, **fields)
    assert none == []
    assert temp <= 1.01 * expected_temp
    # Weights are gathered and reduced as with XLA's products; over tensor, a layer's sum is reduced
    # once, in 16 bits.
    assert moved.get("all-reduce", 0) <= expected.get("all-reduce", 0)
    for kind in {*moved, *expected} - {"all-reduce"}:
        assert moved[kind] == pytest.approx(expected[kind], rel=0.01)
