"""What each pipeline stage does with arrays of its own, at an index of its own.

An array over the stages has a dim of length p that `pipe` splits:

    x[p_pipe, B, T, H]           activations of each stage
    W[n, p_pipe, D, F]           stacks: of records, of saved values, of sums

In one tick the stages work on different layers and microbatches, so each reads and writes its
stacks at its own index. For that, small regions are manual over `pipe` alone (`jax.shard_map`), and
the partitioner keeps all other axes. It would gather the whole stack instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.sharding import PIPE, Spec, num_stages

Array = jax.Array


class Stages:
    """Operations on arrays over the stages of a mesh.

    Attributes:
      mesh: the device mesh, with the axis `pipe`.
      count: p, number of stages.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Use the axis `pipe` of a mesh."""
        self.mesh = mesh
        self.count = num_stages(mesh)

    @property
    def numbers(self) -> Array:
        """The number of each stage: i32[p]."""
        return jnp.arange(self.count)

    def map(self, function: Callable[..., Any], out_axes: Any = 0) -> Callable[..., Any]:
        """Return a function that applies `function` of one stage to all stages.

        Args:
          function: function of arrays of one stage.
          out_axes: dim of each result that counts the stages, as in `jax.vmap`.
        """
        return jax.vmap(function, out_axes=out_axes, spmd_axis_name=PIPE)

    def repeat(self, tree: Any) -> Any:
        """Return arrays that all stages have, once for each stage: a[...] -> [p, ...]."""
        stages = NamedSharding(self.mesh, PartitionSpec(PIPE))

        def repeat(a: Array) -> Array:
            repeated = jnp.broadcast_to(a, (self.count, *a.shape))
            return jax.lax.with_sharding_constraint(repeated, stages)

        return jax.tree.map(repeat, tree)

    def take(self, stacks: Sequence[Array], index: Array) -> list[Array]:
        """Return an entry of each stage's stacks: stack[n, p, ...] -> [p, ...]. Nothing is sent.

        Args:
          stacks: stacks whose dim 1 counts the stages.
          index: i32[p], index of the entry of each stage.
        """

        def read(stacks: list[Array], index: Array) -> list[Array]:
            return [jax.lax.dynamic_index_in_dim(a, index[0], keepdims=False) for a in stacks]

        specs = (PartitionSpec(None, PIPE), PartitionSpec(PIPE))
        return self._island(read, specs, PartitionSpec(PIPE))(list(stacks), index)

    def take_in_order(self, stack: Array, index: Array, spec: Spec) -> Array:
        """Return an entry of each stage's stack, which is row-major.

        Args:
          stack: array [n, p, ...].
          index: i32[p], index of the entry of each stage.
          spec: how an entry is split, without `pipe`.
        """

        def read(stack: Array, index: Array) -> Array:
            return _row_major(jax.lax.dynamic_index_in_dim(stack, index[0], keepdims=False))

        specs = (PartitionSpec(None, PIPE, *spec), PartitionSpec(PIPE))
        return self._whole_island(read, specs, PartitionSpec(PIPE, *spec))(stack, index)

    def put_in_order(
        self, stack: Array, index: Array, value: Array, is_used: Array, spec: Spec
    ) -> Array:
        """Write an entry of each stage's stack, which is row-major, in place; return the stack.

        Args:
          stack: array [n, p, ...].
          index: i32[p], index of the entry of each stage.
          value: the entries, [p, ...].
          is_used: bool[p], whether to write the entry of each stage.
          spec: how an entry is split, without `pipe`.
        """

        def write(stack: Array, index: Array, value: Array, is_used: Array) -> Array:
            old = jax.lax.dynamic_index_in_dim(stack, index[0])
            new = _row_major(jnp.where(is_used[0], value[None], old))
            return jax.lax.dynamic_update_index_in_dim(stack, new, index[0], 0)

        of_stack = PartitionSpec(None, PIPE, *spec)
        of_stages = PartitionSpec(PIPE)
        specs = (of_stack, of_stages, PartitionSpec(PIPE, *spec), of_stages)
        return self._whole_island(write, specs, of_stack)(stack, index, value, is_used)

    def pick(self, tree: Any, index: Array) -> Any:
        """Return an entry of arrays that all stages have, for each stage: a[n, ...] -> [p, ...].

        Args:
          tree: arrays that `pipe` does not split.
          index: i32[p], index of the entry of each stage.
        """

        def read(tree: Any, index: Array) -> Any:
            return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index[0]), tree)

        specs = (PartitionSpec(), PartitionSpec(PIPE))
        return self._island(read, specs, PartitionSpec(PIPE))(tree, index)

    def put(
        self, stacks: Sequence[Array], index: Array, values: Sequence[Array], is_used: Array
    ) -> list[Array]:
        """Write an entry of each stage's stacks in place, and return the stacks.

        Args:
          stacks: stacks [n, p, ...].
          index: i32[p], index of the entry of each stage.
          values: the entries, [p, ...].
          is_used: bool[p], whether to write the entry of each stage.
        """
        return self._write(stacks, index, values, is_used, 1, lambda old, new: new)

    def add(
        self,
        stacks: Sequence[Array],
        index: Array,
        values: Sequence[Array],
        is_used: Array,
        dim: int = 1,
    ) -> list[Array]:
        """Add to an entry of each stage's stacks in place, in their dtypes; return the stacks.

        Args:
          stacks: stacks [n, ..., p, ...].
          index: i32[p], index of the entry of each stage.
          values: the terms, without the dim n.
          is_used: bool[p], whether to add the term of each stage.
          dim: dim of the stacks that counts the stages.
        """
        add = lambda old, new: old + new.astype(old.dtype)  # noqa: E731
        return self._write(stacks, index, values, is_used, dim, add)

    def _write(
        self,
        stacks: Sequence[Array],
        index: Array,
        values: Sequence[Array],
        is_used: Array,
        dim: int,
        combine: Callable[[Array, Array], Array],
    ) -> list[Array]:
        def write(
            stacks: list[Array], index: Array, values: list[Array], is_used: Array
        ) -> list[Array]:
            written = list[Array]()
            for stack, value in zip(stacks, values, strict=True):
                old = jax.lax.dynamic_index_in_dim(stack, index[0])
                new = jnp.where(is_used[0], combine(old, value[None]), old)
                written.append(jax.lax.dynamic_update_index_in_dim(stack, new, index[0], 0))
            return written

        of_stack = PartitionSpec(*(None,) * dim, PIPE)
        of_value = PartitionSpec(*(None,) * (dim - 1), PIPE)
        specs = (of_stack, PartitionSpec(PIPE), of_value, PartitionSpec(PIPE))
        return self._island(write, specs, of_stack)(list(stacks), index, list(values), is_used)

    def send_up(self, tree: Any) -> Any:
        """Send each stage's arrays [p, ...] to the next stage, the last stage's to the first."""
        return self._send(tree, 1)

    def send_down(self, tree: Any) -> Any:
        """Send each stage's arrays [p, ...] to the one before, the first stage's to the last."""
        return self._send(tree, -1)

    def _send(self, tree: Any, offset: int) -> Any:
        pairs = [(stage, (stage + offset) % self.count) for stage in range(self.count)]

        def send(tree: Any) -> Any:
            return jax.tree.map(lambda a: jax.lax.ppermute(a, PIPE, pairs), tree)

        return self._island(send, PartitionSpec(PIPE), PartitionSpec(PIPE))(tree)

    def select(self, is_chosen: Array, chosen: Any, other: Any) -> Any:
        """Return, for each stage, `chosen` or `other`.

        Args:
          is_chosen: bool[p].
          chosen: arrays that all stages have, or [p, ...].
          other: arrays [p, ...].
        """

        def select(chosen: Array, other: Array) -> Array:
            flags = is_chosen.reshape(-1, *(1,) * (other.ndim - 1))
            return jnp.where(flags, chosen, other)

        return jax.tree.map(select, chosen, other)

    def _whole_island(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """Return a function of the arrays of each device: no axis is left to the partitioner."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _island(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={PIPE},
            check_vma=False,
        )


def _row_major(a: Array) -> Array:
    """Constrain an entry of a stack to be row-major, in an island over all axes.

    Otherwise XLA may choose the layout that a product reads or writes, and copy the full stack into
    it before each loop over layers. Elsewhere, the partitioner would gather an array with such a
    constraint.
    """
    return with_layout_constraint(a, Layout(tuple(range(a.ndim))))
