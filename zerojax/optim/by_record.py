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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.config import piecewise_update_setting
from zerojax.optim.elementwise import ElementwiseUpdate, elementwise_update
from zerojax.optim.late_records import (
    MOST_PIECES,
    Pieces,
    UpdateRows,
    cut_leaf,
    update_in_pieces,
)
from zerojax.optim.layer_wise import (
    Gathered,
    LayerTransformation,
    check_whole_leaves,
    why_not_by_leaf,
)
from zerojax.optim.leaf_rule import LeafRule, Stay
from zerojax.optim.unused import unused_grads
from zerojax.optim.whole_tree import Update, finish, measure_grads
from zerojax.ordering import order_read_before_write
from zerojax.state import (
    FlatState,
    StateRecords,
    TrainState,
    load_leaves,
)
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
            stacked = [leaf.layer_dims for leaf in layout.leaves]
            self.rule = elementwise_update(
                tx,
                layout.abstract_params,
                piecewise_update_setting(layout.config),
                stacked,
                lambda: why_not_by_leaf(tx, layout.abstract_params, stacked),
            )
        self.unused = unused_grads(layout.update_jaxpr, len(layout.leaves))

    @property
    def is_elementwise(self) -> bool:
        """Whether each element is updated by itself."""
        return isinstance(self.rule, ElementwiseUpdate)

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
        if not isinstance(self.rule, ElementwiseUpdate):
            return None
        return cut_leaf(self.records, index, most)

    def num_pieces(self) -> dict[int, int]:
        """Return {index of an unstacked leaf: number of pieces in which the device updates it}.

        1 means that the leaf is updated in one piece. The mapping is empty if the host runs the
        update.
        """
        if self.layout.config.update_on == "host":
            return {}
        counts = {}
        for i in self.layout.unstacked:
            pieces = self.pieces(i)
            counts[i] = 1 if pieces is None else pieces.count
        return counts

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
        else:
            # An update of no leaves advances only the shared scalars.
            _, _, after = self.elementwise((), (), (), (), before, loss)
        # A skipped step does not count as an optimizer step: the step count stays, and with it the
        # bias corrections and schedules.
        return [jnp.where(ok, new, old) for new, old in zip(after, before, strict=True)]

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

        def update_record(values: Any) -> Any:
            grads, read, landing = values
            weights, opt = self._apply_rule(
                leaf_ids, grads, read[:count], read[count:], shared, loss
            )
            return weights, opt, landing

        def keep_record(values: Any) -> Any:
            _, read, landing = values
            return list(read[:count]), list(read[count:]), landing

        # If XLA cannot see the order of reads and writes, it copies the entire stack.
        values = (list(grads), list(read), landing)
        return order_read_before_write(ok, update_record, keep_record, values, self.mesh)

    def update_alone(
        self,
        index: int,
        grad: Array,
        weight: Array,
        opt: Sequence[Array],
        shared: Sequence[Array],
        loss: Array,
    ) -> tuple[Array, list[Array]]:
        """Update one leaf of a record on one device, where the program's mesh is not in scope.

        Args:
          index: index of the parameter leaf.
          grad: float32 gradient of the record's leaf; any part of it if the rule is elementwise.
          weight: float32 weight, with the shape of `grad`.
          opt: the leaf's optimizer state, in the order of the state.
          shared: the scalars of the optimizer state before the step.
          loss: f32[], the loss of the step.

        Returns:
          The weight and the optimizer state after the update.
        """
        if isinstance(self.rule, LeafRule):
            (weight,), opt_after = self.rule.update_part(
                (index,), [grad], [weight], opt, shared, loss, Stay()
            )
            return weight, opt_after
        (weight,), opt_after, _ = self.rule((index,), [grad], [weight], opt, shared, loss)
        return weight, opt_after

    def _apply_rule(
        self,
        leaf_ids: Sequence[int],
        grads: Sequence[Array],
        weights: Sequence[Array],
        opt: Sequence[Array],
        shared: Sequence[Array],
        loss: Array,
    ) -> tuple[list[Array], list[Array]]:
        """Return the updated weights and optimizer state of the record of some leaves."""
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

        def update_rows(index: int, grad: Array, loaded: list[Array]) -> tuple[Array, list[Array]]:
            (weight,), opt, _ = self.update((index,), [ready(grad)], loaded, shared, loss, ok)
            return weight, opt

        begin = jnp.int32(0)
        for index, grad in grads.items():
            update_leaf = partial(update_rows, index)
            states, begin = self._update_leaf(states, index, grad, update_leaf, begin)
        return states

    def load_unstacked_leaf(self, states: FlatState, index: int) -> list[Array]:
        """Return the weight and the optimizer state of an unstacked leaf, on the device."""
        opt = self.records.opt_states(states, (index,))
        return self._load(index, states.params[index], opt)

    def _load(self, index: int, param: Any, opt: Sequence[Any]) -> list[Array]:
        """Return an unstacked leaf's weight and optimizer state, on the device.

        Args:
          index: index of the leaf.
          param: the parameter, in its tier.
          opt: the master, if there is one, and the optimizer state, in their tiers.
        """
        loaded = load_leaves(self.records.opt_records((index,)), opt)
        # If there is a master, it comes first in the record. Without one, the parameter is the
        # weight.
        if self.layout.has_master:
            return loaded
        return [self.records.params[index].load(param), *loaded]

    def updated_unstacked_leaf(
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
          loaded: the arrays that `load_unstacked_leaf` returned.
          loss: f32[], the loss of the step.
          ok: bool[], whether to update at all.

        Returns:
          The states, in which the parameter is updated if it is stored on the device; and the
          arrays still to be stored: master, optimizer state, and the parameter if it is stored off
          the device.
        """
        records = self.records
        shared = records.list_shared(states)
        (weight,), opt, _ = self.update((index,), [grad], loaded, shared, loss, ok)
        to_store = opt if states.master is None else [weight, *opt]
        param = records.cast(index, weight)
        if records.params[index].is_away:
            return states, [*to_store, param]
        params = list(states.params)
        params[index] = param
        return dataclasses.replace(states, params=params), to_store

    def _update_leaf(
        self,
        states: FlatState,
        index: int,
        grad: Array,
        update_rows: UpdateRows,
        begin: Array,
    ) -> tuple[FlatState, Array]:
        """Update an unstacked leaf, in pieces if it can be cut.

        Args:
          states: all leaves of the state.
          index: index of the leaf.
          grad: gradient of the leaf, sharded.
          update_rows: the optimizer's update of some rows, or of all of them.
          begin: i32[] zero, known when this update may begin.

        Returns:
          The states, and a zero that is known when this update is done.
        """
        pieces = self.pieces(index)
        if pieces is not None:
            return update_in_pieces(self.records, states, index, grad, update_rows, pieces, begin)

        def update_leaf(param: Any, opt: list[Any]) -> tuple[Array, list[Array]]:
            return update_rows(grad, self._load(index, param, opt))

        return self.records.put_leaf(states, index, update_leaf, begin)


def update_by_record(update: RecordUpdate) -> Update:
    """Return the update of a resident step with offloaded optimizer state: one leaf at a time."""
    records = update.records
    config = update.layout.config

    def step_update(
        state: TrainState, loss: Array, grads: Grads
    ) -> tuple[TrainState, dict[str, Array]]:
        measured = measure_grads(config, state, grads, update.unused)
        finite = measured.finite
        states = records.flat(state)
        grads_by_leaf = dict(zip(update.layout.unstacked, jax.tree.leaves(grads), strict=True))
        shared = records.list_shared(states)
        states = update.update_unstacked(
            states, grads_by_leaf, shared, loss, finite, measured.scaled
        )
        states = records.with_shared(states, update.shared(states, loss, finite))
        return finish(
            state, *records.trees(state, states), loss, measured.norm, finite, config.loss_scaling
        )

    return step_update
