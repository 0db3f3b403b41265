"""What crosses the link beside the products of a tick: the record that it updates comes, that of an earlier tick goes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.optim import Pieces, dealt
from zerojax.state import FlatState, RecordSpec, StateRecords, read_layer, write_layer
from zerojax.streamed.phases import Tick

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Crossed:
    """The state, and what was loaded of it, while a tick computes.

    Attributes:
      states: all leaves, of which the stacks in host memory are written in turns.
      loaded: what was loaded so far, by its place in the record.
      ends: records of leaves that are no stack of layers, by leaf, which the tick stores; `states` lacks them meanwhile.
    """

    states: FlatState
    loaded: dict[int, Array]
    ends: dict[int, list[Any]]


Pending = list[list[Array]]
"""The arrays of the records that earlier ticks updated and later ticks store, on the device; the oldest record first."""


class Crossing:
    """Loads of what a tick updates, and stores of what an earlier tick updated, beside its products.

    It is a `LateRecord`. Of its parameters in host memory the tick loads what a later tick takes. A link carries both
    directions at once. But no array may be read and written at once: XLA would copy it. So the arrays are dealt out to groups
    of equal bytes, and in each turn one group is loaded while another one is stored:

        turn   0  1  2  3
        load   0  1  2  3
        store  2  3  0  1
    """

    def __init__(
        self,
        record: "LateRecord",
        num_groups: int,
        now: Tick,
        pending: "Pending",
        states: FlatState,
        ends: Mapping[int, list[Array]] | None = None,
    ) -> None:
        """Plan the turns of a tick.

        Args:
          record: what crosses.
          num_groups: at most.
          now: the tick.
          pending: what earlier ticks updated, on the device.
          states: all leaves.
          ends: updated records of leaves that are no stack of layers, by leaf, on the device: this tick stores them.
        """
        self.record, self.now, self.pending, self.states, self.ends = record, now, pending[0], states, ends or {}
        self.groups = dealt([a.size * a.dtype.itemsize for a in self.pending], num_groups)

    @property
    def num_turns(self) -> int:
        """As many as there are groups."""
        return len(self.groups)

    def begin(self) -> Crossed:
        """Start the first turn."""
        states = without_ends(self.record.records, self.states, list(self.ends))
        return self.turn(0, Crossed(states, {}, {i: [] for i in self.ends}))

    def turn(self, number: int, crossed: Crossed) -> Crossed:
        """Start a turn. What the turns before it started has to be done."""
        record, now = self.record, self.now
        up, down = self.groups[number], self.groups[(number + self.num_turns // 2) % self.num_turns]
        loaded, states = record.load(crossed.states, up, now), crossed.states
        if now.stored is not None:
            num = len(self.pending) if now.stores_pieces else record.num_own
            states = record.store(states, now.stored, {n: self.pending[n] for n in down if n < num})
        return Crossed(states, crossed.loaded | loaded, self._ends_of(number, crossed.ends))

    def _ends_of(self, number: int, stored: dict[int, list[Any]]) -> dict[int, list[Any]]:
        """Start the stores of a turn's share of other leaves. XLA starts a store as late as its turn allows."""
        each = [
            (i, spec, a)
            for i, some in self.ends.items()
            for spec, a in zip(record_specs(self.record.records, (i,)), some, strict=True)
        ]
        stored = {i: list(arrays) for i, arrays in stored.items()}
        for n, (i, spec, value) in enumerate(each):
            if n * self.num_turns // len(each) == number:
                stored[i].append(spec.store(value))
        return stored

    def states_of(self, crossed: Crossed) -> FlatState:
        """Return the state, when all turns were taken."""
        return with_ends(self.record.records, crossed.states, crossed.ends)

    def loaded(self, crossed: Crossed) -> tuple[list[Array], list[Array]]:
        """Return what was loaded: of the record that is updated, and parameters of the one that is taken later."""
        record = self.record
        arrays = [crossed.loaded[n] for n in sorted(crossed.loaded) if n < record.num_own]
        return arrays[: record.num_opt], arrays[record.num_opt :]

    def loaded_piece(self, crossed: Crossed, leaf: int) -> list[Array]:
        """Return what was loaded of a piece of a leaf: its master, if there is one, its optimizer state, its parameter."""
        return [crossed.loaded[n] for n in self.record.places[leaf] if n in crossed.loaded]


class LateRecord:
    """What is loaded, updated, and stored some ticks later: a layer's record, and a piece of each of some leaves that are none.

    Its arrays are masters, where there are any, and optimizer state of the layer, its parameters where they rest in host
    memory, and then the same of each piece. Piece k belongs to the tick of layer `lowest` + k.

    Attributes:
      records: how the state rests.
      part: indices of the leaves of the layer.
      pieces: how each of the other leaves is cut; the state holds them as `Pieces.split` returns them.
      lowest: the layer whose tick updates piece 0.
      num_opt: arrays of masters and optimizer state of the layer, which come first.
      num_own: arrays of the layer.
      places: of the arrays of each piece, by its leaf.
    """

    def __init__(
        self, records: StateRecords, part: Sequence[int], pieces: Mapping[int, Pieces] | None = None, lowest: int = 0
    ) -> None:
        self.records, self.part, self.pieces, self.lowest = records, part, pieces or {}, lowest
        self._specs, self.num_opt = record_specs(records, part), len(records.opt_records(part))
        self.num_own, self.places = len(self._specs), dict[int, range]()
        self._leaf_of = dict[int, int]()
        for i in self.pieces:
            specs = record_specs(records, (i,))
            self.places[i] = range(len(self._specs), len(self._specs) + len(specs))
            self._leaf_of |= dict.fromkeys(self.places[i], i)
            self._specs += specs

    def load(self, states: FlatState, places: Sequence[int], now: Tick) -> dict[int, Array]:
        """Return arrays by their places, on the device: those of them that a tick loads."""
        stacks, loaded = self._stacks(states), dict[int, Array]()
        for n in places:
            if n >= self.num_own:
                i = self._leaf_of[n]
                # A parameter whose master is updated is stored alone.
                is_weight = states.master is None or n - self.places[i].start < len(self.records.opt_records((i,)))
                if now.loads_pieces and is_weight:
                    loaded[n] = self.pieces[i].read(self._specs[n], stacks[n], self.piece(now.layer))
                continue
            index = now.layer if n < self.num_opt else now.fetch
            if index is not None:
                (loaded[n],) = read_layer([self._specs[n]], [stacks[n]], index)
        return loaded

    def store(self, states: FlatState, layer: Array, values: Mapping[int, Array]) -> FlatState:
        """Return the state with some arrays, by their places, as those of the tick of a layer."""
        stacks = self._stacks(states)
        for n, value in values.items():
            if n >= self.num_own:
                stacks[n] = self.pieces[self._leaf_of[n]].write(self._specs[n], stacks[n], self.piece(layer), value)
            else:
                (stacks[n],) = write_layer([self._specs[n]], [stacks[n]], layer, [value])
        params = list(states.params)
        for i, stack in zip(_away(self.records, self.part), stacks[self.num_opt : self.num_own], strict=True):
            params[i] = stack
        states = self.records.replace(dataclasses.replace(states, params=params), self.part, stacks[: self.num_opt])
        return with_ends(self.records, states, {i: [stacks[n] for n in places] for i, places in self.places.items()})

    def piece(self, layer: Array) -> Array:
        """Return the number of the pieces that belong to the tick of a layer."""
        return layer - self.lowest if self.lowest else layer

    def empty(self, states: FlatState, lag: int) -> Pending:
        """Return room for what was updated in the last `lag` ticks and is not stored yet."""
        stacks, found = self._stacks(states), list[Array]()
        for n, (spec, stack) in enumerate(zip(self._specs, stacks, strict=True)):
            shape = stack.shape[1:] if n < self.num_own else self.pieces[self._leaf_of[n]].shape(stack)
            found.append(jax.lax.with_sharding_constraint(jnp.zeros(shape, stack.dtype), spec.sharding))
        return [found] * lag

    def drain(self, states: FlatState, number: int, layer: Array, pending: Pending) -> tuple[FlatState, Pending]:
        """Store the oldest record after the last tick; returns the states, and the records with the next one first.

        Args:
          states: all leaves.
          number: of the layer.
          layer: the same, i32[].
          pending: what is not stored yet.
        """
        oldest, *others = pending
        # Of fewer pieces than layers the last ones have no piece.
        values = oldest if number >= self.lowest else oldest[: self.num_own]
        return self.store(states, layer, dict(enumerate(values))), [*others, oldest]

    def _stacks(self, states: FlatState) -> list[Any]:
        of_pieces = [stack for i in self.pieces for stack in record_stacks(self.records, states, (i,))]
        return [*record_stacks(self.records, states, self.part), *of_pieces]


def record_specs(records: StateRecords, part: Sequence[int]) -> list[RecordSpec]:
    """Return how the arrays of a record rest, in its order: masters and optimizer state, then parameters off the device."""
    return [*records.opt_records(part), *(records.params[i] for i in _away(records, part))]


def record_stacks(records: StateRecords, states: FlatState, part: Sequence[int]) -> list[Any]:
    """Return the stacks of the same arrays."""
    return [*records.opt_states(states, part), *(states.params[i] for i in _away(records, part))]


def with_ends(records: StateRecords, states: FlatState, ends: Mapping[int, Sequence[Any]]) -> FlatState:
    """Return the state with other records of leaves that are no stack of layers, where they rest, in their order."""
    for i, arrays in ends.items():
        num_opt, params = len(records.opt_records((i,))), list(states.params)
        params[i : i + 1] = arrays[num_opt:] or params[i : i + 1]
        states = records.replace(dataclasses.replace(states, params=params), (i,), arrays[:num_opt])
    return states


def without_ends(records: StateRecords, states: FlatState, ends: Sequence[int]) -> FlatState:
    """Return the state with nothing in place of these leaves' records: their old arrays are over as soon as new ones begin."""
    return with_ends(records, states, {i: [None] * len(record_specs(records, (i,))) for i in ends})


def _away(records: StateRecords, part: Sequence[int]) -> list[int]:
    return [i for i in part if records.params[i].is_away]


def kept_for_later(
    records: StateRecords, states: FlatState, part: Sequence[int], layer: Array, weights: list[Array], opt: list[Array]
) -> tuple[FlatState, list[Array]]:
    """Return the state with a layer's new parameters, where they rest on the device, and the record that is stored later."""
    params = [records.cast(i, w) for i, w in zip(part, weights, strict=True)]
    if not any(records.params[i].is_away for i in part):  # on the device they are written in place
        states, params = records.write_params(states, part, layer, params), []
    return states, [*(weights if states.master is not None else ()), *opt, *params]
