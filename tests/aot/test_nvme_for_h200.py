"""Steps with everything on disk, compiled for absent H200s.

The device's bytes do not depend on the number of layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from test_streamed_for_h200 import (
    ACTIVATION_BYTES,
    BATCH,
    INVOLUNTARY,
    LAYER_BYTES,
    SEQ,
    SMALL,
    layered,
)

import zerojax as zj
from zerojax import aot, hlo

pytestmark = pytest.mark.xdist_group("h200")
DISK = "nvme"
CASES: dict[str, dict[str, Any]] = {
    "8 GPUs": {"gpus": 8},
    "8 GPUs, 96 layers": {"gpus": 8, "layers": 96},
    "8 GPUs, in backward, gather ahead": {"gpus": 8, "update": "in_backward", "gather_ahead": True},
    "8 GPUs, update on the host": {"gpus": 8, "update_on": "host"},
    "512 GPUs": {"gpus": 512},
}


@functools.cache
def compiled(name: str) -> tuple[zj.Program, Any, Any]:
    fields = dict(CASES[name])
    gpus, layers = fields.pop("gpus"), fields.pop("layers", 24)
    config = zj.ZeroConfig(
        precision="bf16",
        params=DISK,
        grads=DISK,
        opt_state=DISK,
        activations=DISK,
        swap_dir="not there",
        **fields,
    )
    mesh = aot.gpu_mesh("h200", hosts=gpus // 8, gpus_per_host=8)
    program = zj.build_train_step(layered(layers, False), optax.adamw(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((BATCH * gpus, SEQ), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return program, program.lower(batch).compile(), program.memory(batch)


@pytest.mark.by_default("8 GPUs, 96 layers")
@pytest.mark.parametrize("name", CASES)
def test_nvme_step_holds_a_few_layers_and_no_state(name, capfd):
    program, result, report = compiled(name)
    stats = result.memory_analysis()
    ahead = int(program.config.gather_ahead)
    assert (
        stats.temp_size_in_bytes
        < (program.config.prefetch_distance + 3 + ahead) * LAYER_BYTES + 4 * ACTIVATION_BYTES
    )
    assert stats.host_argument_size_in_bytes == stats.host_temp_size_in_bytes == 0
    assert (
        report.argument_bytes == stats.argument_size_in_bytes < 1 << 16
    )  # tokens, counters and the batch
    assert not hlo.host_slices(result.as_text(), unknown_trips=1)
    assert INVOLUNTARY not in capfd.readouterr().err


@pytest.mark.exhaustive  # by default the test above holds a few layers of 96
def test_nvme_step_takes_the_same_memory_at_24_and_96_layers():
    few, many = (compiled(name)[1].memory_analysis() for name in ("8 GPUs", "8 GPUs, 96 layers"))
    assert few.temp_size_in_bytes == many.temp_size_in_bytes
    assert few.argument_size_in_bytes == many.argument_size_in_bytes


@pytest.mark.by_default("8 GPUs, 96 layers")
@pytest.mark.parametrize("name", CASES)
def test_nvme_step_gathers_and_reduces_layer_by_layer(name):
    text = compiled(name)[1].as_text()
    found = [c for c in hlo.collectives(text, unknown_trips=1) if c.num_bytes > SMALL // 8]
    assert {"all-gather", "reduce-scatter"} <= {c.op for c in found}
    assert max(c.num_bytes for c in found) <= LAYER_BYTES


def test_nvme_account_is_that_of_the_files():
    program, _, report = compiled("8 GPUs")
    disk = program.layout.disk
    assert report.tiers["nvme"].keys() == {"params", "grads", "opt_state", "activations"}
    assert sum(report.tiers["nvme"].values()) == sum(
        r.num_layers * r.num_bytes for r in disk.kinds.values()
    )
    states = sum(report.tiers["nvme"][kind] for kind in ("params", "grads", "opt_state"))
    assert states == pytest.approx(
        16 * report.num_params / 8, rel=0.01
    )  # 2 + 2 + 12 bytes per parameter
    assert 0 < report.tiers["pinned_host"]["buffers"] < report.tiers["nvme"]["opt_state"] / 4
    ways = {"params": 2, "grads": 2, "opt_state": 2, "activations": 2}
    assert report.tiers["device"]["slots"] == sum(
        n * disk.kinds[kind].num_bytes for kind, n in ways.items()
    )


def test_nvme_state_that_the_host_updates_takes_no_room_on_the_device():
    program, _, report = compiled("8 GPUs, update on the host")
    kinds = program.layout.disk.kinds
    assert kinds["opt_state"].slot_bytes == kinds["grads"].slot_bytes == 0
    # One slot for transfers to the worker: gradients with a few scalars. Parameters are on disk,
    # and none are loaded.
    given = (
        report.tiers["device"]["slots"]
        - kinds["params"].num_bytes
        - 2 * kinds["activations"].num_bytes
    )
    assert given == pytest.approx(kinds["params"].num_bytes, rel=1e-3)
