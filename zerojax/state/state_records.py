"""How each leaf of a program's state is stored, and how its records are read and written.

A record is the unit that moves: one layer of all leaves in `Layout.blocks`, one tile of a group, or
one other leaf. Its parameters are one kind of record. Its float32 masters, if any, and its
optimizer state together are another kind, because an update reads and writes them together:

    kind            records   holds
    params          L         the blocks' parameters of a layer
    params.<group>  L T       a group's parameters of a tile
    params.<i>      1         parameter leaf i
    params.<stack>  L         the blocks' parameters of a layer, if the model has several stacks
    grads           L         the blocks' gradients of a layer, from backward to their update
    opt_state...    same      masters, then the optimizer state leaves that mirror the parameters
    frozen...       same      frozen parameters of the same layer, tile or leaf; only read

Nothing here depends on the optimizer's rule. The only thing used from an optimizer is the parameter
that each leaf of its state mirrors (`OptStateMap`), so checkpoints, init, reading and byte counts
need no optimizer.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.device import one_trip
from host_offload.engine import Lifetime, User
from zerojax.config import resolve_activations
from zerojax.ordering import wait_for
from zerojax.sharding import STAGES, stored_spec
from zerojax.state.disk_layout import DiskLayout
from zerojax.state.host_memory import crosses_link
from zerojax.state.layout import Layout
from zerojax.state.records import Index, RecordSpec, pick, read_layer, store_leaves, write_layer
from zerojax.state.train_state import OnDisk, TrainState, is_stored
from zerojax.trees import OptState, Params

Array = jax.Array
logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True, eq=False)
class FlatState:
    """The leaves of a TrainState that an update reads and writes, as flat lists.

    A Split is one leaf.

    Attributes:
      params: compute-dtype parameters.
      master: float32 masters, or None if the parameters are their own masters.
      opt: leaves of the optimizer state.
    """

    params: list[Any]
    master: list[Any] | None
    opt: list[Any]


jax.tree_util.register_dataclass(FlatState, data_fields=["params", "master", "opt"], meta_fields=[])


@dataclasses.dataclass(frozen=True)
class _Member:
    """A leaf in the records of one kind on disk.

    Attributes:
      specs: the list that holds the leaf's RecordSpec, in StateRecords.
      index: position of the RecordSpec in `specs`.
      name: path of the leaf.
      shape: shape and dtype of one record of the leaf.
    """

    specs: list[Any]
    index: int
    name: str
    shape: jax.ShapeDtypeStruct


class StateRecords:
    """How the leaves of a program's state are stored.

    Attributes:
      layout: layout of the program's state.
      leaves: the trainable parameter leaves of the layout.
      opt_map: the parameter leaf that owns each optimizer state leaf, from the layout.
      params: how a record of each parameter leaf is stored, by leaf index.
      master: how a record of each float32 weight is stored, by leaf index; the weights are the
        parameters if there are no masters.
      grads: the shards, on the device, on which each leaf is updated, by leaf index.
      stored_grads: how a record of each gradient is stored from backward to the update, by leaf
        index.
      opt: how a record of each optimizer state leaf is stored; None for leaves that belong to no
        parameter.
      frozen: how a record of each frozen parameter is stored, in the order of `Layout.frozen`.
    """

    def __init__(self, layout: Layout) -> None:
        """Choose how each leaf is stored, and declare the records on disk."""
        self.layout = layout
        self.mesh = layout.mesh
        self.leaves = layout.leaves
        self.opt_map = layout.opt_map
        config = layout.config
        stage = STAGES[layout.config.stage]

        def records(sharded: bool, tier: str) -> list[RecordSpec]:
            return [
                RecordSpec(self.mesh, stored_spec(leaf.spec, sharded)[leaf.lead :], tier)
                for leaf in self.leaves
            ]

        self.params = records(stage.params, config.params)
        self.master = records(
            stage.opt_state, config.opt_state if layout.has_master else config.params
        )
        self.grads = records(stage.opt_state, "device")
        specs = [stored_spec(spec, stage.opt_state) for spec in layout.opt_specs]
        self.opt: list[RecordSpec | None] = []
        for spec, owner in zip(specs, self.opt_map.owners, strict=True):
            record = None
            if owner is not None:
                record_spec = spec[self.leaves[owner].lead :]
                record = RecordSpec(self.mesh, record_spec, config.opt_state)
            self.opt.append(record)
        self.frozen = [
            RecordSpec(
                self.mesh, stored_spec(leaf.spec, stage.params)[leaf.lead :], layout.frozen_tier
            )
            for leaf in layout.frozen
        ]
        if (
            config.opt_state != "device"
            and not layout.has_master
            and len(self.opt_map.shared) == len(self.opt)
        ):
            logger.warning(
                "opt_state=%r keeps nothing there: this optimizer has no state that mirrors a "
                "parameter, and with precision=%r the parameters are their own masters",
                config.opt_state,
                config.precision,
            )
        self.stored_grads = self._store_grads()
        if layout.disk is not None:
            if config.grads == "nvme" and config.update != "in_backward":
                self._declare_grads(layout.disk)
            self._declare_params(layout.disk)
            self._declare_opt_state(layout.disk)
            self._declare_frozen(layout.disk)

    @functools.cached_property
    def slices_host(self) -> bool:
        """Whether some records are slices of host memory."""
        config = self.layout.config
        tiers = (
            config.params,
            config.grads,
            config.opt_state,
            *resolve_activations(config),
            self.layout.frozen_tier,
        )
        return "pinned_host" in tiers

    @property
    def both_ways(self) -> bool:
        """Whether records cross a host link that loads and stores at the same time."""
        return self.slices_host and crosses_link(self.mesh)

    @property
    def grads_tier(self) -> str:
        """The tier from which the program reads the stacked leaves' gradients."""
        config = self.layout.config
        if config.update_on != "host":
            return config.grads
        # The loops keep gradients on the device, and callbacks stash them. The program reads a
        # pending update's gradients only to evaluate.
        return config.opt_state if config.update == "in_forward" else "device"

    def _store_grads(self) -> list[RecordSpec]:
        """Return how each gradient is stored from backward to the update, as if not on disk."""
        # Gradients of embedding and head stay on the device, since both add to them.
        return [
            dataclasses.replace(record, tier=self.grads_tier if leaf.is_stacked else "device")
            for record, leaf in zip(self.grads, self.leaves, strict=True)
        ]

    # --- on disk ----------------------------------------------------------------------------------

    def _declare_grads(self, disk: DiskLayout) -> None:
        layout = self.layout
        # An update in forward leaves its gradients to the next step, so they are part of the state.
        lifetime: Lifetime = "state" if layout.config.update == "in_forward" else "step"
        on_host = layout.config.update_on == "host"

        def declare(kind: str, count: int, leaf_ids: Sequence[int]) -> None:
            if not leaf_ids:  # all leaves are frozen
                return
            shapes = [
                jax.ShapeDtypeStruct(self.leaves[i].record_shape, layout.grad_dtype(i))
                for i in leaf_ids
            ]
            disk_records = disk.declare(
                kind,
                count,
                [self.leaves[i].name for i in leaf_ids],
                shapes,
                [self.stored_grads[i].spec for i in leaf_ids],
                lifetime=lifetime,
                used_by="host" if on_host else "program",
            )
            for place, i in enumerate(leaf_ids):
                stored = self.stored_grads[i]
                self.stored_grads[i] = dataclasses.replace(
                    stored, disk_records=disk_records, leaf=place
                )

        for stack in layout.stacks:
            declare(stack.kind("grads"), stack.num_layers, stack.blocks)
            for group in stack.groups:
                declare(group.kind("grads"), stack.num_layers * group.num_tiles, group.leaves)

    def _declare_params(self, disk: DiskLayout) -> None:
        if self.layout.config.params != "nvme":
            return
        # With masters, an update on the host works on them, and overwrites the parameters.
        updated = not self.layout.has_master

        def declare(kind: str, count: int, leaf_ids: Sequence[int]) -> None:
            members = [self._weight(self.params, i, self.leaves[i].dtype) for i in leaf_ids]
            self._declare(disk, kind, count, members, updated=updated)

        for stack in self.layout.stacks:
            declare(stack.kind("params"), stack.num_layers, stack.blocks)
            for group in stack.groups:
                declare(group.kind("params"), stack.num_layers * group.num_tiles, group.leaves)
        for i in self.layout.unstacked:
            declare(f"params.{i}", 1, (i,))

    def _declare_opt_state(self, disk: DiskLayout) -> None:
        if self.layout.config.opt_state != "nvme":
            return

        def declare(kind: str, count: int, leaf_ids: Sequence[int], in_turn: bool = False) -> None:
            members = []
            if self.layout.has_master:
                members += [self._weight(self.master, i, jnp.float32) for i in leaf_ids]
            members += [self._moment(j) for j in self.opt_map.list_state_leaves(leaf_ids)]
            self._declare(disk, kind, count, members, in_turn=in_turn)

        for stack in self.layout.stacks:
            # Layers whose state stays on the device have no record.
            declare(stack.kind("opt_state"), stack.num_layers - stack.device_layers, stack.blocks)
            for group in stack.groups:
                declare(group.kind("opt_state"), stack.num_layers * group.num_tiles, group.leaves)
        for i in self.layout.unstacked:
            declare(f"opt_state.{i}", 1, (i,), in_turn=True)

    def _declare_frozen(self, disk: DiskLayout) -> None:
        if self.layout.frozen_tier != "nvme":
            return
        num_trained = len(self.leaves)

        def declare(kind: str, count: int, leaf_ids: Sequence[int]) -> None:
            members = []
            for i in leaf_ids:
                leaf = self.layout.all_leaves[i]
                shape = jax.ShapeDtypeStruct(leaf.record_shape, leaf.dtype)
                members.append(_Member(self.frozen, i - num_trained, leaf.name, shape))
            self._declare(disk, kind, count, members, updated=False)

        for stack in self.layout.stacks:
            declare(stack.kind("frozen"), stack.num_layers, stack.frozen_blocks)
            for group in stack.groups:
                declare(group.kind("frozen"), stack.num_layers * group.num_tiles, group.frozen)
        for i in self.layout.frozen_unstacked:
            declare(f"frozen.{i}", 1, (i,))

    def _weight(self, specs: list[Any], index: int, dtype: Any) -> _Member:
        leaf = self.leaves[index]
        return _Member(specs, index, leaf.name, jax.ShapeDtypeStruct(leaf.record_shape, dtype))

    def _moment(self, index: int) -> _Member:
        leaf = self.opt_map.leaves[index]
        lead = self.leaves[self.opt_map.owner(index)].lead
        shape = jax.ShapeDtypeStruct(leaf.shape[lead:], leaf.dtype)
        return _Member(self.opt, index, self.opt_map.names[index], shape)

    def _declare(
        self,
        disk: DiskLayout,
        kind: str,
        count: int,
        members: Sequence[_Member],
        *,
        updated: bool = True,
        in_turn: bool = False,
    ) -> None:
        """Declare a kind of records, and add them to the specs of its members.

        Args:
          disk: the layout of the nvme tier.
          kind: name of the kind.
          count: number of records.
          members: leaves of each record; a kind without leaves is not declared.
          updated: whether an update on the host works on the records in place.
          in_turn: whether all kinds declared so are used one after the other.
        """
        if not members:
            return
        on_host = self.layout.config.update_on == "host"
        # With an update on the host, only the host uses masters and moments. It also writes the
        # parameters, which programs fetch. Frozen parameters are never written, so the host does
        # not touch them.
        is_frozen = kind.split(".")[0] == "frozen"
        used_by: User = "host"
        if is_frozen or not on_host:
            used_by = "program"
        elif kind.startswith("params"):
            used_by = "both"

        specs = [member.specs[member.index] for member in members]
        disk_records = disk.declare(
            kind,
            count,
            [member.name for member in members],
            [member.shape for member in members],
            [r.spec for r in specs],
            used_by=used_by,
            in_place=on_host and updated,
            in_turn=in_turn,
            written_once=is_frozen,
        )
        for position, (member, spec) in enumerate(zip(members, specs, strict=True)):
            stored = dataclasses.replace(spec, disk_records=disk_records, leaf=position)
            member.specs[member.index] = stored

    def weight(self, index: int) -> RecordSpec:
        """Return how a parameter leaf, trainable or frozen, is stored.

        Args:
          index: index of the leaf in `Layout.all_leaves`.
        """
        num_trained = len(self.leaves)
        return self.params[index] if index < num_trained else self.frozen[index - num_trained]

    # --- the state as flat lists ------------------------------------------------------------------

    def flat(self, state: TrainState) -> FlatState:
        """Return the state's leaves as flat lists."""
        return self.flatten_state(state.params, state.master, state.opt_state)

    def flatten_state(self, params: Params, master: Any, opt_state: OptState) -> FlatState:
        """Return the leaves of these trees of a state as flat lists."""
        return FlatState(
            params=jax.tree.leaves(params, is_leaf=is_stored),
            master=None if master is None else jax.tree.leaves(master, is_leaf=is_stored),
            opt=jax.tree.leaves(opt_state, is_leaf=is_stored),
        )

    def trees(self, state: TrainState, states: FlatState) -> tuple[Any, Any, Any]:
        """Return params, master and opt_state as trees like the trees of `state`.

        `state` may be abstract.
        """
        tree = jax.tree.structure(state.params, is_leaf=is_stored)
        master = None if states.master is None else jax.tree.unflatten(tree, states.master)
        opt_tree = jax.tree.structure(state.opt_state, is_leaf=is_stored)
        return (
            jax.tree.unflatten(tree, states.params),
            master,
            jax.tree.unflatten(opt_tree, states.opt),
        )

    def list_shared(self, states: FlatState) -> list[Array]:
        """Return the scalars of the optimizer state."""
        return pick(states.opt, self.opt_map.shared)

    def with_shared(self, states: FlatState, shared: Sequence[Array]) -> FlatState:
        """Return the state with the scalars of the optimizer state replaced."""
        opt = list(states.opt)
        for j, scalar in zip(self.opt_map.shared, shared, strict=True):
            opt[j] = scalar
        return dataclasses.replace(states, opt=opt)

    def opt_states(self, states: FlatState, leaf_ids: Sequence[int]) -> list[Any]:
        """Return the masters, if any, and the optimizer state of some leaves, in their tiers."""
        masters = [] if states.master is None else pick(states.master, leaf_ids)
        return masters + pick(states.opt, self.opt_map.list_state_leaves(leaf_ids))

    def opt_records(self, leaf_ids: Sequence[int]) -> list[RecordSpec]:
        """Return how the leaves that `opt_states` returns are stored."""
        masters = pick(self.master, leaf_ids) if self.layout.has_master else []
        return masters + [self.opt_record(j) for j in self.opt_map.list_state_leaves(leaf_ids)]

    def opt_record(self, index: int) -> RecordSpec:
        """Return how a leaf of the optimizer state is stored."""
        record = self.opt[index]
        assert record is not None
        return record

    def replace(self, states: FlatState, leaf_ids: Sequence[int], opt: Sequence[Any]) -> FlatState:
        """Return the state with the masters and optimizer state of some leaves replaced.

        Args:
          states: all leaves of the state.
          leaf_ids: indices of the parameter leaves.
          opt: the new leaves, in the order of `opt_states`.
        """
        mirrors = self.opt_map.list_state_leaves(leaf_ids)
        # `opt` holds one master for each leaf, if there are masters, followed by the optimizer
        # state.
        first_mirror = len(opt) - len(mirrors)
        master = states.master
        if master is not None:
            master = list(master)
            for i, value in zip(leaf_ids, opt[:first_mirror], strict=True):
                master[i] = value
        opt_after = list(states.opt)
        for j, value in zip(mirrors, opt[first_mirror:], strict=True):
            opt_after[j] = value
        return FlatState(states.params, master, opt_after)

    # --- one record -------------------------------------------------------------------------------

    def read_opt(self, states: FlatState, leaf_ids: Sequence[int], index: Index) -> list[Array]:
        """Return one record's masters, if any, and optimizer state, on the device."""
        return read_layer(self.opt_records(leaf_ids), self.opt_states(states, leaf_ids), index)

    def read_params(self, states: FlatState, leaf_ids: Sequence[int], index: Index) -> list[Array]:
        """Return one record's parameters, sharded, on the device."""
        return read_layer(pick(self.params, leaf_ids), pick(states.params, leaf_ids), index)

    def read_weights(self, states: FlatState, leaf_ids: Sequence[int], index: Index) -> list[Array]:
        """Return one record's float32 weights, on the device.

        Masters on disk are read together with the rest of their record.
        """
        if states.master is None:
            return self.read_params(states, leaf_ids, index)
        return self.read_opt(states, leaf_ids, index)[: len(leaf_ids)]

    def write_layer(
        self,
        states: FlatState,
        leaf_ids: Sequence[int],
        index: Index,
        weights: Sequence[Array],
        opt: Sequence[Array],
    ) -> FlatState:
        """Write one layer or tile: float32 weights, and the leaves of its optimizer state.

        Args:
          states: all leaves of the state.
          leaf_ids: indices of the parameter leaves.
          index: index of the record.
          weights: float32 weights, on the device; parameters are cast from them.
          opt: leaves of the optimizer state, on the device.
        """
        # The parameters are the new weights, cast; masters and optimizer state are one record.
        params = [self.cast(i, value) for i, value in zip(leaf_ids, weights, strict=True)]
        states = self.write_params(states, leaf_ids, index, params)
        values = [*(weights if states.master is not None else ()), *opt]
        stacks = write_layer(
            self.opt_records(leaf_ids), self.opt_states(states, leaf_ids), index, values
        )
        return self.replace(states, leaf_ids, stacks)

    def write_params(
        self, states: FlatState, leaf_ids: Sequence[int], index: Index, values: Sequence[Array]
    ) -> FlatState:
        """Write the parameters of one layer or tile, in the compute dtype."""
        params = list(states.params)
        stacks = write_layer(pick(self.params, leaf_ids), pick(params, leaf_ids), index, values)
        for i, stack in zip(leaf_ids, stacks, strict=True):
            params[i] = stack
        return dataclasses.replace(states, params=params)

    def cast(self, index: int, value: Array) -> Array:
        """Return a weight in the compute dtype, on its shard.

        The cast comes before the gather of stages 1 and 2.
        """
        # On the shard before and after the cast: otherwise GSPMD could gather float32, which is
        # twice the bytes, and cast afterwards.
        sharding = self.grads[index].sharding
        value = jax.lax.with_sharding_constraint(value, sharding)
        value = value.astype(self.leaves[index].dtype)
        return jax.lax.with_sharding_constraint(value, sharding)

    def tokens(self, states: FlatState, leaf_ids: Sequence[int]) -> list[Array]:
        """Return the tokens of some leaves, and of their state, that are on disk."""
        stacks = [*self.opt_states(states, leaf_ids), *pick(states.params, leaf_ids)]
        return [a.token for a in stacks if isinstance(a, OnDisk)]

    def end_token(self, states: FlatState) -> Array | None:
        """Return the token of the last unstacked leaf with data on disk, or None."""
        for i in reversed(self.layout.unstacked):
            tokens = self.tokens(states, (i,))
            if tokens:
                return tokens[0]
        return None

    # --- one unstacked leaf -----------------------------------------------------------------------

    def weight_record(self, states: FlatState, index: int) -> tuple[list[RecordSpec], list[Any]]:
        """Return how the record with an unstacked leaf's float32 weight is stored, and its leaves.

        The weight comes first.
        """
        if states.master is None:
            return [self.params[index]], [states.params[index]]
        return self.opt_records((index,)), self.opt_states(states, (index,))

    def put_leaf(
        self,
        states: FlatState,
        index: int,
        new: Callable[[Any, list[Any]], tuple[Array, list[Array]]],
        begin: Array,
    ) -> tuple[FlatState, Array]:
        """Write an unstacked leaf and its state.

        Leaves off the device are written in a loop of one iteration, which XLA keeps. If the writes
        were inlined, XLA would start the copies of all such leaves at the top of the program, and
        hold all their state on the device at the same time.

        Args:
          states: all leaves of the state.
          index: index of the leaf.
          new: function of (parameter, `opt_states`), in their tiers, that returns (float32 weight,
            leaves of the optimizer state), on the device.
          begin: i32[] zero, known when this write may begin.

        Returns:
          The states, and a zero that is known when this write is done.
        """
        records = self.opt_records((index,))
        has_master = states.master is not None

        def body(_: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            (param, opt), begin = carry
            weight, opt_after = new(param, opt)
            master = [weight] if has_master else []
            opt = store_leaves(records, [*master, *opt_after], opt)
            param = self.params[index].store(self.cast(index, weight), param)
            return (param, opt), begin

        param, opt = self._begun((states.params[index], self.opt_states(states, (index,))), begin)
        carry = ((param, opt), begin)
        if any(r.is_away for r in (self.params[index], *records)):
            (param, opt), begin = one_trip(0, body, carry, self.mesh)
        else:
            (param, opt), begin = body(begin, carry)
        params = [*states.params[:index], param, *states.params[index + 1 :]]
        tokens = [leaf.token for leaf in (*opt, param) if isinstance(leaf, OnDisk)]
        if tokens:
            # The next leaf waits for them too.
            begin, _ = wait_for(begin, tokens, self.mesh)
        return self.replace(dataclasses.replace(states, params=params), (index,), opt), begin

    def _begun(self, leaves: tuple[Any, list[Any]], begin: Array) -> tuple[Any, list[Any]]:
        """Return stored leaves whose reads from disk wait until `begin` is known.

        This fixes one order of the calls to the engine.
        """

        def after(leaf: Any) -> Any:
            if not isinstance(leaf, OnDisk):
                return leaf
            return dataclasses.replace(leaf, token=wait_for(leaf.token, begin, self.mesh)[0])

        return jax.tree.map(after, leaves, is_leaf=is_stored)
