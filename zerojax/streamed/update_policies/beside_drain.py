"""The update of unstacked leaves while the last layer's record is stored."""

from collections.abc import Callable, Mapping, Sequence

import jax

from host_offload.device import one_trip
from zerojax.optim import LateRecord, RecordUpdate, UnstoredRecords, record_specs, with_unstacked
from zerojax.state import FlatState, StateRecords
from zerojax.streamed.plan import StreamedPlan

Array = jax.Array


def end_beside_drain(
    plan: StreamedPlan,
    update: RecordUpdate,
    states: FlatState,
    late: LateRecord,
    pending: UnstoredRecords,
    grads: Mapping[int, Array],
    ready: Callable[[Array], Array],
    loss: Array,
    ok: Array,
) -> FlatState:
    """Update unstacked leaves while the record that was updated last is stored.

    Each group of leaves is stored while the next group is loaded. Leaves larger than the record are
    updated last, in pieces.

    Args:
      plan: plan of the step.
      update: the update by records.
      states: all leaves of the state.
      late: how the record that was updated last is stored.
      pending: that record.
      grads: gradients of the leaves to update, by leaf.
      ready: function from a gradient to the float32 gradient to update with.
      loss: f32[], loss of the step.
      ok: bool[], whether to update at all.

    Returns:
      All leaves of the state after the update.
    """
    records = update.records
    groups = plan.unstacked_groups()
    last = plan.drained
    assert last is not None
    drained_layers = [layer for phase in last.schedule.phases for layer in phase.drain.tolist()]
    number = drained_layers[-1]

    def load(states: FlatState, group: Sequence[int]) -> dict[int, list[Array]]:
        return {i: update.load_unstacked_leaf(states, i) for i in group}

    def body(layer: Array, states: FlatState) -> FlatState:
        states, _ = late.drain(states, number, layer, pending)
        loaded = load(states, groups[0])
        for turn, group in enumerate(groups):
            updated = dict[int, list[Array]]()
            for i in group:
                states, updated[i] = update.updated_unstacked_leaf(
                    states, i, ready(grads[i]), loaded[i], loss, ok
                )
            if turn + 1 < len(groups):
                updated, following = jax.lax.optimization_barrier((updated, states))
                loaded = load(following, groups[turn + 1])
            for i, values in updated.items():
                states = _store(records, states, i, values)
        return states

    states = one_trip(number, body, states, plan.mesh)
    in_pieces = {i: grads[i] for i in plan.chunked_unstacked}
    return update.update_unstacked(states, in_pieces, records.list_shared(states), loss, ok, ready)


def _store(records: StateRecords, states: FlatState, leaf: int, values: list[Array]) -> FlatState:
    """Return the state with an updated unstacked leaf stored in its tier."""
    specs = record_specs(records, (leaf,))
    stored = [spec.store(value) for spec, value in zip(specs, values, strict=True)]
    return with_unstacked(records, states, {leaf: stored})
