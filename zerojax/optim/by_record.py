"""The optimizer run record by record: state comes to the device for one layer, or one leaf, is
updated and goes back in place.

    for each layer l:   w, s = read(masters, l), read(opt_state, l)
                        w, s = update(g[l], w, s)                      elementwise, or by leaf of a layer (`leaf_rule`)
                        write(masters, l, w); write(opt_state, l, s); write(params, l, cast(w))

Leaves that are not stacked (the embedding, the head, every leaf of a Model) are updated one at a
time, each when the one before is done. Where each record rests, and how it is read and written, is
known to `zerojax.state.StateRecords`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.config import reason
from zerojax.optim.elementwise import ElementwiseUpdate, elementwise_update
from zerojax.optim.late_records import MOST_PIECES, Pieces, pieces_of, update_in_pieces
from zerojax.optim.layer_wise import (
    Gathered,
    LayerTransformation,
    check_whole_leaves,
    why_not_by_leaf,
)
from zerojax.optim.leaf_rule import LeafRule
from zerojax.optim.unused import unused_grads
from zerojax.optim.whole_tree import Update, finish, measure_grads
from zerojax.state import FlatState, StateRecords, TrainState, load_leaves, order_read_before_write

Array = jax.Array


class RecordUpdate:
    """The update of part of a program's state.

    Attributes:
      records: how the state rests.
      rule: the optimizer: elementwise, or a rule for each leaf of a layer.
      unused: indices of the leaves whose gradients it never uses.
    """

    def __init__(self, tx: optax.GradientTransformation, records: StateRecords) -> None:
        """Check that the optimizer may be applied to a record on its own.

        Raises:
          ValueError: it may not; names the setting that needs it.
        """
        layout = records.layout
        self.records, self.layout, self.mesh = records, layout, layout.mesh
        self.rule: ElementwiseUpdate | LeafRule
        if isinstance(tx, LayerTransformation):
            check_whole_leaves(layout)
            self.rule, self._gathered = tx.rule, Gathered(layout)
        else:
            stacked = [leaf.is_stacked for leaf in layout.leaves]
            self.rule = elementwise_update(
                tx,
                layout.abstract_params,
                reason(layout.config),
                stacked,
                lambda: why_not_by_leaf(tx, layout.abstract_params, stacked),
            )
        self.unused = unused_grads(layout.update_jaxpr, len(layout.leaves))

    @property
    def elementwise(self) -> ElementwiseUpdate:
        """The elementwise optimizer; of an update on the host it always is one."""
        assert isinstance(self.rule, ElementwiseUpdate)
        return self.rule

    def pieces(self, index: int, most: int = MOST_PIECES) -> Pieces | None:
        """Return how a leaf that is no stack of layers is cut, into `most` pieces at most; None: it
        is updated as a whole.
        """
        return (
            pieces_of(self.records, index, most)
            if isinstance(self.rule, ElementwiseUpdate)
            else None
        )

    def num_pieces(self) -> dict[int, int]:
        """Return in how many pieces the device updates each leaf that is no stack of layers, by its
        index: 1 is whole.
        """
        if self.layout.config.update_on == "host":
            return {}
        pieces = {i: self.pieces(i) for i in self.layout.ends}
        return {i: 1 if some is None else some.count for i, some in pieces.items()}

    def first_states(self, part: Sequence[int], weights: Sequence[Array]) -> list[Array]:
        """Return the first optimizer state of one record: of the state leaves that belong to
        `part`.
        """
        if isinstance(self.rule, LeafRule):
            return self.rule.init_part(part, weights)
        return self.rule.first_states(part, weights)

    def first_shared(self) -> list[Array]:
        """Return the scalars of the optimizer state before the first step."""
        return self.rule.first_shared()

    def shared(self, states: FlatState, loss: Array, ok: Array) -> list[Array]:
        """Return the scalars of the optimizer state after the step."""
        before = self.records.shared_of(states)
        if isinstance(self.rule, LeafRule):
            after = self.rule.shared_after(before, loss)
        else:  # a part of no leaves moves the shared scalars alone
            *_, after = self.elementwise((), (), (), (), before, loss)
        # A skipped step is no step to the optimizer: its count, and with it bias corrections and
        # schedules, stays.
        return [jnp.where(ok, a, b) for a, b in zip(after, before, strict=True)]

    def update(
        self,
        part: Sequence[int],
        grads: Sequence[Array],
        read: Sequence[Array],
        shared: Sequence[Array],
        loss: Array,
        ok: Array,
        landing: Any = None,
    ) -> tuple[list[Array], list[Array], Any]:
        """Update one record: a layer, a tile, an unstacked leaf, or some rows of one.

        Args:
          part: indices of the leaves of the record.
          grads: float32, sharded.
          read: the float32 weights, and then the optimizer state, as `StateRecords.read_opt`
            returns it.
          shared: the scalars of the optimizer state before the step.
          loss: f32[].
          ok: bool[], whether to update at all.
          landing: what the tick fetches from the same stacks, if anything: it is read before the
            update is written.

        Returns:
          The float32 weights and the optimizer state after the update, to be written now or later,
          and `landing`.
        """
        count = len(part)

        def move(values: Any) -> Any:
            grads, read, landing = values
            return *self._updated(part, grads, (read[:count], read[count:]), shared, loss), landing

        def keep(values: Any) -> Any:
            _, read, landing = values
            return list(read[:count]), list(read[count:]), landing

        # An order of reads and writes that XLA does not see makes it copy the whole stack.
        return order_read_before_write(
            ok, move, keep, (list(grads), list(read), landing), self.mesh
        )

    def _updated(
        self, part: Sequence[int], grads: Any, before: tuple[Any, Any], shared: Any, loss: Array
    ) -> tuple[list[Array], list[Array]]:
        """Return the weights and the optimizer state of one record of the leaves in `part` after
        its update.
        """
        weights, opt = before
        if isinstance(self.rule, LeafRule):
            weights, opt = self.rule.update_part(
                part, grads, weights, opt, shared, loss, self._gathered
            )
        else:
            weights, opt, _ = self.elementwise(part, grads, weights, opt, shared, loss)
        return list(weights), list(opt)

    def update_ends(
        self,
        states: FlatState,
        grads: Mapping[int, Array],
        shared: Sequence[Array],
        loss: Array,
        ok: Array,
        ready: Callable[[Array], Array] = lambda grad: grad,
    ) -> FlatState:
        """Update leaves that are no stack of layers, one after the other; large ones in pieces,
        where they may be cut.

        Args:
          states: all leaves.
          grads: sharded; by leaf, of some of `Layout.ends`.
          shared: the scalars of the optimizer state before the step.
          loss: f32[].
          ok: bool[].
          ready: elements of a gradient -> those to update with, float32.
        """
        begin = jnp.int32(0)
        for index, grad in grads.items():
            states, begin = self._update_leaf(states, index, grad, ready, shared, loss, ok, begin)
        return states

    def load_end(self, states: FlatState, index: int) -> list[Array]:
        """Return the weight and the optimizer state of an unstacked leaf, on the device."""
        return self._loaded(
            index,
            states.params[index],
            self.records.opt_states(states, (index,)),
            states.master is not None,
        )

    def _loaded(self, index: int, param: Any, opt: Sequence[Any], has_master: bool) -> list[Array]:
        loaded = load_leaves(self.records.opt_records((index,)), opt)
        # A master leads its record. Without one the parameter is the weight.
        return loaded if has_master else [self.records.params[index].load(param), *loaded]

    def updated_end(
        self,
        states: FlatState,
        index: int,
        grad: Array,
        loaded: Sequence[Array],
        loss: Array,
        ok: Array,
    ) -> tuple[FlatState, list[Array]]:
        """Update a leaf that is no stack of layers, on the device.

        Args:
          states: all leaves.
          index: of the leaf.
          grad: float32, sharded, the mean over microbatches.
          loaded: what `load_end` returned.
          loss: f32[].
          ok: bool[], whether to update at all.

        Returns:
          The states, with the parameter where it rests on the device, and what else is to be
            stored: masters, optimizer state,
          and the parameter where it rests off the device.
        """
        records = self.records
        weights, after, _ = self.update(
            (index,), [grad], loaded, records.shared_of(states), loss, ok
        )
        values, param = (
            [*(weights if states.master is not None else ()), *after],
            records.cast(index, weights[0]),
        )
        if records.params[index].is_away:
            return states, [*values, param]
        params = [param if i == index else a for i, a in enumerate(states.params)]
        return dataclasses.replace(states, params=params), values

    def _update_leaf(
        self,
        states: FlatState,
        index: int,
        grad: Array,
        ready: Callable[[Array], Array],
        shared: Sequence[Array],
        loss: Array,
        ok: Array,
        begin: Array,
    ) -> tuple[FlatState, Array]:
        def move(grad: Array, loaded: list[Array]) -> tuple[Array, list[Array]]:
            (value,), after, _ = self.update((index,), [ready(grad)], loaded, shared, loss, ok)
            return value, after

        if (pieces := self.pieces(index)) is not None:
            return update_in_pieces(self.records, states, index, grad, move, pieces, begin)
        has_master = states.master is not None

        def new(param: Any, opt: list[Any]) -> tuple[Array, list[Array]]:
            return move(grad, self._loaded(index, param, opt, has_master))

        return self.records.put_leaf(states, index, new, begin)


def update_by_record(update: RecordUpdate) -> Update:
    """Return the update of a resident step whose optimizer state is off the device: one leaf after
    the other.
    """
    records, config = update.records, update.layout.config

    def step_update(
        state: TrainState, value: Array, grads: Any
    ) -> tuple[TrainState, dict[str, Array]]:
        measured = measure_grads(config, state, grads, update.unused)
        finite = measured.finite
        states = records.flat(state)
        by_leaf = dict(zip(update.layout.ends, jax.tree.leaves(grads), strict=True))
        shared = records.shared_of(states)
        states = update.update_ends(states, by_leaf, shared, value, finite, measured.scaled)
        states = records.with_shared(states, update.shared(states, value, finite))
        return finish(
            state, *records.trees(state, states), value, measured.norm, finite, config.loss_scaling
        )

    return step_update
