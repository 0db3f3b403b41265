"""Tokens to their experts and back, over the mesh: two all_to_alls over `expert`.

    x[B_(data, fsdp, expert), T_context, H]
    -> cells[E, C, H] on each device                                  a look-up (`cells`)
    -> cells[R_(data, fsdp, context), E_expert, e C, H]               all_to_all over `expert`
    -> y[R_(data, fsdp, context), E_expert, e C, F] ..                the experts, outside
    -> y[E, C, H] on each device                                      all_to_all over `expert`
    -> pairs[B_(data, fsdp, expert), T_context, k, H]                 a look-up

R counts the groups of e devices that exchange tokens. In between, cells are a global array, and a
product with weights W[E_expert, H, F_tensor] is an ordinary product of the partitioner: batch dim
E, so nothing is gathered over `expert`; F over `tensor`; and the weight's gradient is a sum over R,
which is reduce-scattered to the shards over `fsdp` and `context` like that of any weight. A product
inside of the island would leave that sum to the shard_map's transpose, which makes an all_reduce.

The two moves are linear, and each one's derivative is the other one with the same indices. So the
derivative needs no value that was sent, and backward sends cotangents only.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.experts.cells import (
    Seats,
    assign_cells,
    count_cells,
    fill_cells,
    fill_cells_with_pairs,
    pick_cells,
)
from zerojax.experts.routing import choose_experts
from zerojax.sharding import AXES, CONTEXT, EXPERT, TENSOR, batch_axes, check_automatic

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange of tokens between devices.

    Attributes:
      mesh: the mesh in scope; None: the arrays are one device's.
      num_experts: number of experts E.
      top_k: number of experts k of a token.
      capacity_factor: cells per pair of a token and an expert, or None.
    """

    mesh: Any
    num_experts: int
    top_k: int
    capacity_factor: float | None

    @property
    def rows(self) -> tuple[str, ...]:
        """Axes that split the rows B of the tokens."""
        return () if self.mesh is None else batch_axes(self.mesh)

    @property
    def context(self) -> tuple[str, ...]:
        """Axes that split the tokens T of a row."""
        return () if self.mesh is None or CONTEXT not in self.mesh.axis_names else (CONTEXT,)

    @property
    def num_groups(self) -> int:
        """R, the number of groups of devices that exchange tokens."""
        return self._size(self._groups)

    @property
    def num_members(self) -> int:
        """e, the number of devices of a group."""
        return 1 if self.mesh is None else self.mesh.shape.get(EXPERT, 1)

    def pad(self, a: Array, value: float) -> Array:
        """Return an array [B, T, ..] whose rows and tokens divide by the devices.

        Args:
          a: the array.
          value: what is added at the end of the rows and of each row.
        """
        missing = [-a.shape[0] % self._size(self.rows), -a.shape[1] % self._size(self.context)]
        if not any(missing):
            return a
        widths = [(0, n) for n in missing] + [(0, 0)] * (a.ndim - 2)
        return jnp.pad(a, widths, constant_values=value)

    def choose(self, ranks: Array) -> Array:
        """Return the experts of each token, i32[B, T, k], without cells for them.

        Args:
          ranks: f32[B, T, E], padded by -inf.
        """
        choose = functools.partial(choose_experts, top_k=self.top_k)
        run = self._island(choose, (self._token_spec,), self._token_spec)
        return run(jax.lax.stop_gradient(ranks))

    @property
    def num_devices(self) -> int:
        """Number of devices that have tokens of their own."""
        return self._size(self.rows) * self._size(self.context)

    def keeps_tokens(self, x: Array) -> bool:
        """Return whether tokens can stay where they are: each device has all experts in full.

        `expert` and `tensor` split experts. Under a caller's `jax.shard_map`, other axes may be
        left to the partitioner; and with `check_vma`, gradients of what devices share would have
        to be summed here.

        Args:
          x: tokens.
        """
        if self.mesh is not None:
            return self.num_members == 1 and self.mesh.shape.get(TENSOR, 1) == 1
        if getattr(jax.typeof(x), "vma", ()):
            return False
        mesh: Any = jax.sharding.get_abstract_mesh()
        manual = getattr(mesh, "manual_axes", ())
        return mesh.empty or all(n == 1 or axis in manual for axis, n in mesh.shape.items())

    def map_tokens(
        self, local: Callable[[Any, Any], Any], tokens: Sequence[Array], shared: Any
    ) -> tuple[Any, Any]:
        """Return what a function makes of each device's tokens.

        Args:
          local: function of a device's tokens and of shared arrays; it returns arrays of tokens,
            and arrays that are summed over the devices.
          tokens: padded arrays [B, T, ..].
          shared: arrays that every device has in full.
        """
        if self.mesh is None:
            return local(tokens, shared)

        def run(tokens: Any, shared: Any) -> Any:
            of_tokens, of_device = local(tokens, shared)
            return of_tokens, jax.tree.map(lambda a: a[None], of_device)

        ins = (self._token_spec, PartitionSpec())
        outs = (self._token_spec, self._device_spec)
        of_tokens, of_devices = self._island(run, ins, outs)(tuple(tokens), shared)
        return of_tokens, jax.tree.map(lambda a: jnp.sum(a, 0), of_devices)

    def assign(self, ranks: Array) -> Seats:
        """Return where each token goes.

        Args:
          ranks: f32[B, T, E], padded by -inf.

        Returns:
          Seats whose arrays are [B, T, k], [B, T, k] and [D, E C] for D devices; they count the
          tokens and cells of each device.
        """
        capacity = self._count_cells(ranks)

        def local(p: Array) -> tuple[Array, ...]:
            tokens = p.reshape(-1, p.shape[-1])
            seats = assign_cells(tokens, self.top_k, capacity)
            by_token = (*p.shape[:2], self.top_k)
            return seats.chosen.reshape(by_token), seats.cells.reshape(by_token), seats.pairs[None]

        specs = (self._token_spec, self._token_spec, self._device_spec)
        run = self._island(local, (self._token_spec,), specs)
        # The choice has no derivative.
        return Seats(*run(jax.lax.stop_gradient(ranks)))

    def send(self, x: Array, seats: Seats) -> Array:
        """Return the cells with their tokens, on the devices of their experts.

            x[B, T, H] -> cells[R, E, e C, H]

        Args:
          x: padded tokens.
          seats: where they go.
        """

        @jax.custom_vjp
        def run(x: Array, cells: Array, pairs: Array) -> Array:
            del cells
            return self._send(lambda x, pairs: fill_cells(x, pairs, self.top_k), x, pairs)

        def forward(x: Array, cells: Array, pairs: Array) -> tuple[Array, Array]:
            return run(x, cells, pairs), cells

        def backward(cells: Array, d_filled: Array) -> tuple[Array, None, None]:
            # A token's cotangent is the sum over its cells.
            def pick(filled: Array, cells: Array) -> Array:
                picked = pick_cells(filled, cells)
                return jnp.sum(picked, -2, dtype=jnp.float32).astype(picked.dtype)

            return self._receive(pick, d_filled, cells), None, None

        run.defvjp(forward, backward)
        return run(x, seats.cells, seats.pairs)

    def receive(self, filled: Array, seats: Seats) -> Array:
        """Return what the experts made of each token, on the token's device.

            filled[R, E, e C, H] -> pairs[B, T, k, H], 0 for a dropped pair

        Args:
          filled: results of the experts.
          seats: where the tokens went.
        """

        @jax.custom_vjp
        def run(filled: Array, cells: Array, pairs: Array) -> Array:
            del pairs
            return self._receive(pick_cells, filled, cells)

        def forward(filled: Array, cells: Array, pairs: Array) -> tuple[Array, Array]:
            return run(filled, cells, pairs), pairs

        def backward(pairs: Array, d_picked: Array) -> tuple[Array, None, None]:
            return self._send(fill_cells_with_pairs, d_picked, pairs), None, None

        run.defvjp(forward, backward)
        return run(filled, seats.cells, seats.pairs)

    def constrain(self, filled: Array) -> Array:
        """Return an array [R, E, e C, H] split like the cells, with H unsplit."""
        if self.mesh is None:
            return filled
        return jax.lax.with_sharding_constraint(filled, self._filled_spec)

    def _send(self, fill: Callable[[Array, Array], Array], values: Array, pairs: Array) -> Array:
        """Return cells at their experts, filled by a function of the values and the pairs."""

        def local(values: Array, pairs: Array) -> Array:
            flat = values.reshape(-1, *values.shape[2:])  # [n, ..]
            filled = fill(flat, pairs[0]).reshape(self.num_experts, -1, values.shape[-1])
            if self.num_members > 1:
                filled = jax.lax.all_to_all(filled, EXPERT, 0, 1, tiled=True)  # [E / e, e C, H]
            return filled[None]

        specs = (self._token_spec, self._device_spec)
        return self.constrain(self._island(local, specs, self._filled_spec)(values, pairs))

    def _receive(self, pick: Callable[[Array, Array], Array], filled: Array, cells: Array) -> Array:
        """Return values of tokens, picked by a function of the device's cells and their indices."""

        def local(filled: Array, cells: Array) -> Array:
            back = filled[0]
            if self.num_members > 1:
                back = jax.lax.all_to_all(back, EXPERT, 1, 0, tiled=True)  # [E, C, H]
            return pick(back.reshape(-1, back.shape[-1]), cells)

        specs = (self._filled_spec, self._token_spec)
        filled = self.constrain(filled)
        return self._island(local, specs, self._token_spec)(filled, cells)

    def _count_cells(self, tokens: Array) -> int:
        """Return C for padded tokens [B, T, ..] of all devices."""
        num_tokens = tokens.shape[0] * tokens.shape[1] // self.num_devices
        return count_cells(num_tokens, self.num_experts, self.top_k, self.capacity_factor)

    def _island(self, local: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        """Return a function of global arrays, given its computation on one device.

        `tensor` is left to the partitioner.
        """
        if self.mesh is None:
            return local
        # An axis of one device is manual too: XLA then need not distinguish kinds of axes.
        is_split = self.mesh.shape.get(TENSOR, 1) > 1
        manual = {axis for axis in self.mesh.axis_names if axis != TENSOR or not is_split}
        return jax.shard_map(
            local, in_specs=ins, out_specs=outs, axis_names=manual, check_vma=False
        )

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def _groups(self) -> tuple[str, ...]:
        """Axes over which groups of devices exchange tokens separately."""
        return tuple(axis for axis in (*self.rows, *self.context) if axis != EXPERT)

    @property
    def _token_spec(self) -> PartitionSpec:
        """Spec of arrays [B, T, ..]."""
        return PartitionSpec(self.rows, self.context)

    @property
    def _device_spec(self) -> PartitionSpec:
        """Spec of arrays whose dim 0 counts devices."""
        return PartitionSpec((*self.rows, *self.context))

    @property
    def _filled_spec(self) -> PartitionSpec:
        """Spec of cells [R, E, e C, H] at their experts."""
        experts = EXPERT if self.num_members > 1 else None
        return PartitionSpec(self._groups, experts, None, None)


def find_exchange(num_experts: int, top_k: int, capacity_factor: float | None) -> Exchange:
    """Return the exchange over the mesh in scope.

    Under `jax.shard_map`, whose axes are manual, arrays are already one device's.

    Args:
      num_experts: number of experts E.
      top_k: number of experts k of a token.
      capacity_factor: cells per pair of a token and an expert, or None.

    Raises:
      ValueError: the experts do not divide by the devices along `expert`, or the mesh has explicit
        axes.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    is_split = not mesh.empty and any(
        mesh.shape.get(axis, 1) > 1 for axis in AXES if axis != TENSOR
    )
    if not is_split or getattr(mesh, "manual_axes", ()):
        return Exchange(None, num_experts, top_k, capacity_factor)
    check_automatic("moe", mesh)
    members = mesh.shape.get(EXPERT, 1)
    if num_experts % members:
        noun = "expert does" if num_experts == 1 else "experts do"
        fitting = "expert=1" if num_experts == 1 else f"a divisor of {num_experts} as expert"
        raise ValueError(
            f"moe: {num_experts} {noun} not divide by the mesh's expert={members}: choose "
            f"{fitting}, or {-(-num_experts // members) * members} experts"
        )
    return Exchange(mesh, num_experts, top_k, capacity_factor)
