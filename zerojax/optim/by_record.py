"""Run the optimizer record by record.

The state of one layer, or of one leaf, is loaded to the device, updated, and stored back in place:

    for each layer l:   w, s = read(masters, l), read(opt_state, l)
                        w, s = update(g[l], w, s)    elementwise, or by leaf (`leaf_rule`)
                        write(masters, l, w); write(opt_state, l, s); write(params, l, cast(w))

Unstacked leaves (the embedding, the head, every leaf of a Model) are updated one at a time, each
after the previous one is done. `zerojax.state.StateRecords` knows where each record is stored and
how to read and write it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.config import reason
from zerojax.optim.elementwise import ElementwiseUpdate, elementwise_update
from zerojax.optim.late_records import MOST_PIECES, Pieces, cut_leaf, update_in_pieces
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
from zerojax.trees import Grads

Array = jax.Array


class RecordUpdate:
    """Updates parts of a program's state.

    Attributes:
      records: where each record of the state is stored.
      rule: the optimizer, either elementwise or as a rule for each leaf of a layer.
      unused: indices of the leaves whose gradients the optimizer never uses.
    """

    def __init__(self, tx: optax.GradientTransformation, records: StateRecords) -> None:
        """Check that the optimizer can be applied to one record at a time.

        Raises:
          ValueError: the optimizer cannot be applied to single records; the message names the
            setting that needs it.
        """
        layout = records.layout
        self.records = records
        self.layout = layout
        self.mesh = layout.mesh
        self.rule: ElementwiseUpdate | LeafRule
        if isinstance(tx, LayerTransformation):
            check_whole_leaves(layout)
            self.rule = tx.rule
            self._gathered = Gathered(layout)
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
        """The elementwise optimizer. An update on the host always uses an elementwise optimizer."""
        assert isinstance(self.rule, ElementwiseUpdate)
        return self.rule

    def pieces(self, index: int, most: int = MOST_PIECES) -> Pieces | None:
        """Return how an unstacked leaf is cut into pieces, or None if it stays in one piece.

        Args:
          index: index of the unstacked leaf.
          most: maximum number of pieces.
        """
        return (
            cut_leaf(self.records, index, most)
            if isinstance(self.rule, ElementwiseUpdate)
            else None
        )

    def num_pieces(self) -> dict[int, int]:
        """Return {index of an unstacked leaf: number of pieces in which the device updates it}.

        1 means that the leaf is updated in one piece. The mapping is empty if the host runs the
        update.
        """
        if self.layout.config.update_on == "host":
            return {}
        pieces = {i: self.pieces(i) for i in self.layout.unstacked}
        return {i: 1 if some is None else some.count for i, some in pieces.items()}

    def first_states(self, leaf_ids: Sequence[int], weights: Sequence[Array]) -> list[Array]:
        """Return the initial optimizer state of one record, in the order of the state.

        Args:
          leaf_ids: indices of the record's parameter leaves.
          weights: float32 weights, one for each leaf of `leaf_ids`.
        """
        if isinstance(self.rule, LeafRule):
            return self.rule.init_part(leaf_ids, weights)
        return self.rule.first_states(leaf_ids, weights)

    def first_shared(self) -> list[Array]:
        """Return the scalars of the optimizer state before the first step."""
        return self.rule.first_shared()

    def shared(self, states: FlatState, loss: Array, ok: Array) -> list[Array]:
        """Return the scalars of the optimizer state after the step."""
        before = self.records.list_shared(states)
        if isinstance(self.rule, LeafRule):
            after = self.rule.shared_after(before, loss)
        else:  # an update of no leaves advances only the shared scalars
            *_, after = self.elementwise((), (), (), (), before, loss)
        # A skipped step does not count as an optimizer step: the step count stays, and with it the
        # bias corrections and schedules.
        return [jnp.where(ok, a, b) for a, b in zip(after, before, strict=True)]

    def update(
        self,
        leaf_ids: Sequence[int],
        grads: Sequence[Array],
        read: Sequence[Array],
        shared: Sequence[Array],
        loss: Array,
        ok: Array,
        landing: Any = None,
    ) -> tuple[list[Array], list[Array], Any]:
        """Update one record: a layer, a tile, an unstacked leaf, or some rows of such a leaf.

        Args:
          leaf_ids: indices of the record's parameter leaves.
          grads: float32 gradients, sharded.
          read: the float32 weights followed by the optimizer state, as `StateRecords.read_opt`
            returns them.
          shared: the scalars of the optimizer state before the step.
          loss: f32[], the loss of the step.
          ok: bool[], whether to update at all.
          landing: values that the tick fetches from the same stacks, if any; they are read before
            the update is written.

        Returns:
          The float32 weights after the update, the optimizer state after the update (both to be
          written now or later), and `landing`.
        """
        count = len(leaf_ids)

        def move(values: Any) -> Any:
            grads, read, landing = values
            return *self._updated(
                leaf_ids, grads, (read[:count], read[count:]), shared, loss
            ), landing

        def keep(values: Any) -> Any:
            _, read, landing = values
            return list(read[:count]), list(read[count:]), landing

        # If XLA cannot see the order of reads and writes, it copies the entire stack.
        return order_read_before_write(
            ok, move, keep, (list(grads), list(read), landing), self.mesh
        )

    def _updated(
        self,
        leaf_ids: Sequence[int],
        grads: Grads,
        before: tuple[Any, Any],
        shared: Any,
        loss: Array,
    ) -> tuple[list[Array], list[Array]]:
        """Return the updated weights and optimizer state of the record of some leaves."""
        weights, opt = before
        if isinstance(self.rule, LeafRule):
            weights, opt = self.rule.update_part(
                leaf_ids, grads, weights, opt, shared, loss, self._gathered
            )
        else:
            weights, opt, _ = self.elementwise(leaf_ids, grads, weights, opt, shared, loss)
        return list(weights), list(opt)

    def update_unstacked(
        self,
        states: FlatState,
        grads: Mapping[int, Array],
        shared: Sequence[Array],
        loss: Array,
        ok: Array,
        ready: Callable[[Array], Array] = lambda grad: grad,
    ) -> FlatState:
        """Update unstacked leaves one after the other, large ones in pieces if they can be cut.

        Args:
          states: all leaves of the state.
          grads: sharded gradients of some of `Layout.unstacked`, by leaf index.
          shared: the scalars of the optimizer state before the step.
          loss: f32[], the loss of the step.
          ok: bool[], whether to update at all.
          ready: function from elements of a gradient to the float32 elements to update with.

        Returns:
          The states after the update.
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
        # If there is a master, it comes first in the record. Without one, the parameter is the
        # weight.
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
        """Update an unstacked leaf, on the device.

        Args:
          states: all leaves of the state.
          index: index of the unstacked leaf.
          grad: float32 gradient, sharded, the mean over microbatches.
          loaded: the arrays that `load_end` returned.
          loss: f32[], the loss of the step.
          ok: bool[], whether to update at all.

        Returns:
          The states, in which the parameter is updated if it is stored on the device; and the
          arrays still to be stored: master, optimizer state, and the parameter if it is stored off
          the device.
        """
        records = self.records
        weights, after, _ = self.update(
            (index,), [grad], loaded, records.list_shared(states), loss, ok
        )
        values = [*(weights if states.master is not None else ()), *after]
        param = records.cast(index, weights[0])
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
    """Return the update of a resident step with offloaded optimizer state: one leaf at a time."""
    records = update.records
    config = update.layout.config

    def step_update(
        state: TrainState, value: Array, grads: Grads
    ) -> tuple[TrainState, dict[str, Array]]:
        measured = measure_grads(config, state, grads, update.unused)
        finite = measured.finite
        states = records.flat(state)
        by_leaf = dict(zip(update.layout.unstacked, jax.tree.leaves(grads), strict=True))
        shared = records.list_shared(states)
        states = update.update_unstacked(states, by_leaf, shared, value, finite, measured.scaled)
        states = records.with_shared(states, update.shared(states, value, finite))
        return finish(
            state, *records.trees(state, states), value, measured.norm, finite, config.loss_scaling
        )

    return step_update
