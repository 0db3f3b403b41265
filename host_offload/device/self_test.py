"""Check, once, that this device slices a stack in host memory at the records it is asked for.

A streamed step slices stacks `W[L, D, F]` in pinned host memory inside compiled loops, at an index read from its schedule.
XLA for GPUs may turn such a slice into a copy whose address is `offset + stride * i`, with i the count of iterations. The XLA
of jax 0.10 and 0.11 derives that address as if the index were i itself even where it is a function of i: a reversed scan, a
prefetch of i + 1, `fori_loop(1, L)` (openxla/xla 46231, fixed by 46308 of 2026-07-27). Then wrong layers are trained,
without any error. CPUs compute all of it correctly, so no test without a GPU sees it.

An index that is read from an argument of the program is no function of i, and is read where it is used. Each form below
slices that way, as the streamed step does, on records of distinct integers, and is compared exactly with numpy:

    read           load order[i]
    read_ahead     load order[i + d] into a ring of d slots, take the one loaded d ticks ago
    update         load order[i], compute, store at order[i], in place
    update_ahead   the same with the next record loaded before this one is stored
    activations    store at order[i], then a second loop loads in the reverse order

`zerojax.hlo.host_link` finds the same fault in a program that was compiled and not run.
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

DISTANCE = 2
"""d, the ring's slots in `read_ahead`."""
_SHAPE = (6, 32, 128)  # L, D, F: 16 KiB a record


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One way in which a step uses a stack.

    Attributes:
      run: (order: int32[L], stack[L, D, F] in host memory, kind) -> (stack, taken[L, D, F] in device memory), jittable with
        kind static. `taken[i]` is the record that tick i computed with. The stack may be donated.
      expect: the same with numpy: (order, stack) -> (stack, taken).
    """

    run: Callable[[jax.Array, jax.Array, str], tuple[jax.Array, jax.Array]]
    expect: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def check_host_slices(device: Any = None) -> None:
    """Run every form on `device`, in ascending and in descending order; once for each device of a process.

    Args:
      device: a jax.Device; the first local one by default.

    Raises:
      RuntimeError: a form loaded or stored the wrong record.
    """
    wrong = _wrong_forms(jax.local_devices()[0] if device is None else device)
    if wrong:
        versions = f"jax {jax.__version__}, jaxlib {importlib.metadata.version('jaxlib')}"
        raise RuntimeError(
            f"this device slices host memory at the wrong records: {', '.join(wrong)} ({versions}); training would be silently "
            "wrong. Upgrade jaxlib to one with the fix of openxla/xla issue 46231 (after 2026-07-27; 0.12 has it), or set "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator before JAX starts"
        )


@functools.cache
def _wrong_forms(device: Any) -> tuple[str, ...]:
    wrong = []
    for name, form in forms().items():
        program = build_form(form, device)
        # The fault reads record i instead of order[i]. In ascending order these may be the same.
        for direction, order in (("ascending", range(_SHAPE[0])), ("descending", reversed(range(_SHAPE[0])))):
            order, stack = np.array(list(order), np.int32), records()
            outputs = program(order, stack)
            if not all(np.array_equal(f, e) for f, e in zip(outputs, form.expect(order, stack), strict=True)):
                wrong.append(f"{name} {direction}")
    return tuple(wrong)


def forms() -> Mapping[str, Form]:
    """Return the forms by name, for this check and for callers that time or compile them."""
    return _FORMS


def build_form(form: Form, device: Any, kind: str = "pinned_host") -> Callable[[Any, Any], tuple[Any, Any]]:
    """Build (order, stack) -> (stack, taken) on `device`, with the stack in memory of `kind`.

    The first call compiles. Both arguments are copied to the device first, and the copy of the stack is donated.
    """
    here, there = SingleDeviceSharding(device, memory_kind="device"), SingleDeviceSharding(device, memory_kind=kind)
    step = jax.jit(lambda order, stack: form.run(order, stack, kind), donate_argnums=1, out_shardings=(there, here))

    def run(order: Any, stack: Any) -> tuple[Any, Any]:
        out = step(jax.device_put(order, here), jax.device_put(stack, there, may_alias=False))
        return jax.block_until_ready(out)

    return run


def records(shape: tuple[int, int, int] = _SHAPE) -> np.ndarray:
    """Return int32[L, D, F] in which no two elements are equal."""
    # No element is 0, as those of a record that was never taken are.
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape) + 1


def _load(stack: jax.Array, layer: jax.Array) -> jax.Array:
    """W[L, D, F] in host memory -> W[layer][D, F] in device memory."""
    return jax.device_put(jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False), jax.memory.Space.Device)


def _store(stack: jax.Array, record: jax.Array, layer: jax.Array, kind: str) -> jax.Array:
    """Write a record of device memory at W[layer], in place where the stack is donated."""
    space = jax.memory.Space.Host if kind == "pinned_host" else jax.memory.Space.Device
    return jax.lax.dynamic_update_index_in_dim(stack, jax.device_put(record, space), layer, 0)


def _empty(stack: jax.Array) -> jax.Array:
    return jnp.zeros(stack.shape, stack.dtype)  # taken[L, D, F], in device memory


def _compute(record: Any) -> Any:
    return 3 * record + 1


def _read(order: jax.Array, stack: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    del kind

    def tick(i: jax.Array, taken: jax.Array) -> jax.Array:
        return taken.at[i].set(_load(stack, order[i]))

    return stack, jax.lax.fori_loop(0, len(order), tick, _empty(stack))


def _read_ahead(order: jax.Array, stack: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    del kind
    padded = jnp.concatenate([order, order[:DISTANCE]])  # the last ticks fetch what nobody takes

    def tick(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        ring, taken = carry  # [d, D, F], [L, D, F]
        slot = i % DISTANCE
        return ring.at[slot].set(_load(stack, padded[i + DISTANCE])), taken.at[i].set(ring[slot])

    ring = jnp.stack([_load(stack, order[t]) for t in range(DISTANCE)])
    return stack, jax.lax.fori_loop(0, len(order), tick, (ring, _empty(stack)))[1]


def _update(order: jax.Array, stack: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    def tick(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        stack, taken = carry
        record = _load(stack, order[i])
        return _store(stack, _compute(record), order[i], kind), taken.at[i].set(record)

    return jax.lax.fori_loop(0, len(order), tick, (stack, _empty(stack)))


def _update_ahead(order: jax.Array, stack: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    padded = jnp.concatenate([order, order[-1:]])

    def tick(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        stack, record, taken = carry
        ahead = _load(stack, padded[i + 1])
        stack, ahead = jax.lax.optimization_barrier((stack, ahead))  # a write may not pass the read, or it copies the stack
        return _store(stack, _compute(record), order[i], kind), ahead, taken.at[i].set(record)

    stack, _, taken = jax.lax.fori_loop(0, len(order), tick, (stack, _load(stack, order[0]), _empty(stack)))
    return stack, taken


def _activations(order: jax.Array, stack: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    def forward(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        stack, x = carry
        return _store(stack, x, order[i], kind), _compute(x)

    def backward(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        taken, total = carry
        x = _load(stack, back[i])
        return taken.at[i].set(x + total), total + x

    back = order[::-1]
    x = _load(stack, order[0])
    stack, _ = jax.lax.fori_loop(0, len(order), forward, (stack, x))
    taken, _ = jax.lax.fori_loop(0, len(order), backward, (_empty(stack), jnp.zeros_like(x)))
    return stack, taken


def _expect_read(order: np.ndarray, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return stack, stack[order]


def _expect_update(order: np.ndarray, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _compute(stack), stack[order]


def _expect_activations(order: np.ndarray, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    saved = np.empty_like(stack)
    x = stack[order[0]]
    for layer in order:
        saved[layer], x = x, _compute(x)
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
