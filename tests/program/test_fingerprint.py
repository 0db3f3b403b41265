"""What processes compare about a program.

Every hyperparameter shows, and nothing in which equal programs may differ.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
import pytest
import toys

import zerojax as zj
from zerojax.program.fingerprint import batch_key, batch_lines, build_parts, key_lines, trace_lines

PARAMS = {
    "w": jax.ShapeDtypeStruct((4, 8), jnp.float32),
    "b": jax.ShapeDtypeStruct((8,), jnp.float32),
}


def optimizer_lines(tx):
    state = jax.eval_shape(tx.init, PARAMS)
    update = jax.make_jaxpr(lambda grads, state, params: tx.update(grads, state, params))
    return trace_lines(jax.make_jaxpr(tx.init)(PARAMS)) + trace_lines(update(PARAMS, state, PARAMS))


@pytest.mark.parametrize(
    ("make", "value", "other"),
    [
        (optax.sgd, 0.1, 0.1000001),
        (optax.adamw, 1e-3, 2e-3),
        (lambda b: optax.adam(1e-3, b2=b), 0.95, 0.999),
        (lambda decay: optax.adamw(1e-3, weight_decay=decay), 0.1, 0.01),
        (lambda steps: optax.adam(optax.linear_schedule(1e-3, 0.0, steps)), 100, 200),
        (lambda rate: optax.inject_hyperparams(optax.adam)(rate), 1e-3, 2e-3),
        (lambda rates: optax.sgd(lambda count: jnp.asarray(rates)[count]), np.linspace(0, 1, 9), np.linspace(0, 2, 9)),
        (lambda norm: optax.chain(optax.clip_by_global_norm(norm), optax.sgd(0.1)), 1.0, 2.0),
        (lambda key: optax.masked(optax.sgd(0.1), {"w": key == "w", "b": key == "b"}), "w", "b"),
    ],
)  # fmt: skip
def test_hyperparameters_show_in_the_trace(make, value, other):
    assert optimizer_lines(make(value)) == optimizer_lines(make(value))
    assert optimizer_lines(make(value)) != optimizer_lines(make(other))


def test_constants_show_wherever_they_are():
    def loss(x, constant, table):
        def body(carry, row):
            return jax.lax.cond(
                carry.sum() > 0, lambda c: c * constant, lambda c: c + row, carry
            ), None

        return jax.checkpoint(lambda x: jax.lax.scan(body, x, table)[0].sum())(x)

    table = np.arange(24, dtype=np.float32).reshape(3, 8)

    def trace(constant, table):
        gradient = jax.grad(functools.partial(loss, constant=constant, table=table))
        return trace_lines(jax.make_jaxpr(gradient)(table[0]))

    assert trace(2.0, table) == trace(2.0, table.copy())
    assert trace(2.0, table) != trace(3.0, table)
    assert trace(2.0, table) != trace(2.0, table + (table == 23))


def test_lines_are_the_same_whatever_the_order_and_count_equal_layers():
    def layers(x, order):
        a, b = (jnp.sin(x), jnp.cos(x)) if order else (jnp.cos(x), jnp.sin(x))
        return a + b

    x = jnp.zeros(3)
    lines = trace_lines(jax.make_jaxpr(lambda x: layers(x, True))(x))
    assert lines == trace_lines(jax.make_jaxpr(lambda x: layers(x, False))(x))
    twice = trace_lines(jax.make_jaxpr(lambda x: jnp.sin(jnp.sin(x)))(x))
    assert (
        "2 x sin(float32[3]) accuracy" in " ".join(twice)
        or "2 x sin(float32[3]) -> float32[3]" in twice
    )


def test_parts_of_a_program_name_what_differs_and_not_the_disk(tmp_path):
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])

    def parts(rate=1e-3, **fields):
        with zj.build_train_step(
            toys.small(), optax.adam(rate), zj.ZeroConfig(**fields), mesh
        ) as program:
            return build_parts(program.layout)

    one = parts()
    assert one == parts()
    assert all(one.values())
    assert "stage=3" in one["config"]
    assert not any("swap_dir" in line for line in one["config"])
    other = parts(rate=2e-3, stage=2)
    assert {name for name in one if one[name] != other[name]} == {"config", "optimizer"}


def test_batches_and_keys_are_lines():
    batch = {"x": np.zeros((2, 3), np.int8), "weight": 1.0, "none": None}
    assert batch_lines(batch) == ["['weight'] float", "['x'] int8[2,3]"]
    keys = [
        batch_key({**batch, "x": x})
        for x in (np.ones((2, 3), np.int8), np.ones((3, 3), np.int8), np.ones((2, 3)))
    ]
    assert keys[0] == batch_key(batch)
    assert len({batch_key(batch), *keys}) == 3
    assert key_lines(jax.random.key(7)) == ["threefry2x32 [0, 7]"]
    assert key_lines(jax.random.key(7, impl="rbg")) != key_lines(jax.random.key(7))


HASHES = """
import jax, optax, toys
import zerojax as zj
from zerojax.program.fingerprint import build_parts, trace_lines
from zerojax.runtime.statements import digest
jax.config.update("jax_num_cpu_devices", 2)
mesh = zj.make_mesh(fsdp=2)
for fields in ({}, {"params": "pinned_host", "opt_state": "pinned_host"}, {"opt_state": "pinned_host", "update_on": "host"}):
    with zj.build_train_step(toys.layered(), toys.optimizer(), zj.ZeroConfig(**fields), mesh) as program:
        print({name: digest(lines) for name, lines in build_parts(program.layout).items()})
        with jax.set_mesh(mesh):
            compiled = program._compiler.step(program.abstract_batch(toys.batches(1)[0]))
            print(digest(trace_lines(compiled.step.trace(*compiled.abstract_args).jaxpr)))
"""


@pytest.mark.exhaustive  # a process with a needless difference would be refused
def test_equal_programs_have_equal_lines_in_any_process():
    """The order of a set depends on string hashes, and addresses depend on the process.

    Each process has its own string hashes.
    """
    outputs = []
    for seed in ("1", "2", "3"):
        environment = processes.environment() | {"PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", HASHES],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout)
    assert os.linesep in outputs[0]
    assert outputs[0] == outputs[1] == outputs[2]
