"""The update policy that updates a layer in the tick that computes its gradient."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.optim import (
    DuplexTransfer,
    InFlightLayers,
    LateRecord,
    Pieces,
    RecordUpdate,
    UnstoredRecords,
    kept_for_later,
    update_piece,
    with_pieces,
)
from zerojax.state import FlatState, TrainState
from zerojax.streamed.phases import Tick
from zerojax.streamed.plan import StackPlan, StreamedPlan
from zerojax.streamed.update_policies.beside_drain import end_beside_drain
from zerojax.streamed.update_policies.interface import (
    BackwardResult,
    HeadDone,
    PlainForward,
    RecordGrads,
    Result,
    closed,
)

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpdatedState:
    """The value that backward carries if it updates.

    Attributes:
      loss: f32[], loss of the step.
      scalars: scalars of the host's kernels, or None.
      squares: f32[], the sum of squares of the unscaled gradients so far.
      states: all leaves of the state; layers that backward has passed are already updated.
      token: orders the callbacks of the host update.
      pending: for each stack that stores late, by the first of its leaves, the updated arrays that
        are not stored yet (`LateRecord`).
      handed: layers passed to the host update whose parameters are not taken yet.
      unstacked: updated records of leaves whose gradients the head completed, by leaf; the first
        tick stores them.
      head: leaves of the head that are updated in pieces, or None.
    """

    loss: Array
    scalars: Array | None
    squares: Array
    states: FlatState
    token: Array
    pending: dict[int, UnstoredRecords]
    unstacked: dict[int, list[Array]]
    handed: dict[int, InFlightLayers] = dataclasses.field(default_factory=dict)
    head: "_HeadPieces | None" = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _HeadPieces:
    """Inputs of the update of the head's leaves, one piece per tick.

    Attributes:
      grads: gradients of these leaves, by leaf, as `Pieces.split` returns them.
      ok: bool[], whether to update; it is the same for all pieces of a leaf.
    """

    grads: dict[int, Array]
    ok: Array


class UpdateInBackward(PlainForward):
    """Updates a layer in the tick that computes its gradient, which is never stored.

    A gradient that is not finite stops the updates from its layer on, but later layers are already
    updated. Loss scaling is therefore not possible.
    """

    unstacked_first = False

    def __init__(self, plan: StreamedPlan, update: RecordUpdate) -> None:
        """Update with `update` by the records of `plan`."""
        self.plan = plan
        self.record_update = update
        self.records = update.records

    def load_unstacked(self, state: TrainState, y: Any) -> tuple[Any, dict[int, list[Array]]]:
        """Load the records of `early_unstacked` during the head."""
        states = self.records.flat(state)
        loaded = dict[int, list[Array]]()
        if self.plan.early_unstacked:
            # They cross the link during the head, and not during the layers before it.
            y, states = jax.lax.optimization_barrier((y, states))
            loaded = {
                i: self.record_update.load_unstacked_leaf(states, i)
                for i in self.plan.early_unstacked
            }
        return y, loaded

    def begin(
        self, state: TrainState, head: HeadDone, grads: list[Array], token: Array
    ) -> UpdatedState:
        """Update the leaves that the head completed, and return the value that backward carries."""
        del grads
        plan = self.plan
        states = self.records.flat(state)
        complete = dict(zip(plan.unstacked, head.grads, strict=True))
        done = (*plan.early_unstacked, *plan.head_pieces)
        of_head = {i: _rounded(plan.reduced([complete[i]], [i])[0]) for i in done}
        squares = plan.squares(list(of_head.values()), list(of_head), state)
        unstacked = dict[int, list[Array]]()
        ok = jnp.isfinite(squares)
        for i in plan.early_unstacked:
            states, unstacked[i] = self.record_update.updated_unstacked_leaf(
                states, i, plan.mean(of_head[i]), head.loaded[i], head.loss, ok
            )
        cut = {i: pieces.split(of_head[i]) for i, pieces in plan.head_pieces.items()}
        states = with_pieces(self.records, states, plan.head_pieces, Pieces.split)
        lags = {
            stack.blocks: stack.schedule.phase("backward").stores_late for stack in plan.of_stacks
        }
        pending = {
            leaf_ids[0]: self._late(leaf_ids).empty(states, lag)
            for leaf_ids, lag in lags.items()
            if lag
        }
        pieces = _HeadPieces(cut, ok) if cut else None
        return UpdatedState(
            head.loss, None, squares, states, token, pending, unstacked, head=pieces
        )

    def _late(self, leaf_ids: Sequence[int]) -> LateRecord:
        """Return the late record of the layers with the leaves `leaf_ids`.

        The last run's record includes the pieces of the head's leaves.
        """
        plan = self.plan
        last = self.plan.of_stacks[-1]
        if leaf_ids != last.blocks or not plan.head_pieces:
            return LateRecord(self.records, leaf_ids)
        count = next(iter(plan.head_pieces.values())).count
        return LateRecord(self.records, leaf_ids, plan.head_pieces, last.run.stop - count)

    def split_unstacked(self, carried: UpdatedState) -> tuple[UpdatedState, dict[int, list[Array]]]:
        """Take the updated records of `early_unstacked` out of the carried value."""
        return dataclasses.replace(carried, unstacked={}), carried.unstacked

    def build_transfer(
        self,
        carried: UpdatedState,
        now: Tick,
        leaf_ids: Sequence[int],
        unstacked: Mapping[int, list[Array]],
    ) -> DuplexTransfer | None:
        """Return the transfers of late stores during a tick's products, or None."""
        if not leaf_ids or leaf_ids[0] not in carried.pending:
            return None
        pending = carried.pending[leaf_ids[0]]
        return DuplexTransfer(
            self._late(leaf_ids),
            self.plan.link_groups(leaf_ids),
            now,
            pending,
            carried.states,
            unstacked,
        )

    def params(self, state: TrainState, carried: UpdatedState) -> list[Array]:
        """Return the stacks of parameters that backward updates."""
        del state
        # The stacks that are being updated. If backward read the stacks from before the step, XLA
        # would keep a copy of them.
        return [carried.states.params[i] for i in self.plan.stacked]

    def use(
        self, state: TrainState, carried: UpdatedState, record: RecordGrads
    ) -> tuple[UpdatedState, Any]:
        """Update one record with its gradients."""
        plan = self.plan
        records = self.records
        states = carried.states
        now = record.now
        leaf_ids = record.leaf_ids
        transfer = record.transfer
        in_flight = record.in_flight
        fetched = list[Array]()
        if transfer is None:
            opt = records.read_opt(states, leaf_ids, now.index())
        else:
            assert record.transferred is not None
            states = transfer.finish_states(record.transferred)
            opt, fetched = transfer.loaded(record.transferred)
        # Cut the shard out of the gathered layer instead of fetching it again.
        old = plan.on_shards(record.params, leaf_ids) if states.master is None else []
        squares = carried.squares + plan.squares(record.grads, leaf_ids, state)
        # Gradients are neither clipped nor checked against the layers still to come, since the norm
        # is known only after all are updated. A sum that is not finite stays so: no later layer of
        # this step is updated either.
        shared = records.list_shared(states)
        mean = [plan.mean(g) for g in record.grads]
        ok = jnp.isfinite(squares)
        weights, opt, in_flight = self.record_update.update(
            leaf_ids, mean, old + opt, shared, carried.loss, ok, in_flight
        )
        if transfer is None:
            states = records.write_layer(states, leaf_ids, now.index(), weights, opt)
            return dataclasses.replace(carried, states=states, squares=squares), in_flight
        # The updated record stays on the device until a later tick stores it.
        states, updated = kept_for_later(records, states, leaf_ids, now.layer, weights, opt)
        states, of_pieces = self._updated_pieces(carried, record, states, shared)
        pending = carried.pending | {
            leaf_ids[0]: [*carried.pending[leaf_ids[0]][1:], [*updated, *of_pieces]]
        }
        in_flight = None if now.fetch is None else [*fetched, *(in_flight or ())]
        return dataclasses.replace(
            carried, states=states, squares=squares, pending=pending
        ), in_flight

    def _updated_pieces(
        self, carried: UpdatedState, record: RecordGrads, states: FlatState, shared: Sequence[Array]
    ) -> tuple[FlatState, list[Array]]:
        """Update the tick's pieces of the head's leaves.

        Returns the states, and the arrays that a later tick stores.
        """
        transfer = record.transfer
        transferred = record.transferred
        now = record.now
        assert transfer is not None
        assert transferred is not None
        late = transfer.record
        if not now.loads_pieces or carried.head is None:
            return states, carried.pending[record.leaf_ids[0]][-1][late.num_own :]
        updated = list[Array]()
        head = carried.head
        for i, grad in head.grads.items():

            def move(grad: Array, loaded: list[Array], i: int = i) -> tuple[Array, list[Array]]:
                mean = [self.plan.mean(grad)]
                (weight,), opt, _ = self.record_update.update(
                    (i,), mean, loaded, shared, carried.loss, head.ok
                )
                return weight, opt

            states, of_leaf = update_piece(late, transfer, transferred, i, grad, move, states)
            updated += of_leaf
        return states, updated

    def drain(
        self, stack: StackPlan, number: int, layer: Array, carried: UpdatedState
    ) -> UpdatedState:
        """Store the record of a layer after the last tick of its run."""
        leaf_ids = stack.blocks
        states, pending = self._late(leaf_ids).drain(
            carried.states, number, layer, carried.pending[leaf_ids[0]]
        )
        return dataclasses.replace(
            carried, states=states, pending=carried.pending | {leaf_ids[0]: pending}
        )

    def grads(self, carried: UpdatedState) -> list[Array]:
        """Return no stacks: gradients are never stored."""
        del carried
        return []

    def norm(self, result: BackwardResult[UpdatedState]) -> Array:
        """Return the global norm of the gradients."""
        unstacked = self._late_unstacked(result)
        return jnp.sqrt(
            result.carried.squares
            + self.plan.squares(list(unstacked.values()), list(unstacked), result.state)
        )

    def _late_unstacked(self, result: BackwardResult[UpdatedState]) -> dict[int, Array]:
        """Return the gradients of the unstacked leaves that were not updated before, by leaf."""
        grads = dict(zip(self.plan.unstacked, result.unstacked, strict=True))
        return {i: grads[i] for i in self.plan.late_unstacked}

    def end(self, result: BackwardResult[UpdatedState]) -> Result:
        """Update the remaining unstacked leaves and finish the step."""
        plan = self.plan
        update = self.record_update
        states = result.carried.states
        norm = self.norm(result)
        unstacked = self._late_unstacked(result)
        ok = jnp.isfinite(norm)
        if plan.drained is not None:
            leaf_ids = plan.drained.blocks
            pending = result.carried.pending[leaf_ids[0]]
            states = end_beside_drain(
                plan,
                update,
                states,
                self._late(leaf_ids),
                pending,
                unstacked,
                plan.mean,
                result.loss,
                ok,
            )
        else:
            shared = self.records.list_shared(states)
            states = update.update_unstacked(states, unstacked, shared, result.loss, ok, plan.mean)
        states = with_pieces(self.records, states, plan.head_pieces, Pieces.join)
        return closed(update, result, states, norm)


def _rounded(grad: Array) -> Array:
    """Return a gradient rounded to its dtype.

    XLA may leave the rounding out if a gradient is used as soon as it is computed.
    """
    if grad.dtype == jnp.float32:
        return grad
    bits = jnp.finfo(grad.dtype)
    return jax.lax.reduce_precision(grad, bits.nexp, bits.nmant)
