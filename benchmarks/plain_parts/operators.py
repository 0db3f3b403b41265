"""Time a tiled MLP, a checkpoint of state in memory, and the host's AdamW.

Each is compared with a simpler program.
"""

import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from plain_parts.rows import Row, in_turn

PLAIN_MLP, AGAIN = "two dense layers", "two dense layers, computed again in backward"
TILES = (
    Row(AGAIN, PLAIN_MLP),
    Row("TiledMLP in 4 tiles", PLAIN_MLP, 1.10),
    Row("TiledMLP in 16 tiles", PLAIN_MLP),
)
COPY, ORBAX = "a copy of the bytes", "Orbax's StandardCheckpointer"
SAVES = (Row("Checkpointer.save: the step waits", COPY, 1.5), Row(ORBAX, COPY))
BOUND = "an in-place multiply of as many bytes"
KERNEL = (
    Row("host AdamW, float32", BOUND, 1.1),
    Row("host AdamW, bfloat16 in and out", BOUND, 1.1),
)


def tiles() -> dict[str, float]:
    """Return the median seconds of an MLP's value and gradient, 512 -> 2048 -> 512, 2048 rows."""
    import zerojax as zj

    jax.config.update("jax_num_cpu_devices", 1)
    x = jax.random.normal(jax.random.key(1), (2048, 512))

    class Dense(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.down = nnx.Linear(512, 2048, rngs=rngs), nnx.Linear(2048, 512, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(jax.nn.gelu(self.up(x)))

    def jitted(module: Any, wrap: Any = lambda f: f) -> Any:
        graph, params = nnx.split(module)
        run = jax.jit(
            jax.value_and_grad(
                wrap(lambda p, x: jnp.sum(nnx.merge(graph, p)(x) ** 2)), argnums=(0, 1)
            )
        )
        return lambda: jax.block_until_ready(run(params, x))

    calls = {
        PLAIN_MLP: jitted(Dense(nnx.Rngs(0))),
        AGAIN: jitted(Dense(nnx.Rngs(0)), jax.checkpoint),
    }
    for row, count in zip(TILES[1:], (4, 16), strict=True):
        calls[row.name] = jitted(zj.TiledMLP(512, 2048, num_tiles=count, rngs=nnx.Rngs(0)))
    return in_turn(calls, 12)


def saves(num_bytes: int) -> dict[str, float]:
    """Return the seconds for which a background save blocks the training loop.

    Args:
      num_bytes: approximate size of the state, which is in memory.
    """
    import optax
    import orbax.checkpoint as ocp

    import zerojax as zj

    jax.config.update("jax_num_cpu_devices", 1)
    width, layers = 1024, max(1, num_bytes // (12 * 1024 * 1024))
    model = zj.Model(
        lambda key: [jnp.ones((width, width)) for _ in range(layers)],
        lambda params, batch, key: sum(jnp.sum(p) for p in params) * jnp.mean(batch["x"]),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        zj.build_train_step(
            model, optax.adamw(1e-3), zj.ZeroConfig(stage=0), zj.make_mesh(fsdp=1)
        ) as program,
    ):
        state, batch = program.init(jax.random.key(0)), {"x": np.zeros(1, np.float32)}
        arrays = [np.asarray(a) for a in jax.tree.leaves((state.params, state.opt_state))]
        kept = [np.ones_like(a) for a in arrays]
        found: dict[str, list[float]] = {COPY: [], SAVES[0].name: [], ORBAX: []}
        with zj.Checkpointer(f"{folder}/ours") as ours, ocp.StandardCheckpointer() as theirs:
            for number in range(4):
                state, _ = program.step(state, batch)
                jax.block_until_ready(state)
                for name in found:
                    time.sleep(0.5)
                    start = time.perf_counter()
                    if name == COPY:
                        for a, b in zip(kept, arrays, strict=True):
                            np.copyto(a, b)
                    elif name == ORBAX:
                        theirs.save(
                            f"{folder}/theirs_{number}",
                            {"params": state.params, "opt_state": state.opt_state},
                        )
                    else:
                        ours.save(program, state)
                    found[name].append(time.perf_counter() - start)
                    ours.wait()
                    theirs.wait_until_finished()
    # The first save creates folders, threads and buffers.
    return {name: statistics.median(some[1:]) for name, some in found.items()}


def kernel(num_params: int, threads: int) -> dict[str, float]:
    """Return the seconds of an update on the host, and of its bound, scaled to as many bytes."""
    import host_adam

    bound, contenders = host_adam.own_contenders(num_params, threads)
    names = {
        name: next(key for key in contenders if key.startswith(f"fused kernel, {kind}"))
        for name, kind in zip((row.name for row in KERNEL), ("fp32", "bf16"), strict=True)
    }
    bounds, found = [], {name: [] for name in names}
    for _ in range(3):
        bounds.append(bound() * host_adam.NUM_BYTES / 8)
        for name, key in names.items():
            found[name].append(contenders[key]())
    return {BOUND: statistics.median(bounds)} | {
        name: statistics.median(some) for name, some in found.items()
    }
