"""State born in its tier: made on the device one layer or one leaf at a time, and moved to where it rests.

Host stacks are allocated empty outside of the program and donated to it, since XLA makes what a program allocates on the device
first. A layer's parameters, masters and optimizer state are then made and written in one tick:

    for each layer l:   w = init_block(key[l]);  params[l], masters[l], opt_state[l] = cast(w), w, tx.init(w)

The values are those of `zerojax.program.init.build_init`: the same keys, the same order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.models import LayeredModel, Model, init_params
from zerojax.optim import Parts, States
from zerojax.precision import PRECISIONS, init_loss_scale
from zerojax.sharding import STAGES
from zerojax.state import Index, Layout, OnDisk, Split, Tile, TileGroup, TrainState, is_away, is_stored

Array = jax.Array


def build_born_init(
    model: Model | LayeredModel, tx: optax.GradientTransformation, layout: Layout, parts: Parts
) -> Callable[[Array, Array, Array, list[Array], Array], TrainState]:
    """Return `init(key, order, one, empty, number) -> state`.

    Its arguments are a key, i32[n] holding 0, 1, .. for as many layers, and tiles of one, as there are, i32[] holding 1, one
    empty array, donated, for each leaf of the abstract state in host memory, in order, and i32[], the number of the state,
    which leaves on disk carry.
    """
    abstract = layout.abstract_state
    precision = PRECISIONS[layout.config.precision]

    def init(key: Array, order: Array, one: Array, empty: list[Array], number: Array) -> TrainState:
        given = iter(empty)

        def room(leaf: Any) -> Any:
            if isinstance(leaf, OnDisk):
                return OnDisk(jnp.full(leaf.token.shape, number), leaf.shape, leaf.dtype)
            return next(given) if is_away(leaf) else jnp.zeros(leaf.shape, leaf.dtype)

        rooms = jax.tree.map(
            room, (abstract.params, abstract.master, abstract.opt_state), is_leaf=lambda node: isinstance(node, OnDisk)
        )
        states = _states(rooms)
        made = _unstacked(model, key)
        shared = _shared(parts, tx)
        states = parts.close(states, shared)
        states = _fill_ends(parts, tx, states, made, one)
        if isinstance(model, LayeredModel):
            keys = jax.random.split(jax.random.split(key, 3)[1], model.num_layers)
            states = _fill_blocks(model, parts, tx, states, keys, order)
        tree = jax.tree.structure(abstract.params, is_leaf=is_stored)
        return TrainState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            key=jax.random.fold_in(key, 0x5EED),
            params=jax.tree.unflatten(tree, states.params),
            master=None if states.master is None else jax.tree.unflatten(tree, states.master),
            opt_state=jax.tree.unflatten(jax.tree.structure(abstract.opt_state, is_leaf=is_stored), states.opt),
            loss_scale=init_loss_scale(layout.config.loss_scaling) if precision.scales_loss else None,
            pending=jax.tree.map(room, abstract.pending),
        )

    return init


def _states(rooms: tuple[Any, Any, Any]) -> States:
    params, master, opt_state = rooms
    masters = None if master is None else jax.tree.leaves(master, is_leaf=is_stored)
    weights = jax.tree.leaves(params, is_leaf=is_stored)
    return States(weights, masters, jax.tree.leaves(opt_state, is_leaf=is_stored))


def _unstacked(model: Model | LayeredModel, key: Array) -> list[Array]:
    """Return the float32 parameters that are no stack of layers."""
    if isinstance(model, Model):
        made = model.init(key)
    else:
        k_embed, _, k_head = jax.random.split(key, 3)
        made = {"embed": model.init_embed(k_embed), "head": model.init_head(k_head)}
    return [jnp.asarray(a, jnp.float32) for a in jax.tree.leaves(made)]


def _init(parts: Parts, tx: optax.GradientTransformation, part: Sequence[int], values: Sequence[Array]) -> list[Array]:
    """Return the leaves of `tx.init` where only the parameters in `part` are there."""
    leaves, tree = jax.tree.flatten(parts.update.params)
    return jax.tree.leaves(tx.init(jax.tree.unflatten(tree, parts.update.fill(leaves, part, values))))


def _shared(parts: Parts, tx: optax.GradientTransformation) -> list[Array]:
    made = _init(parts, tx, (), ())
    return [made[j] for j in parts.update.shared]


def _fill_ends(parts: Parts, tx: optax.GradientTransformation, states: States, made: list[Array], one: Array) -> States:
    """Put every unstacked leaf, and its state, in place, one after the other."""
    for index, value in zip(parts.ends, made, strict=True):

        def new(_: Any, __: Any, index: int = index, value: Array = value) -> tuple[Array, list[Array]]:
            value = jax.lax.with_sharding_constraint(value, parts.grads[index].sharding)
            state = _init(parts, tx, (index,), (value,))
            return value, [state[j] for j in parts.update.states_of((index,))]

        states, one = parts.put_leaf(states, index, new, one)
    return states


def _fill_blocks(
    model: LayeredModel, parts: Parts, tx: optax.GradientTransformation, states: States, keys: Array, order: Array
) -> States:
    """Make the layers one by one, and their tiles one by one.

    A tile is a slice of a whole layer that is made anew for it: XLA for GPUs, which makes random numbers element by element,
    makes no more than the slice. XLA for CPUs would make all of it each time; there a layer is made once.
    """
    on_cpu = parts.mesh.devices.flat[0].platform == "cpu"

    def put(states: States, part: Sequence[int], index: Index, values: list[Array], on_device: bool) -> States:
        state = _init(parts, tx, part, [parts.grown(i, v) for i, v in zip(part, values, strict=True)])
        after = [state[j].reshape(values[part.index(parts.owner(j))].shape) for j in parts.update.states_of(part)]
        return parts.write_layer(states, part, index, values, after, on_device)

    indices = sorted(i for part in parts.kept_together for i in part)

    def block(key: Array) -> dict[int, Array]:
        """Return one layer's float32 leaves by index."""
        made = [jnp.asarray(a, jnp.float32) for a in jax.tree.leaves(model.init_block(key))]
        return dict(zip(indices, made, strict=True))

    def body(on_device: bool) -> Callable[[Array, States], States]:
        def tick(t: Array, states: States) -> States:
            layer = order[t]
            leaves = block(keys[layer])
            values = [jax.lax.with_sharding_constraint(leaves[i], parts.grads[i].sharding) for i in parts.blocks]
            states = put(states, parts.blocks, layer, values, on_device)
            for group in parts.groups:

                def tile(k: Array, states: States, group: TileGroup = group) -> States:
                    index = Tile(layer, order[k], group.num_tiles)
                    made = leaves if on_cpu else block(jax.lax.optimization_barrier((keys[layer], index.tile))[0])
                    values = [jax.lax.dynamic_index_in_dim(made[i], index.tile, keepdims=False) for i in group.leaves]
                    pairs = zip(group.leaves, values, strict=True)
                    values = [jax.lax.with_sharding_constraint(v, parts.grads[i].sharding) for i, v in pairs]
                    return put(states, group.leaves, index, values, False)

                states = jax.lax.fori_loop(0, group.num_tiles, tile, states)
            return states

        return tick

    held = [leaf for leaf in states.opt if isinstance(leaf, Split)]
    on_device = held[0].device.shape[0] if held else 0
    states = jax.lax.fori_loop(0, on_device, body(True), states) if on_device else states
    return jax.lax.fori_loop(on_device, model.num_layers, body(False), states)


def build_init(
    model: Model | LayeredModel, tx: optax.GradientTransformation, layout: Layout
) -> Callable[[jax.Array], TrainState]:
    """Return `init(key) -> state`, to be jitted with `layout.shardings` as its output."""
    precision, stage = PRECISIONS[layout.config.precision], STAGES[layout.config.stage]

    def init(key: jax.Array) -> TrainState:
        master = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), init_params(model, key))
        master = jax.lax.with_sharding_constraint(master, layout.param_shardings(stage.opt_state))
        return TrainState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            key=jax.random.fold_in(key, 0x5EED),
            params=jax.tree.map(lambda p: p.astype(precision.compute_dtype), master),
            master=master if precision.has_master else None,
            opt_state=tx.init(master),
            loss_scale=init_loss_scale(layout.config.loss_scaling) if precision.scales_loss else None,
        )

    return init
