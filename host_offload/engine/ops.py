"""Fetch and store of records inside a jitted program: small `shard_map` islands around
`buffer_callback`.

    values = fetch(token, layer)             disk -> buffer -> device     each device its own shard: W[D_fsdp, F]
    token  = store(token, layer, values)     device -> buffer -> disk

Every device moves its own shard over its own link (bandwidth-centric partitioning, ZeRO-Infinity,
arXiv:2104.07857, 6.1). The token, i32[devices], orders the operations: it stands for the present
records of a kind, a store returns a new one, and a fetch takes one. It holds the number of the
state that it belongs to. The first number of a state is random, and each step makes the next one. A
state that is not the one on this disk is refused: an overwritten one, a copy, or that of another
program.

A `Swap` connects programs, which are traced before there is a disk, with an engine. A callback
never raises: an exception in one of several devices would leave the others waiting in a collective.
It hands the error to the engine, whose `check` raises it after the step, and fills the values with
zeros.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_offload.calls import Calls, Site
from host_offload.device import Copies, copies_of
from host_offload.disk import LeafFormat, RecordFormat, SwapError
from host_offload.engine.engine import Engine

Array = jax.Array
T = TypeVar("T")
Lifetime = Literal["state", "step"]
"""Records of a state are valid until the next state.

Those of a step are written in it before they are read.
"""
User = Literal["program", "host", "both"]
"""Who uses records: the program, which fetches and stores them; the host, in their buffers; or
both: the host updates what the program fetches."""


class Swap:
    """The engine of a mesh, for the callbacks of its programs.

    Attributes:
      mesh: the device mesh.
      engine: set before a program runs; a program that is only compiled has none.
      calls: of the programs.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.engine: Engine | None = None
        self.calls = Calls(list(mesh.devices.flat))

    @property
    def generation(self) -> int:
        """Number of the state that is on disk; 0 where there is none."""
        return self.calls.number

    @generation.setter
    def generation(self, number: int) -> None:
        self.calls.number = number

    @functools.cached_property
    def copies(self) -> Copies:
        """How records cross to the devices."""
        return copies_of(list(self.mesh.devices.flat))

    def on_fetch(
        self, context: Any, out: Any, where: Any, token: Any, *, kind: str, site: Site
    ) -> None:
        """Fill the leaves of a record.

        Args:
          context: of the callback.
          out: the leaves.
          where: i32[3], device, layer, and the state's number or 0.
          token: orders callbacks.
          kind: of the record.
          site: the callback's.
        """
        del token
        layer = None
        try:
            rank, layer, number = site.ask(context, where)
            engine = self.engine_of(number)
            engine.fetch(
                kind, rank, layer, lambda views: self.copies.load(context, kind, rank, views, out)
            )
        except BaseException as error:  # a callback must not raise: see the module's docstring
            self.fail(error, kind, layer)
            # The outputs are uninitialized memory. Zeros let the program reach the end of its step,
            # where `check` raises.
            self._try(lambda: self.copies.clear(context, out), kind)

    def on_store(
        self, context: Any, out: Any, where: Any, token: Any, *values: Any, kind: str, site: Site
    ) -> None:
        """Take the leaves of a record; `out` is the next token."""
        asked = self._try(lambda: site.ask(context, where), kind)
        # After an error too: later callbacks compare the number in the token with the state on
        # disk. Before the store, since it calls the driver, and a store ends by waking a thread.
        self._try(
            lambda: self.copies.pass_on(context, None if asked is None else asked[0], token, out),
            kind,
        )
        if asked is None:
            return
        rank, layer, number = asked
        try:
            engine = self.engine_of(number)
            engine.store(
                kind,
                rank,
                layer,
                lambda views: self.copies.save(context, kind, rank, values, views),
            )
        except BaseException as error:  # as above
            self.fail(error, kind, layer)

    def _try(self, call: Callable[[], T], kind: str) -> T | None:
        """Return `call()`, or None after an error."""
        try:
            return call()
        except BaseException as error:  # as above
            self.fail(error, kind)
            return None

    def engine_of(self, number: int) -> Engine:
        """Return the engine for the records of a state; number 0 is for records of a step.

        Raises:
          SwapError: these records are not on disk any more.
        """
        if self.engine is None:
            raise SwapError("the program is closed, and its records are gone")
        if number not in (0, self.generation):
            raise SwapError(
                f"records of state {number} were asked for, and those of state {self.generation} are on disk"
            )
        return self.engine

    def fail(self, error: BaseException, kind: str = "", layer: int | None = None) -> None:
        """Store an error for the engine's `check`."""
        if self.engine is not None:
            self.engine.fail(error, kind, layer)


@dataclasses.dataclass(frozen=True, eq=False)
class DiskRecords:
    """The records of one kind: one for each layer and device, holding the device's shards of
    several leaves.

    Attributes:
      swap: of the program.
      kind: name of the folder.
      num_layers: records on each device.
      names: of the leaves.
      shapes: ShapeDtypeStruct of each leaf of one layer, whole.
      specs: PartitionSpec of each.
      lifetime: "state" if a state must be the one on disk for a program to work on them.
      used_by: who uses them. Records of the host alone need no memory on a device.
      in_place: whether the host updates them in the buffers into which they are read.
      in_turn: whether programs use all kinds with this flag one after the other, so that these can
        share buffers.
      written_once: whether a state's records stay as they were first written, as frozen weights do.
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
        """Names, shapes and dtypes of the shards in a record of one device."""
        leaves = zip(self.names, self._local_shapes, strict=True)
        return RecordFormat(
            tuple(LeafFormat(name, tuple(a.shape), str(a.dtype)) for name, a in leaves)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of one device's record, padding included."""
        return self.format.padded_bytes

    @property
    def slots(self) -> tuple[bool, bool]:
        """Whether copies up run ahead of a program, and copies down behind it: a kind of one record
        has nothing to overlap.
        """
        is_fetched, is_stored = self.used_by != "host", self.used_by == "program"
        return is_fetched and self.num_layers > 1, is_stored and self.num_layers > 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of device memory that the slots take on a GPU; see `host_offload.device.copies`."""
        return (
            0
            if self.swap.mesh.devices.flat[0].platform == "cpu"
            else sum(self.slots) * self.num_bytes
        )

    def has_files_of(self, other: "DiskRecords | None") -> bool:
        """Tell whether the files and buffers of another kind serve this one."""
        return other is not None and (self.format, self.num_layers) == (
            other.format,
            other.num_layers,
        )

    @functools.cached_property
    def _local_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shard of each leaf on one device."""
        shardings = [NamedSharding(self.swap.mesh, spec) for spec in self.specs]
        return [
            jax.ShapeDtypeStruct(s.shard_shape(tuple(a.shape)), a.dtype)
            for s, a in zip(shardings, self.shapes, strict=True)
        ]

    def first_token(self) -> Array:
        """Return the token of records that a step writes before it reads them."""
        return jnp.zeros(self.swap.mesh.size, jnp.int32)

    def fetch(self, token: Array, layer: Array) -> list[Array]:
        """Return one layer's leaves, sharded as `specs` say.

        Args:
          token: i32[devices].
          layer: i32[].
        """
        every = PartitionSpec(self.swap.mesh.axis_names)

        def local(position: Array, token: Array, layer: Array) -> list[Array]:
            callback = functools.partial(
                self.swap.on_fetch, kind=self.kind, site=self._site("fetch")
            )
            where = self._where(position, token, layer)
            # Without a side effect XLA may merge two fetches of the same operands, or remove one
            # whose values are not used.
            return buffer_callback(callback, self._local_shapes, has_side_effect=True)(where, token)

        # Inside of shard_map a callback runs once for each device, on what that device holds.
        island = jax.shard_map(
            local,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(every, every, PartitionSpec()),
            out_specs=list(self.specs),
            check_vma=False,
        )
        return island(self._positions(), token, layer)

    def store(self, token: Array, layer: Array, values: Sequence[Array]) -> Array:
        """Write one layer's leaves; returns the next token."""
        every = PartitionSpec(self.swap.mesh.axis_names)

        def local(position: Array, token: Array, layer: Array, values: list[Array]) -> Array:
            callback = functools.partial(
                self.swap.on_store, kind=self.kind, site=self._site("store")
            )
            after = jax.ShapeDtypeStruct((1,), jnp.int32)
            where = self._where(position, token, layer)
            return buffer_callback(callback, after, has_side_effect=True)(where, token, *values)

        island = jax.shard_map(
            local,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(every, every, PartitionSpec(), list(self.specs)),
            out_specs=every,
            check_vma=False,
        )
        values = [v.astype(a.dtype) for v, a in zip(values, self.shapes, strict=True)]
        return island(self._positions(), token, layer, values)

    def _where(self, position: Array, token: Array, layer: Array) -> Array:
        return Calls.where(
            position, layer, token if self.lifetime == "state" else jnp.zeros_like(token)
        )

    def _site(self, verb: str) -> Site:
        return Site(self.swap.calls, f"{verb} {self.kind}", of_state=self.lifetime == "state")

    def _positions(self) -> Array:
        # Sharded over all axes, so that each device finds its own position in its one element.
        return jnp.arange(self.swap.mesh.size, dtype=jnp.int32)
