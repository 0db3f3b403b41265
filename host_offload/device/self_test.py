"""Check that this device slices host memory at the right records, to detect a bug in XLA.

A streamed step slices stacks `W[L, D, F]` in pinned host memory inside compiled loops. The index is
linear in the loop's counter i, `first + step * i`. XLA derives the address `offset + stride * i`
when it compiles, and a copy engine moves the record, which leaves the cores free for matrix
products. A record with a nonlinear index is moved by a kernel, whose threads read host memory over
the link.

Up to jaxlib 0.11.0, XLA for GPUs derives that address as if the index were i itself (openxla/xla
46231, fixed by 46308 of 2026-07-27 and in jaxlib from 0.11.1 on). Wrong layers are then trained,
without any error. CPUs compute the right address, so no test without a GPU detects the bug. Each
form below slices in both directions, as the streamed step does, on records of distinct integers,
and is compared exactly with numpy:

    read           load order[i]
    read_ahead     load order[i + d] into a ring of d slots, take the record loaded d ticks ago
    update         load order[i], compute, store at order[i], in place
    update_ahead   like update, but load the next record before storing this one
    activations    store at order[i]; then a second loop loads in the reverse order

A tick that differs from all others is a loop of one iteration (`host_offload.device.loops`).
`zerojax.hlo.host_link` finds the same bug in a compiled program without running it.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_offload.device.loops import one_trip

DISTANCE = 2
"""Number of slots, d, of the ring in `read_ahead`."""
_SHAPE = (6, 32, 128)  # L, D, F: 16 KiB per record


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """The layer of each tick, linear in the tick: `order[i] = first + step * i`.

    Attributes:
      first: layer of tick 0, order[0].
      step: difference between the layers of consecutive ticks.
      num: number of ticks, L.
    """

    first: int
    step: int
    num: int

    def __len__(self) -> int:
        """Return the number of ticks."""
        return self.num

    def __getitem__(self, i: Any) -> Any:
        """Return the layer of tick i, an int32."""
        return jnp.int32(self.first) + jnp.int32(self.step) * i


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One way in which a step uses a stack.

    Attributes:
      run: function (order, stack[L, D, F] in host memory, kind) -> (stack, inputs[L, D, F] in
        device memory), jittable with order and kind static. `inputs[i]` is the record that tick i
        computed with. The stack may be donated.
      expect: function (order, stack) -> (stack, inputs) that computes the same result in numpy.
    """

    run: Callable[[Order, jax.Array, str], tuple[jax.Array, jax.Array]]
    expect: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def check_host_slices(device: Any = None) -> None:
    """Check that a device slices host memory at the right records.

    Every form is run with the layers in ascending and in descending order. The result is cached per
    device.

    Args:
      device: jax.Device to check; by default, the first local device.

    Raises:
      RuntimeError: a form loaded or stored the wrong record.
    """
    wrong = _wrong_forms(jax.local_devices()[0] if device is None else device)
    if wrong:
        versions = f"jax {jax.__version__}, jaxlib {importlib.metadata.version('jaxlib')}"
        raise RuntimeError(
            f"this device slices host memory at the wrong records: {', '.join(wrong)} "
            f"({versions}); training would be silently wrong. Upgrade jaxlib to 0.11.1 or later, "
            "which fixes openxla/xla issue 46231, or set "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator before JAX starts"
        )


@functools.cache
def _wrong_forms(device: Any) -> tuple[str, ...]:
    ascending = np.arange(_SHAPE[0], dtype=np.int32)
    # With the bug, record i is read instead of order[i]. In ascending order they may be equal.
    orders = {"ascending": ascending, "descending": ascending[::-1]}
    wrong = []
    for name, form in forms().items():
        program = build_form(form, device)
        for direction, order in orders.items():
            stack = records()
            outputs = program(order, stack)
            expected = form.expect(order, stack)
            if not all(map(np.array_equal, outputs, expected)):
                wrong.append(f"{name} {direction}")
    return tuple(wrong)


def forms() -> Mapping[str, Form]:
    """Return the forms by name, for this check and for code that times or compiles them."""
    return _FORMS


def build_form(
    form: Form, device: Any, kind: str = "pinned_host"
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Build a function (order, stack) -> (stack, inputs) that runs a form on a device.

    `order` is a numpy int32[L]. The first call with an order compiles. The stack is first copied to
    memory of `kind`, and the copy is donated. The function raises ValueError if the order is not
    linear.

    Args:
      form: form to run.
      device: jax.Device to run on.
      kind: memory kind of the stack.
    """
    on_device = SingleDeviceSharding(device, memory_kind="device")
    on_host = SingleDeviceSharding(device, memory_kind=kind)

    def run_form(order: Order, stack: jax.Array) -> tuple[jax.Array, jax.Array]:
        return form.run(order, stack, kind)

    step = jax.jit(run_form, static_argnums=0, donate_argnums=1, out_shardings=(on_host, on_device))

    def run(order: np.ndarray, stack: np.ndarray) -> tuple[jax.Array, jax.Array]:
        copied = jax.device_put(stack, on_host, may_alias=False)
        return jax.block_until_ready(step(linear_order(order), copied))

    return run


def linear_order(order: np.ndarray) -> Order:
    """Return the linear order that equals an array.

    Args:
      order: numpy int32[L], layer of each tick.

    Raises:
      ValueError: the order is not linear.
    """
    steps = np.diff(order)
    if len(set(steps.tolist())) > 1:
        raise ValueError(
            f"the order {order.tolist()} is not linear: its steps are {steps.tolist()}"
        )
    return Order(int(order[0]), int(steps[0]) if len(steps) else 1, len(order))


def records(shape: tuple[int, int, int] = _SHAPE) -> np.ndarray:
    """Return a numpy int32[L, D, F] with distinct elements, none of which is 0."""
    # Elements of a record that was never loaded are 0.
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape) + 1


def _load(stack: jax.Array, layer: jax.Array) -> jax.Array:
    """Load record W[layer], [D, F], from a stack in host memory to device memory."""
    return jax.device_put(
        jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False), jax.memory.Space.Device
    )


def _store(stack: jax.Array, record: jax.Array, layer: jax.Array, kind: str) -> jax.Array:
    """Store a record from device memory at W[layer], in place if the stack is donated."""
    space = jax.memory.Space.Host if kind == "pinned_host" else jax.memory.Space.Device
    return jax.lax.dynamic_update_index_in_dim(stack, jax.device_put(record, space), layer, 0)


def _empty(stack: jax.Array) -> jax.Array:
    return jnp.zeros(stack.shape, stack.dtype)  # inputs[L, D, F], in device memory


def _compute(record: Any) -> Any:
    return 3 * record + 1


def _read(order: Order, stack: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    del kind

    def tick(i: jax.Array, inputs: jax.Array) -> jax.Array:
        return inputs.at[i].set(_load(stack, order[i]))

    return stack, jax.lax.fori_loop(0, len(order), tick, _empty(stack))


def _read_ahead(order: Order, stack: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    del kind
    fetching = len(order) - DISTANCE

    def preload(i: jax.Array, ring: jax.Array) -> jax.Array:
        return ring.at[i].set(_load(stack, order[i]))

    def last(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        ring, inputs = carry  # [d, D, F], [L, D, F]
        return ring, inputs.at[i].set(ring[i % DISTANCE])

    def tick(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        ring, inputs = last(i, carry)
        return ring.at[i % DISTANCE].set(_load(stack, order[i + DISTANCE])), inputs

    ring = jax.lax.fori_loop(
        0, DISTANCE, preload, jnp.zeros((DISTANCE, *stack.shape[1:]), stack.dtype)
    )
    carry = jax.lax.fori_loop(0, fetching, tick, (ring, _empty(stack)))
    return stack, jax.lax.fori_loop(fetching, len(order), last, carry)[1]


def _update(order: Order, stack: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    def tick(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        stack, inputs = carry
        record = _load(stack, order[i])
        return _store(stack, _compute(record), order[i], kind), inputs.at[i].set(record)

    return jax.lax.fori_loop(0, len(order), tick, (stack, _empty(stack)))


def _update_ahead(order: Order, stack: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    last = len(order) - 1

    def tick(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array], fetches: bool = True
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        stack, record, inputs = carry
        ahead = _load(stack, order[i + 1]) if fetches else record
        # The write must not be moved before the read, or XLA copies the stack.
        stack, ahead = jax.lax.optimization_barrier((stack, ahead))
        return _store(stack, _compute(record), order[i], kind), ahead, inputs.at[i].set(record)

    record = one_trip(
        0,
        lambda i, record: record + _load(stack, order[i]),
        jnp.zeros(stack.shape[1:], stack.dtype),
    )
    carry = jax.lax.fori_loop(0, last, tick, (stack, record, _empty(stack)))
    stack, _, inputs = one_trip(last, functools.partial(tick, fetches=False), carry)
    return stack, inputs


def _activations(order: Order, stack: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    num = len(order)

    def forward(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        stack, x = carry
        return _store(stack, x, order[i], kind), _compute(x)

    def backward(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        inputs, total = carry
        x = _load(stack, order[num - 1 - i])
        return inputs.at[i].set(x + total), total + x

    x = one_trip(
        0, lambda i, x: x + _load(stack, order[i]), jnp.zeros(stack.shape[1:], stack.dtype)
    )
    stack, _ = jax.lax.fori_loop(0, num, forward, (stack, x))
    inputs, _ = jax.lax.fori_loop(0, num, backward, (_empty(stack), jnp.zeros_like(x)))
    return stack, inputs


def _expect_read(order: np.ndarray, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return stack, stack[order]


def _expect_update(order: np.ndarray, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _compute(stack), stack[order]


def _expect_activations(order: np.ndarray, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    saved = np.empty_like(stack)
    x = stack[order[0]]
    for layer in order:
        saved[layer] = x
        x = _compute(x)
    return saved, np.cumsum(saved[order[::-1]], axis=0, dtype=stack.dtype)


_FORMS = MappingProxyType(
    {
        "read": Form(_read, _expect_read),
        "read_ahead": Form(_read_ahead, _expect_read),
        "update": Form(_update, _expect_update),
        "update_ahead": Form(_update_ahead, _expect_update),
        "activations": Form(_activations, _expect_activations),
    }
)
