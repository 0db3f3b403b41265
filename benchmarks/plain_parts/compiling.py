"""Time a model until its first step is compiled: build, init, trace and compile.

Each contender runs in a new process.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from problem import Problem
from problem_in_jax import gpt_config, optimizer

from plain_parts.gpts import first_batch
from plain_parts.rows import Row

SIZES = {"layers": 24, "hidden": 128, "heads": 4, "seq": 64, "vocab": 512}
ROWS = (Row("zerojax, stage 3", "plain jit", 1.3),)


def seconds(name: str, p: Problem) -> float:
    """Return a contender's seconds from nothing to a state and a compiled step.

    The model has 24 separate NNX layers and runs on two devices.
    """
    import gpt

    import zerojax as zj

    jax.config.update("jax_num_cpu_devices", 2)
    p = dataclasses.replace(p, **SIZES)  # type: ignore[arg-type]
    c, tx, batch = gpt_config(p), optimizer(p), first_batch(p)
    jax.block_until_ready(jnp.ones(2) + 1)  # starts the backend for either contender
    start = time.perf_counter()
    if name == ROWS[0].name:
        program = zj.build_train_step(
            gpt.unrolled_gpt(c), tx, zj.ZeroConfig(stage=3), zj.make_mesh(fsdp=2)
        )
        state: Any = program.init(jax.random.key(0))
        program.lower(batch).compile()
    else:

        @jax.jit
        def init(key: jax.Array) -> Any:
            params = nnx.split(gpt.GPT(c, rngs=nnx.Rngs(key)))[1]
            return params, tx.init(params)

        graph = nnx.split(nnx.eval_shape(lambda: gpt.GPT(c, rngs=nnx.Rngs(0))))[0]

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state

            def loss(params: Any) -> jax.Array:
                model = nnx.merge(graph, params)
                return gpt.head_loss(c, model.head, model.embed, model.stream(batch), batch)

            value, grads = jax.value_and_grad(loss)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        state = init(jax.random.key(0))
        jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    jax.block_until_ready(state)
    return time.perf_counter() - start
