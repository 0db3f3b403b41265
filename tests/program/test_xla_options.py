"""XLA options by name reach the compiler on present and absent devices; wrong ones are refused."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from zerojax import aot

O1 = 19  # from XLA's enumeration of efforts; jax 0.11 accepts no other numbers
BATCH = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def tiny(mesh, **config):
    def init(key):
        return {"w": jax.random.normal(key, (4, 4))}

    def head(p, p_embed, x, batch, key):
        return jnp.mean(x @ p["w"])

    model = zj.LayeredModel(
        2, init, lambda p, b, k: b @ p["w"], init, lambda p, x, k: x @ p["w"], init, head
    )
    return zj.build_train_step(model, optax.sgd(1e-2), zj.ZeroConfig(stage=3, **config), mesh)


def dumped(folder):
    """Return the options that XLA dumped for the compiled step."""
    (path,) = folder.glob("*jit_*debug_options")
    return path.read_text()


def test_options_reach_xla_and_steps_run_what_was_compiled(tmp_path):
    program = tiny(zj.make_mesh(fsdp=2, devices=jax.devices()[:2]))
    lowered = program.lower(BATCH)
    compiled = lowered.compile({"xla_dump_to": str(tmp_path), "xla_cpu_enable_fast_math": True})
    assert "xla_cpu_enable_fast_math: true" in dumped(tmp_path)
    assert lowered.step.run is compiled
    _, metrics = program.step(program.init(jax.random.key(0)), jnp.ones(BATCH.shape))
    assert jnp.isfinite(metrics["loss"])


@pytest.mark.parametrize(
    "tier", ["device", "nvme"]
)  # nvme has callbacks, and is compiled differently
def test_options_of_gpus_that_are_not_there_come_before_the_programs_own(
    h200_compiler, tmp_path, tier
):
    program = tiny(
        aot.gpu_mesh("h200", hosts=1, gpus_per_host=2), params=tier, swap_dir=str(tmp_path / "swap")
    )
    name = "xla_gpu_all_gather_combine_threshold_bytes"
    own = (program.lower(BATCH).options or {})[name]
    program.lower(BATCH).compile(
        {name: own + 1, "xla_dump_to": str(tmp_path), "optimization_level": O1}
    )
    text = dumped(tmp_path)
    assert f"{name}: {own + 1}" in text
    assert "xla_gpu_reduce_scatter_combine_threshold_bytes: " in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"xla_nope": 1},
            rf"XLA of jax {re.escape(jax.__version__)} says: No such compile option: 'xla_nope'",
        ),
        (
            {"xla_cpu_enable_fast_math": "often"},
            "While setting option xla_cpu_enable_fast_math, 'often' is not a valid bool",
        ),
        ({"--xla_dump_to": "x"}, "named without dashes: xla_dump_to"),
        ({"xla_dump_to": None}, r"these are not: \{'xla_dump_to': None\}"),
        ("xla_dump_to=x", "takes XLA's options as a dict, by name, got 'xla_dump_to=x'"),
    ],
)
def test_wrong_options_are_told(options, message):
    lowered = tiny(zj.make_mesh(devices=jax.devices()[:1])).lower(BATCH)
    with pytest.raises(ValueError, match=message):
        lowered.compile(options)
