"""Build the GPT of `problem.py` in plain JAX, as one would write it without zerojax.

It runs on one device or is sharded by hand.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from problem import Problem, batches
from problem_in_jax import flax_tree, gpt_config, optimizer

import zerojax as zj

Step = Callable[[Any, Any], Any]
"""Function `step(state, batch)` that returns the next state and the loss."""
AXIS = "fsdp"


def first_batch(p: Problem) -> dict[str, np.ndarray]:
    """Return the first batch: "tokens" and "targets", int32[batch, seq] each."""
    tokens, targets = batches(p)[0]
    return {"tokens": tokens.astype(np.int32), "targets": targets.astype(np.int32)}


def stacked(tree: Any) -> Any:
    """Return the layered form of a parameter tree, whose block leaves are stacks [L, ...]."""
    return {
        **tree,
        "blocks": jax.tree.map(lambda *layers: np.stack(layers), *tree["blocks"].values()),
    }


def scanned(
    model: zj.LayeredModel, whole: Callable[[Any], Any] = lambda p: p
) -> Callable[[Any, Any], jax.Array]:
    """Return a LayeredModel's loss as a plain scan over its blocks.

    Args:
      model: model whose functions are called.
      whole: function applied to a part's parameters before they are used.
    """

    def loss(params: Any, batch: Any) -> jax.Array:
        embed = whole(params["embed"])
        x, _ = jax.lax.scan(
            lambda x, p: (model.block(whole(p), x, None), None),
            model.embed(embed, batch, None),
            params["blocks"],
        )
        return model.head(whole(params["head"]), embed, x, batch, None)

    return loss


def plain(p: Problem, layered: bool) -> tuple[Step, Any]:
    """Return a jitted step on one device and its state, with separate blocks or a scan."""
    import gpt

    tx, c, tree = optimizer(p), gpt_config(p), flax_tree(p)
    unrolled = gpt.unrolled_gpt(c)
    loss = (
        scanned(gpt.layered_gpt(c))
        if layered
        else lambda params, batch: unrolled.loss(params, batch, None)
    )

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = jax.device_put(stacked(tree) if layered else tree)
    return jax.jit(step, donate_argnums=0), (params, tx.init(params))


def by_hand(p: Problem, stage: int, devices: int) -> tuple[Step, Any]:
    """Return a step sharded by hand, like ZeRO stage 2 or 3, and its state.

    Optimizer state and gradients are sharded. At stage 3 parameters are sharded too, and each layer
    gathers its own when it uses them.
    """
    import gpt

    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    tx, model, tree = optimizer(p), gpt.layered_gpt(gpt_config(p)), stacked(flax_tree(p))

    def sharding(*spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    def split(path: Any, a: Any) -> NamedSharding:
        first = 1 if "blocks" in jax.tree_util.keystr(path) else 0  # dim 0 of a stack counts layers
        dim = next((d for d in range(first, a.ndim) if a.shape[d] % devices == 0), None)
        return sharding() if dim is None else sharding(*(None,) * dim, AXIS)

    shards = jax.tree_util.tree_map_with_path(split, tree)
    rest = shards if stage == 3 else jax.tree.map(lambda _: sharding(), tree)
    loss = scanned(
        model,
        lambda part: jax.lax.with_sharding_constraint(part, sharding()) if stage == 3 else part,
    )
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
    opt_at = jax.tree_util.tree_map_with_path(split, jax.eval_shape(tx.init, abstract))

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = jax.lax.with_sharding_constraint(grads, shards)
        own = jax.lax.with_sharding_constraint(params, shards)
        updates, opt_state = tx.update(grads, opt_state, own)
        return (
            jax.lax.with_sharding_constraint(optax.apply_updates(own, updates), rest),
            opt_state,
        ), value

    at = (rest, opt_at)
    jitted = jax.jit(
        step, donate_argnums=0, in_shardings=(at, sharding(AXIS)), out_shardings=(at, sharding())
    )
    params = jax.device_put(tree, rest)
    return jitted, (params, jax.device_put(jax.jit(tx.init)(params), opt_at))


def flax_loop(p: Problem) -> tuple[Step, Any]:
    """Return Flax NNX's own loop: `nnx.Optimizer` in `nnx.jit`.

    The loop keeps its state in its objects; the returned state is passed through unchanged.
    """
    import gpt

    c = gpt_config(p)
    model = gpt.GPT(c, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    values = jax.tree.leaves(flax_tree(p))
    model = nnx.merge(
        graph, jax.tree.unflatten(jax.tree.structure(state), list(map(jnp.asarray, values)))
    )
    tx = nnx.Optimizer(model, optimizer(p), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, tx: Any, batch: Any) -> jax.Array:
        def loss(model: Any) -> jax.Array:
            return gpt.head_loss(c, model.head, model.embed, model.stream(batch), batch)

        value, grads = nnx.value_and_grad(loss)(model)
        tx.update(model, grads)
        return value

    def run(state: Any, batch: Any) -> Any:
        return state, step(model, tx, batch)

    return run, nnx.state((model, tx))


def zero(p: Problem, layered: bool, devices: int = 1, **fields: Any) -> tuple[Step, Any]:
    """Return zerojax's step, and its state with the problem's weights.

    Args:
      p: problem to solve.
      layered: whether the model is a LayeredModel or a Model.
      devices: number of devices in the mesh, all on `fsdp`.
      **fields: fields of the `ZeroConfig`.
    """
    import gpt

    c, tree = gpt_config(p), flax_tree(p)
    model = gpt.layered_gpt(c) if layered else gpt.unrolled_gpt(c)
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    program = zj.build_train_step(
        model, optimizer(p), zj.ZeroConfig(precision="fp32", **fields), mesh
    )
    state = program.init(jax.random.key(0))
    tree = stacked(tree) if layered else tree
    state = dataclasses.replace(
        state,
        params=jax.tree.map(lambda a, old: jax.device_put(a, old.sharding), tree, state.params),
    )

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        state, metrics = program.step(state, batch)
        return state, metrics["loss"]

    return step, state


class Running:
    """A step that each call runs once more, on the same batch.

    Attributes:
      losses: losses of the steps so far.
    """

    def __init__(self, step: Step, state: Any, batch: Any) -> None:
        """Take a step, its first state, and the batch of every call."""
        self._step, self._state, self._batch = step, state, batch
        self.losses: list[float] = []

    def __call__(self) -> None:
        """Run one step, wait for it, and record its loss."""
        self._state, loss = self._step(self._state, self._batch)
        self.losses.append(float(jax.block_until_ready((self._state, loss))[1]))
