"""Loads and stores during a tick's products: their turns, and the products they precede."""

import dataclasses
import itertools
import types

import encoder_decoder
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from host_offload.schedule import (
    HEAD,
    HEAD_PIECES,
    LATE_UNSTACKED,
    LAYERS,
    UnstackedMove,
    build_schedule,
)
from zerojax.grads.beside import beside, equal_parts
from zerojax.optim import late_records as crossings
from zerojax.state import state_records
from zerojax.streamed.phases import Tick

HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stand-in for a stack in host memory that logs its loads and stores."""

    name: str
    log: list

    def read(self, stack, index):
        self.log.append(("load", self.name, index))
        return f"{self.name}[{index}]"

    def write(self, stack, index, value):
        self.log.append(("store", self.name, index, value.name))
        return stack


class Records:
    """Optimizer state and parameters of a record, stored in host memory as several arrays."""

    def __init__(self, num_opt, num_params):
        self.log = []
        self.opt = [Stack(f"opt{n}", self.log) for n in range(num_opt)]
        self.params = [Stack(f"param{n}", self.log) for n in range(num_params)]
        for stack in self.params:
            object.__setattr__(stack, "is_away", True)

    def opt_records(self, part):
        return self.opt

    def opt_states(self, states, part):
        return list(self.opt)

    def replace(self, states, part, stacks):
        return states


@dataclasses.dataclass(frozen=True)
class State:
    params: tuple


def crossing(sizes, num_groups, fetch=7, stored=9, num_params=0):
    records = Records(len(sizes) - num_params, num_params)
    pending = [
        types.SimpleNamespace(name=f"new{n}", size=size, dtype=np.dtype("int8"))
        for n, size in enumerate(sizes)
    ]
    now = Tick(8, 8, None, None, True, False, fetch=fetch, stored=stored)
    part = range(max(num_params, 1)) if num_params else []
    late = crossings.LateRecord(records, part)
    return records, crossings.DuplexTransfer(
        late, num_groups, now, [pending], State(tuple(records.params))
    )


@pytest.mark.parametrize("num_groups", [2, 3, 4])
@pytest.mark.parametrize(
    ("sizes", "num_params"),
    [([5, 4, 3, 3, 2, 1], 0), ([9, 9, 9, 4, 4, 4, 1, 1, 1], 3), ([7, 2], 0)],
)
def test_each_array_is_loaded_and_stored_once_and_never_in_one_turn(sizes, num_params, num_groups):
    records, crosses = crossing(sizes, num_groups, num_params=num_params)
    crossed, turns = crosses.begin(), []
    for number in range(crosses.num_turns):
        if number:
            crossed = crosses.turn(number, crossed)
        turns.append(list(records.log))
        records.log.clear()
    names = {stack.name for stack in (*records.opt, *records.params)}
    for verb in ("load", "store"):
        assert sorted(move[1] for turn in turns for move in turn if move[0] == verb) == sorted(
            names
        )
    for turn in turns:
        assert not {m[1] for m in turn if m[0] == "load"} & {m[1] for m in turn if m[0] == "store"}
        loaded = [m for m in turn if m[0] == "load"]
        # Optimizer state of the updated layer and parameters of the fetched layer, while the
        # previous layer is stored.
        assert all(m[2] == (7 if m[1].startswith("param") else 8) for m in loaded)
        assert all(m[2] == 9 for m in turn if m[0] == "store")
    filled = [sum(sizes[n] for n in group) for group in crosses.groups]
    assert max(filled) - min(filled) <= max(sizes)
    opt, params = crosses.loaded(crossed)
    assert opt == [f"opt{n}[8]" for n in range(len(sizes) - num_params)]
    assert params == [f"param{n}[7]" for n in range(num_params)]


def test_the_first_tick_stores_nothing_and_the_last_one_fetches_nothing():
    records, crosses = crossing([3, 2, 1, 1], 2, fetch=None, stored=None, num_params=2)
    crosses.turn(1, crosses.begin())
    assert {m[1] for m in records.log} == {"opt0", "opt1"}
    assert {m[0] for m in records.log} == {"load"}


def names_of(function, args, turns):
    """Return the products and barriers of `beside`'s result, in order."""
    jaxpr = jax.make_jaxpr(lambda *args: beside(function, args, jnp.zeros(2), turns)[0])(*args)
    short = {"dot_general": "m", "optimization_barrier": "|"}
    return "".join(short.get(eqn.primitive.name, "") for eqn in jaxpr.eqns)


def turn(operands, work):
    return jax.lax.optimization_barrier((operands, work))


@pytest.mark.parametrize(
    ("widths", "num_turns", "expected"),
    [
        ([8, 8, 8, 8, 8], 3, "m|m|m|m"),  # FLOPs 1 1 1 1: turns at 1/4, 1/2 and 3/4 of the FLOPs
        ([8, 8, 8, 8, 8], 1, "mm|mm"),
        ([8, 8, 8, 8, 8], 0, "mmm|m"),  # only the work
        ([64, 8, 8, 8, 8], 1, "m|mmm"),  # FLOPs 8 1 1 1
        ([8, 8, 64], 2, "m||m"),  # the last product takes most of the FLOPs
    ],
)
def test_turns_are_taken_at_equal_shares_of_the_flops(widths, num_turns, expected):
    args = [jnp.ones((4, widths[0])), *(jnp.ones(shape) for shape in itertools.pairwise(widths))]

    def chain(x, *weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    assert names_of(chain, args, [turn] * num_turns) == expected


def test_results_are_computed_before_the_turn_that_follows_them():
    """Without this, XLA would move a gradient that nothing waits for behind the last turn."""

    def two(x, a, b):
        return x @ a, (x @ b) @ b

    args = [jnp.ones((4, 4))] * 3
    jaxpr = jax.make_jaxpr(lambda *args: beside(two, args, jnp.zeros(2), [turn, turn])[0])(*args)
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    first_product = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general").outvars[
        0
    ]
    assert first_product in barriers[0].invars
    assert barriers[0].outvars[list(barriers[0].invars).index(first_product)] in jaxpr.jaxpr.outvars


def test_products_that_nothing_reads_part_no_turns():
    """XLA drops such products, and two turns would become one."""

    def two(x, a, b):
        unread = x @ a @ b @ b  # noqa: F841
        return x @ a @ b

    assert names_of(two, [jnp.ones((4, 4))] * 3, [turn]) == "m|m"


def test_a_function_without_products_takes_its_turns_after_it():
    (y, work) = beside(
        jnp.tanh, (jnp.zeros(3),), 1, [lambda o, w: (o, w + 1), lambda o, w: (o, 10 * w)]
    )
    assert (y.shape, work) == ((3,), 20)


def crossed(phase):
    """Return the transfers of a phase in order: ((lane, kind, layer), which leaves)."""
    found = [op for _, ops in phase.ticks() for op in ops if op.lane in ("up", "down")]
    return [((op.lane, op.record.kind, op.number), op.record.leaves) for op in found]


def ends_of(phase):
    """Return when the leaves that are updated during a phase are moved.

    The result is (leaves, first tick of their loads, last tick of their stores).
    """
    found = [
        (leaves, phase.list_ticks(leaves, "load"), phase.list_ticks(leaves, "store"))
        for leaves in (HEAD, LATE_UNSTACKED)
    ]
    return [(leaves, loads[0], stores[-1]) for leaves, loads, stores in found if loads]


def test_late_stores_are_those_of_the_tick_before_and_the_last_one_is_drained():
    tiers = {"opt_state": HOST, "params": HOST}
    late, now = (
        build_schedule(4, 1, tiers=tiers, update="in_backward", stores_late=late) for late in (1, 0)
    )
    phase, same = late.phase("backward"), now.phase("backward")
    assert (phase.store.tolist(), phase.drain.tolist()) == ([-1, 3, 2, 1], [0])
    assert (same.store.tolist(), same.drain.tolist()) == ([3, 2, 1, 0], [])
    assert phase.stores_late == 1
    assert not late.phase("forward").stores_late
    assert "writes opt_state, params a tick late" in str(late)
    assert str(late).splitlines()[-1].split() == ["backward", "after", "-", "-", "-", "-", "0"]
    assert "late" not in str(now)
    assert sorted(crossed(phase)) == sorted(crossed(same))  # in another order


# --- unstacked leaves -----------------------------------------------------------------------------


def test_the_head_is_stored_in_the_first_tick_and_the_others_are_loaded_beside_the_drain():
    tiers, sizes = (
        {"opt_state": HOST, "params": HOST},
        {"opt_state": 100, "params": 10, "grads": 1, "gathered": 20},
    )
    options = {"tiers": tiers, "update": "in_backward", "record_bytes": sizes}
    ends = [UnstackedMove(HEAD, (30,)), UnstackedMove(LATE_UNSTACKED, (7,))]
    late = build_schedule(4, 1, stores_late=1, unstacked=ends, **options)
    phase, plain = late.phase("backward"), build_schedule(4, 1, stores_late=1, **options)
    assert ends_of(phase) == [(HEAD, -1, 0), (LATE_UNSTACKED, 4, 5)]
    more = late.in_flight()["backward"] - plain.in_flight()["backward"]
    assert more.tolist() == [30, 0, 0, 0]
    assert (
        "head: fetched before the loop, stored tick 0; embedding and head: after the loop"
        in str(late)
    )
    lanes = [line.split() for line in late.timeline().splitlines() if "unstacked" in line]
    assert lanes == [["fetch", "unstacked", *"H|....L."], ["store", "unstacked", *".|H....L"]]
    assert not ends_of(
        build_schedule(4, 1, unstacked=ends, **options).phase("backward")
    )  # stores are not late
    with pytest.raises(
        ValueError,
        match="unstacked has unknown 'tail': choose from head, head_pieces, late_unstacked",
    ):
        build_schedule(4, 1, unstacked=[UnstackedMove("tail", (1,))], **options)


@pytest.mark.parametrize(
    ("count", "more", "lanes"),
    [
        (4, [5, 10, 10, 10], ["fetch unstacked HHHHL.", "store unstacked .HHHHL"]),
        (2, [5, 10, 5, 0], ["fetch unstacked HH..L.", "store unstacked .HH..L"]),
    ],
)
def test_a_large_head_is_updated_in_pieces_beside_the_first_ticks(count, more, lanes):
    tiers, sizes = {"opt_state": HOST}, {"opt_state": 100}
    options = {"tiers": tiers, "update": "in_backward", "record_bytes": sizes, "stores_late": 1}
    pieces, others = UnstackedMove(HEAD_PIECES, (5,), (count,)), UnstackedMove(LATE_UNSTACKED, (7,))
    schedule, plain = (
        build_schedule(4, 1, unstacked=[pieces, others], **options),
        build_schedule(4, 1, **options),
    )
    assert (schedule.in_flight()["backward"] - plain.in_flight()["backward"]).tolist() == more
    assert f"; {count} pieces of the head: one a tick" in str(schedule)
    ticks = schedule.phase("backward").ticks()
    loaded = [
        op.number
        for _, ops in ticks
        for op in ops
        if (op.verb, op.record.leaves) == ("load", HEAD_PIECES)
    ]
    # like the layers during whose update they are updated
    assert loaded == list(range(count))[::-1]
    drawn = [line.split() for line in schedule.timeline().splitlines() if "unstacked" in line]
    assert [" ".join([*words[:2], "".join(words[2:])]) for words in drawn] == lanes
    with pytest.raises(ValueError, match="counts of head_pieces=5: 1 to 4"):
        build_schedule(4, 1, unstacked=[pieces._replace(counts=(5,))], **options)


def two_stacks(config):
    """Return the losses, trained state and schedule of a model of two stacks after three steps."""
    with zj.build_train_step(
        encoder_decoder.model(), optax.adamw(1e-2), config, zj.make_mesh(devices=jax.devices()[:2])
    ) as p:
        state, losses = p.init(jax.random.key(0)), []
        for batch in encoder_decoder.batches(3):
            state, metrics = p.step(state, batch)
            losses.append([metrics["loss"], metrics["grad_norm"]])
        leaves = jax.tree.leaves([tree for _, tree in p.iter_params(state)])
        return [np.asarray(a) for a in (losses, *leaves)], p.schedule


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fields", "expected_moves"),
    [
        (
            {"update": "in_backward"},
            {"decoder/backward": [HEAD], "encoder/backward": [LATE_UNSTACKED]},
        ),
        ({"clip_norm": 0.5}, {"decoder/update": [LATE_UNSTACKED]}),
    ],
    ids=["in_backward", "after_backward"],
)
def test_two_stacks_update_ends_beside_the_last_store_to_the_same_numbers(
    fields, expected_moves, monkeypatch
):
    """In backward, the first tick of the last stack stores the head."""
    config = zj.ZeroConfig(stage=3, opt_state=HOST, num_microbatches=2, **fields)
    expected, plain = two_stacks(config)
    monkeypatch.setattr(state_records, "crosses_link", lambda mesh: True)
    found, schedule = two_stacks(config)
    moves = {
        phase.name: [leaves for leaves, *_ in ends_of(phase)]
        for phase in schedule.phases
        if ends_of(phase)
    }
    assert moves == expected_moves
    assert not any(map(ends_of, plain.phases))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.max(np.abs(b)))


def test_an_update_after_backward_loads_in_its_tick_and_stores_a_tick_late():
    tiers = {"opt_state": HOST}
    ends = [UnstackedMove(LATE_UNSTACKED, (7,))]
    late, plain = (
        build_schedule(4, 1, tiers=tiers, stores_late=is_late, unstacked=ends) for is_late in (1, 0)
    )
    phase = late.phase("update")
    assert (phase.store.tolist(), phase.drain.tolist(), len(phase.preload)) == (
        [-1, 0, 1, 2],
        [3],
        0,
    )
    assert (phase.fetches, phase.reads, phase.writes) == ((), ("opt_state",), ("opt_state",))
    assert ends_of(phase) == [(LATE_UNSTACKED, 4, 5)]
    assert not late.phase("backward").stores_late
    assert plain.phase("update").fetches == ("opt_state",)
    of_layers = [moved for moved, leaves in crossed(phase) if leaves == LAYERS]
    assert sorted(of_layers) == sorted(
        moved for moved, _ in crossed(plain.phase("update"))
    )  # in another order


@pytest.mark.parametrize(
    ("sizes", "num_parts", "begins"),
    [
        ([1, 1, 1, 1], 4, [1, 2, 3]),
        ([1, 5, 5, 5, 1, 1], 3, [2, 3]),  # starting when a third is full would give 6, 10 and 2
        ([4, 4, 1, 1, 1, 1], 3, [1, 2]),
        ([1, 9], 3, [1]),
        ([5], 3, []),
    ],
)
def test_parts_are_as_equal_as_can_be(sizes, num_parts, begins):
    assert equal_parts(sizes, num_parts) == begins
