"""Host memory accesses of programs compiled for an absent H200.

The tests check which record is accessed, how many bytes, and how often.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from host_offload.device import one_trip, self_test
from zerojax import aot, hlo
from zerojax.compat import GPU_JAXLIB, jaxlib_version

pytestmark = pytest.mark.xdist_group("h200")  # together with the other tests that compile for it
L, D, GPUS = 6, 512, 2
RECORD = D * D * 4 // GPUS  # bytes of a record on one GPU
STACK = L * RECORD
REVERSED = np.arange(L, dtype=np.int32)[::-1]


def compile_text(
    function: Any, returns_stack: bool = False, gpus: int = GPUS, shape: tuple[int, ...] = (L, D, D)
) -> str:
    """Compile a program and return its HLO text.

    The program is (order[L], stack[L, D, D_fsdp] on the host, x[8, D]) -> x or stack.
    """
    mesh = aot.gpu_mesh("h200", gpus_per_host=gpus)
    device = NamedSharding(
        mesh.abstract_mesh, P()
    )  # a sharding on `mesh` itself would lose its memory kind: the devices only compile
    host = NamedSharding(mesh.abstract_mesh, P(None, None, "fsdp"), memory_kind="pinned_host")
    out: Any = {False: device, True: host}[returns_stack]
    with jax.set_mesh(mesh):
        order = jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=device)
        stack = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=host)
        x = jax.ShapeDtypeStruct((8, D), jnp.int32, sharding=device)
        jitted = jax.jit(function, out_shardings=out, donate_argnums=(1,) if returns_stack else ())
        text = jitted.lower(order, stack, x).compile().as_text()
    assert text is not None
    return text


def load(stack: Any, layer: Any) -> Any:
    return jax.device_put(
        jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False), jax.memory.Space.Device
    )


def store(stack: Any, record: Any, layer: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(
        stack, jax.device_put(record, jax.memory.Space.Host), layer, 0
    )


def reads(index: Any, start: int = 0, stop: Any = L) -> Any:
    """Return a program that sums the records index(order, i) for i = start .. stop - 1."""

    def program(order: Any, stack: Any, x: Any) -> Any:
        total = jax.lax.fori_loop(
            start, stop, lambda i, t: t + load(stack, index(order, i)), jnp.zeros((D, D), jnp.int32)
        )
        return x + total[:8]

    return program


def carries(following: Any, start: int) -> Any:
    """Return a program that reads L records.

    The first is at `start`, and each next one at following(previous).
    """

    def program(order: Any, stack: Any, x: Any) -> Any:
        def tick(_: Any, carry: Any) -> Any:
            layer, total = carry
            return following(layer), 3 * total + load(stack, layer)

        return (
            x
            + jax.lax.fori_loop(0, L, tick, (jnp.int32(start), jnp.zeros((D, D), jnp.int32)))[1][:8]
        )

    return program


def updates(index: Any) -> Any:
    """Return a program that doubles records in place, at index(order, i) for i = 0 .. L - 1."""

    def program(order: Any, stack: Any, x: Any) -> Any:
        double = lambda i, s: store(s, 2 * load(s, index(order, i)) + x[0, 0], index(order, i))  # noqa: E731
        return jax.lax.fori_loop(0, L, double, stack)

    return program


def constant(order: Any, i: Any) -> Any:
    del order
    return jnp.asarray(REVERSED)[i]


INDICES = {
    "raw": lambda order, i: i,
    "argument": lambda order, i: order[i],
    "argument_reversed": lambda order, i: order[L - 1 - i],
    "argument_ahead": lambda order, i: order[(i + 2) % L],
}


@pytest.mark.parametrize("name", INDICES)
def test_reads_at_the_raw_counter_or_at_an_argument_are_safe(name):
    text = compile_text(reads(INDICES[name]))
    (found,) = hlo.host_slices(text)
    assert (found.op, found.direction) == ("dynamic-slice", "to_device")
    assert (found.num_bytes, found.times) == (RECORD, L)
    assert found.index == ("raw" if name == "raw" else "array")
    assert found.proven if name == "raw" else not found.has_descriptor
    assert hlo.unsafe_host_slices(text) == []
    assert hlo.host_copies(text) == []
    assert hlo.host_link_bytes(text) == {"to_device": STACK, "to_host": 0}


@pytest.mark.parametrize("name", ["raw", "argument", "argument_reversed"])
def test_updates_in_place_move_each_record_once_each_way(name):
    text = compile_text(updates(INDICES[name]), returns_stack=True)
    found = {s.op: s for s in hlo.host_slices(text)}
    assert {op: s.direction for op, s in found.items()} == {
        "dynamic-slice": "to_device",
        "dynamic-update-slice": "to_host",
    }
    assert {(s.num_bytes, s.times) for s in found.values()} == {(RECORD, L)}
    assert {s.index for s in found.values()} == {"raw" if name == "raw" else "array"}
    assert hlo.unsafe_host_slices(text) == []
    assert hlo.host_copies(text) == []
    assert hlo.host_link_bytes(text) == {"to_device": STACK, "to_host": STACK}


@pytest.mark.parametrize(
    ("program", "returns_stack", "offset", "stride"),
    [
        pytest.param(reads(constant), False, (L - 1) * RECORD, -RECORD, id="constant_order"),
        pytest.param(
            reads(lambda order, i: L - 1 - i), False, (L - 1) * RECORD, -RECORD, id="reversed_scan"
        ),
        pytest.param(reads(lambda order, i: i, start=1), False, RECORD, RECORD, id="loop_from_1"),
        pytest.param(
            carries(lambda layer: layer - 1, L - 1),
            False,
            (L - 1) * RECORD,
            -RECORD,
            id="carried_downwards",
        ),
        pytest.param(
            updates(constant), True, (L - 1) * RECORD, -RECORD, id="constant_order_written"
        ),
    ],
)
def test_functions_of_the_counter_are_found_where_xla_derives_them_wrongly(
    program, returns_stack, offset, stride
):
    """The control of both tests above, as long as XLA has the bug."""
    text = compile_text(program, returns_stack)
    slices = hlo.host_slices(text)
    assert {s.index for s in slices} == {"other"}
    assert all(s.has_descriptor for s in slices)
    if {s.descriptor for s in slices} == {hlo.Descriptor(offset, stride, 0)}:
        assert hlo.unsafe_host_slices(text) == []
        pytest.skip(
            f"the XLA of jax {jax.__version__} derives this index correctly: offset {offset}, stride {stride}"
        )
    assert hlo.unsafe_host_slices(text) == slices


def test_an_altered_descriptor_is_unsafe():
    text = compile_text(reads(INDICES["raw"]))
    (found,) = hlo.host_slices(text)
    assert found.descriptor == hlo.Descriptor(0, RECORD, 0)
    stride = f'"byte_stride":"{RECORD}"'
    assert text.count(stride) == 1
    for altered in (
        f'"byte_stride":"-{RECORD}"',
        '"byte_stride":"0"',
        f'"byte_stride":"{RECORD}","modulus":"3"',
    ):
        (found,) = hlo.unsafe_host_slices(text.replace(stride, altered))
        assert found.index == "raw"


@pytest.mark.parametrize(
    ("following", "start", "kind"),
    [
        pytest.param(lambda layer: layer + 1, 0, "raw", id="counts"),
        pytest.param(lambda layer: (2 * layer + 1) % L, 0, "other", id="jumps"),  # 0, 1, then 3
        pytest.param(lambda layer: layer, 2, "constant", id="stays"),
    ],
)
def test_a_carried_index_is_raw_only_if_it_counts_up_from_0(following, start, kind):
    text = compile_text(carries(following, start))
    found = hlo.host_slices(text)
    assert {s.index for s in found} == {kind}
    assert sum(s.times for s in found) in (
        1,
        L,
    )  # a record that stays may be loaded before the loop
    assert hlo.unsafe_host_slices(text) == []


def test_slices_in_nested_loops_run_as_often_as_both():
    def nested(order: Any, stack: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, x: reads(INDICES["raw"])(order, stack, x), x)

    text = compile_text(nested)
    assert [(s.times, s.index) for s in hlo.host_slices(text)] == [(3 * L, "raw")]
    assert hlo.unsafe_host_slices(text) == []
    assert hlo.host_link_bytes(text)["to_device"] == 3 * STACK


def test_slices_under_a_condition_are_found():
    def guarded(order: Any, stack: Any, x: Any) -> Any:
        def tick(i: Any, total: Any) -> Any:
            layer = order[i]
            return total + jax.lax.cond(
                layer >= 0, lambda: load(stack, layer), lambda: jnp.zeros((D, D), jnp.int32)
            )

        return x + jax.lax.fori_loop(0, L, tick, jnp.zeros((D, D), jnp.int32))[:8]

    text = compile_text(guarded)
    assert [(s.num_bytes, s.times, s.index) for s in hlo.host_slices(text)] == [
        (RECORD, L, "array")
    ]


def test_whole_stacks_that_are_copied_are_found():
    def whole(order: Any, stack: Any, x: Any) -> Any:
        return x + jax.device_put(stack, jax.memory.Space.Device)[order[0], :8]

    def whole_back(order: Any, stack: Any, x: Any) -> Any:
        return jax.device_put(
            2 * jax.device_put(stack, jax.memory.Space.Device) + x[0, 0], jax.memory.Space.Host
        )

    (copy,) = hlo.host_copies(compile_text(whole))
    assert (copy.direction, copy.num_bytes, copy.times) == ("to_device", STACK, 1)
    text = compile_text(whole_back, returns_stack=True)
    assert hlo.host_slices(text) == []
    assert hlo.host_link_bytes(text) == {"to_device": STACK, "to_host": STACK}


def test_a_loop_without_a_trip_count_is_refused_or_told():
    def once(order: Any, stack: Any, x: Any) -> Any:
        return reads(INDICES["argument"], stop=order[0])(order, stack, x)

    text = compile_text(once)
    for count in (hlo.host_slices, hlo.host_link_bytes):
        with pytest.raises(ValueError, match="trip count is unknown: give unknown_trips"):
            count(text)
    assert hlo.host_link_bytes(text, unknown_trips=3) == {"to_device": 3 * RECORD, "to_host": 0}
    assert [s.index for s in hlo.host_slices(text, unknown_trips=1)] == ["array"]
    assert hlo.unsafe_host_slices(text, unknown_trips=1) == []


@pytest.mark.skipif(
    jaxlib_version() < GPU_JAXLIB,
    reason="the XLA of jaxlib before 0.11.1 derives wrong addresses",
)
@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("name", self_test.forms())
def test_forms_of_the_self_test_are_copies_at_proven_addresses(name, step):
    order = self_test.Order(0 if step == 1 else L - 1, step, L)

    def program(_: Any, stack: Any, x: Any) -> Any:
        stack, taken = self_test.forms()[name].run(order, stack, "pinned_host")
        last = lambda i, s: store(s, taken[0] + x[0, 0], i)  # noqa: E731
        return one_trip(0, last, stack)

    text = compile_text(program, returns_stack=True, gpus=1)
    slices = hlo.host_slices(text)
    assert all(s.proven for s in slices)
    assert hlo.unsafe_host_slices(text) == []
    assert hlo.host_copies(text) == []
    stores = L if name in ("update", "update_ahead", "activations") else 0
    loads = L + (name == "activations")
    assert hlo.host_link_bytes(text) == {
        "to_device": loads * GPUS * RECORD,
        "to_host": (stores + 1) * GPUS * RECORD,
    }


def test_a_loop_of_one_trip_is_kept_and_its_bound_is_known():
    def program(order: Any, stack: Any, x: Any) -> Any:
        mesh: Any = jax.sharding.get_abstract_mesh()
        return (
            x + one_trip(3, lambda i, t: t + load(stack, i), jnp.zeros((D, D), jnp.int32), mesh)[:8]
        )

    text = compile_text(program)
    assert text.count(" while(") == text.count('"known_trip_count":{"n":"1"}') == 1
    (found,) = hlo.host_slices(text)
    assert (found.num_bytes, found.times, found.index) == (RECORD, 1, "constant")
    assert found.has_descriptor  # a copy; outside a loop it would be a kernel
    # Only the sum's shards are gathered, for x. Each device draws for itself; a number sent by one
    # device would be reduced.
    assert {c.op for c in hlo.collectives(text)} <= {"all-gather"}


def test_a_form_at_the_raw_counter_is_told_from_one_at_the_argument():
    form = self_test.forms()["update"]
    raw = dataclasses.replace(
        form, run=lambda order, stack, kind: form.run(jnp.arange(L), stack, kind)
    )
    text = compile_text(
        lambda order, stack, x: raw.run(order, stack, "pinned_host")[0], returns_stack=True, gpus=1
    )
    assert {s.index for s in hlo.host_slices(text)} == {"raw"}
