"""Fetch and store records inside a jitted program: small `shard_map`s around `buffer_callback`.

    values = fetch(token, layer)             disk -> buffer -> device
    token  = store(token, layer, values)     device -> buffer -> disk

Every device moves its own shard, W[D_fsdp, F], over its own link (bandwidth-centric partitioning,
ZeRO-Infinity, arXiv:2104.07857, 6.1). The token, i32[devices], orders the operations: it represents
the current records of a kind; a fetch takes it, and a store returns a new one. It holds the number
of the state to which it belongs. The first number of a state is random, and each step produces the
next number. So a state that is not the one on this disk is refused, whether it was overwritten,
copied, or belongs to another program.

A `Swap` connects programs, which are traced before a disk is in use, with an engine. A callback
never raises: an exception on one of several devices would leave the others waiting in a collective.
Instead it passes the error to the engine, whose `check` raises it after the step, and fills the
values with zeros.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_offload.calls import CallbackSite, Calls
from host_offload.device import Copies, build_copies
from host_offload.disk import LeafFormat, RecordFormat, SwapError
from host_offload.engine.engine import Engine

Array = jax.Array
T = TypeVar("T")
Lifetime = Literal["state", "step"]
"""How long records are valid: until the next state, or only within a step.

Records of a step are written in the step before they are read.
"""
User = Literal["program", "host", "both"]
"""What uses records: the program, which fetches and stores them; the host, which updates them in
their buffers; or both, when the host updates records that the program fetches."""


class Swap:
    """Connects the callbacks of a mesh's programs with an engine.

    Attributes:
      mesh: device mesh.
      engine: engine that moves the records; set before a program runs, None while compiling only.
      calls: callbacks of the mesh's programs.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Create a connection for a mesh, without an engine."""
        self.mesh = mesh
        self.engine: Engine | None = None
        self.calls = Calls(list(mesh.devices.flat))

    @property
    def generation(self) -> int:
        """Number of the state on disk; 0 if there is none."""
        return self.calls.number

    @generation.setter
    def generation(self, number: int) -> None:
        self.calls.number = number

    @functools.cached_property
    def copies(self) -> Copies:
        """Copies between buffers and the mesh's devices."""
        return build_copies(list(self.mesh.devices.flat))

    def on_fetch(
        self, context: Any, out: Any, request: Any, token: Any, *, kind: str, site: CallbackSite
    ) -> None:
        """Fetch a record: fill the callback's outputs with its leaves.

        Args:
          context: the callback's context.
          out: output buffers, one per leaf.
          request: i32[3]: rank, layer, and the state's number or 0.
          token: operand that orders the callbacks; not read.
          kind: kind of the record.
          site: site of the callback.
        """
        del token
        layer = None
        try:
            rank, layer, number = site.ask(context, request)
            engine = self.find_engine(number)
            engine.fetch(
                kind, rank, layer, lambda views: self.copies.load(context, kind, rank, views, out)
            )
        except BaseException as error:  # a callback must not raise: see the module's docstring
            self.fail(error, kind, layer)
            # The outputs are uninitialized. With zeros the program reaches the end of its step,
            # where `check` raises.
            self._try(lambda: self.copies.clear(context, out), kind)

    def on_store(
        self,
        context: Any,
        out: Any,
        request: Any,
        token: Any,
        *values: Any,
        kind: str,
        site: CallbackSite,
    ) -> None:
        """Store a record: write the values of its leaves.

        Args:
          context: the callback's context.
          out: output buffer for the next token.
          request: i32[3]: rank, layer, and the state's number or 0.
          token: token to pass on.
          *values: buffers of the leaves.
          kind: kind of the record.
          site: site of the callback.
        """
        asked = self._try(lambda: site.ask(context, request), kind)
        caller = None if asked is None else asked.rank
        # Pass the token on even after an error: later callbacks compare its number with the state
        # on disk. This calls the driver, so it precedes the store, which ends by waking a thread.
        self._try(lambda: self.copies.pass_on(context, caller, token, out), kind)
        if asked is None:
            return
        rank, layer, number = asked
        try:
            engine = self.find_engine(number)
            engine.store(
                kind,
                rank,
                layer,
                lambda views: self.copies.save(context, kind, rank, values, views),
            )
        except BaseException as error:  # a callback must not raise
            self.fail(error, kind, layer)

    def _try(self, call: Callable[[], T], kind: str) -> T | None:
        """Return `call()`, or None after an error."""
        try:
            return call()
        except BaseException as error:  # a callback must not raise
            self.fail(error, kind)
            return None

    def find_engine(self, number: int) -> Engine:
        """Return the engine for the records of a state.

        Args:
          number: number of the state; 0 for records that exist only within a step.

        Raises:
          SwapError: the records of this state are no longer on disk.
        """
        if self.engine is None:
            raise SwapError("the program is closed, and its records are gone")
        if number not in (0, self.generation):
            raise SwapError(
                f"records of state {number} were asked for, and those of state {self.generation} "
                "are on disk"
            )
        return self.engine

    def fail(self, error: BaseException, kind: str = "", layer: int | None = None) -> None:
        """Store an error, which the engine's `check` raises.

        Args:
          error: the error.
          kind: name of the record's kind, if known.
          layer: index of the record, if known.
        """
        if self.engine is not None:
            self.engine.fail(error, kind, layer)


@dataclasses.dataclass(frozen=True, eq=False)
class DiskRecords:
    """The records of one kind: one per layer and device, with the device's shards of the leaves.

    Attributes:
      swap: connection of the programs with their engine.
      kind: name of the kind and of its folder.
      num_layers: number of records per device.
      names: names of the leaves.
      shapes: unsharded shape and dtype of each leaf of one layer.
      specs: PartitionSpec of each leaf.
      lifetime: "state" if the records belong to a state, which must be the one on disk; "step" if
        they exist only within a step.
      used_by: what uses the records. Records used only by the host need no device memory.
      in_place: whether the host updates the records in the buffers into which they are read.
      in_turn: whether programs use all kinds with this flag one after the other, so that these
        kinds can share buffers.
      written_once: whether a state's records are never changed once written, such as frozen
        weights.
    """

    swap: Swap
    kind: str
    num_layers: int
    names: tuple[str, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[PartitionSpec, ...]
    lifetime: Lifetime = "state"
    used_by: User = "program"
    in_place: bool = False
    in_turn: bool = False
    written_once: bool = False

    @functools.cached_property
    def format(self) -> RecordFormat:
        """Names, shapes and dtypes of the shards in one device's record."""
        leaves = zip(self.names, self._local_shapes, strict=True)
        return RecordFormat(
            tuple(LeafFormat(name, tuple(a.shape), str(a.dtype)) for name, a in leaves)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes per record, on one device, padding included."""
        return self.format.padded_bytes

    @property
    def slots(self) -> tuple[bool, bool]:
        """Whether copies up run ahead of a program, and copies down behind it.

        Both are False for a kind with a single record, whose copies have nothing to overlap with.
        """
        is_fetched = self.used_by != "host"
        is_stored = self.used_by == "program"
        return is_fetched and self.num_layers > 1, is_stored and self.num_layers > 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of device memory per GPU for the slots; see `host_offload.device.copies`."""
        if self.swap.mesh.devices.flat[0].platform == "cpu":
            return 0
        return sum(self.slots) * self.num_bytes

    def can_share_files(self, other: "DiskRecords | None") -> bool:
        """Return whether another kind's files and buffers can also hold this kind's records.

        Args:
          other: the other kind, or None.
        """
        if other is None:
            return False
        return self.format == other.format and self.num_layers == other.num_layers

    @functools.cached_property
    def _local_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each leaf's shard on one device."""
        shardings = [NamedSharding(self.swap.mesh, spec) for spec in self.specs]
        return [
            jax.ShapeDtypeStruct(s.shard_shape(tuple(a.shape)), a.dtype)
            for s, a in zip(shardings, self.shapes, strict=True)
        ]

    def first_token(self) -> Array:
        """Return the token, i32[devices], for records that a step writes before it reads them."""
        return jnp.zeros(self.swap.mesh.size, jnp.int32)

    def fetch(self, token: Array, layer: Array) -> list[Array]:
        """Return one layer's leaves, sharded by `specs`.

        Args:
          token: i32[devices], current token of the kind.
          layer: i32[], index of the record.
        """
        all_axes = PartitionSpec(self.swap.mesh.axis_names)

        def local(position: Array, token: Array, layer: Array) -> list[Array]:
            callback = functools.partial(
                self.swap.on_fetch, kind=self.kind, site=self._site("fetch")
            )
            request = self._request(position, token, layer)
            # Without a side effect XLA may merge two fetches with the same operands, or remove a
            # fetch whose values are not used.
            return buffer_callback(callback, self._local_shapes, has_side_effect=True)(
                request, token
            )

        # Inside of shard_map a callback runs once per device, on that device's shards.
        island = jax.shard_map(
            local,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(all_axes, all_axes, PartitionSpec()),
            out_specs=list(self.specs),
            check_vma=False,
        )
        return island(self._positions(), token, layer)

    def store(self, token: Array, layer: Array, values: Sequence[Array]) -> Array:
        """Write one layer's leaves, and return the next token, i32[devices].

        Args:
          token: i32[devices], current token of the kind.
          layer: i32[], index of the record.
          values: leaves of the layer, cast to the record's dtypes here.
        """
        all_axes = PartitionSpec(self.swap.mesh.axis_names)

        def local(position: Array, token: Array, layer: Array, values: list[Array]) -> Array:
            callback = functools.partial(
                self.swap.on_store, kind=self.kind, site=self._site("store")
            )
            after = jax.ShapeDtypeStruct((1,), jnp.int32)
            request = self._request(position, token, layer)
            return buffer_callback(callback, after, has_side_effect=True)(request, token, *values)

        island = jax.shard_map(
            local,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(all_axes, all_axes, PartitionSpec(), list(self.specs)),
            out_specs=all_axes,
            check_vma=False,
        )
        values = [v.astype(a.dtype) for v, a in zip(values, self.shapes, strict=True)]
        return island(self._positions(), token, layer, values)

    def _request(self, position: Array, token: Array, layer: Array) -> Array:
        number = token if self.lifetime == "state" else jnp.zeros_like(token)
        return Calls.request(position, layer, number)

    def _site(self, verb: str) -> CallbackSite:
        return CallbackSite(
            self.swap.calls, f"{verb} {self.kind}", of_state=self.lifetime == "state"
        )

    def _positions(self) -> Array:
        # Sharded over all axes, so that each device's single element is its own position.
        return jnp.arange(self.swap.mesh.size, dtype=jnp.int32)
