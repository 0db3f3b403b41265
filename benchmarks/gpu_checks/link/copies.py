"""Check slices of host memory in a loop: correct records, and bytes per second.

The bytes are measured alone and during products, one way and both ways at the same time.

A stack `W[L, D, F]` is stored in pinned host memory, and tick i of a loop uses record `order[i]`,
from the last record to the first, as in backward. The index is either read from an array or linear
in the loop's counter:

    up     load W[order[i]]
    down   store the record on the device at W[order[i]]
    both   load U[order[i]], and store the previous tick's record at W[order[i]]: one array is
           read while another is written

Products run during the copies, which depend on them only through the loop. With few products, a
copy takes longer than they do, which shows the link's speed during products. With many products,
they take longer than a copy, which shows how much copies slow them down.
"""

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpu_checks.jobs import one_device, platform_name
from gpu_checks.mixes import Copied, H
from gpu_checks.parts import KNOWN, Context
from gpu_checks.rows import Row

ALONE, BESIDE, SLOWED, BOTH = 0.9, 0.9, 1.05, 0.85
WAYS = ("up", "down", "both")
LINEAR, ARRAY, NONE = "linear", "array", "none"
GPU_OPTIONS = {
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_experimental_parallel_async_compute_limit": 64,
}
"""Compiler options of a streamed step (`zerojax.program.compile`)."""


def build_loop(
    way: str, index: str, products: int, shape: tuple[int, int, int]
) -> Callable[..., Any]:
    """Return a function (U, W, a, b, order) -> (W, a, seen).

    `seen`, float32[L, 2], holds the first and the last element of each tick's record.

    Args:
      way: one of `WAYS`; "none" moves nothing.
      index: "linear" or "array".
      products: number of products per tick.
      shape: shape of U and W.
    """
    import jax
    import jax.numpy as jnp

    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    num = shape[0]

    def loop(up: Any, down: Any, a: Any, b: Any, order: Any) -> Any:
        # Keeps elements near 1 through any number of products: numbers that fade to 0 are
        # multiplied faster.
        scale = jnp.bfloat16(b.shape[0] ** -0.5)

        def body(i: Any, carry: Any) -> Any:
            down, a, record, seen = carry
            layer = order[i] if index == ARRAY else num - 1 - i
            taken = record
            if way in ("up", "both"):
                taken = jax.device_put(
                    jax.lax.dynamic_index_in_dim(up, layer, 0, keepdims=False), device
                )
            if way in ("down", "both"):
                down = jax.lax.dynamic_update_index_in_dim(
                    down, jax.device_put(record, host), layer, 0
                )
            for _ in range(products):
                a = (a @ b) * scale
            a, taken, down = jax.lax.optimization_barrier((a, taken, down))
            seen = seen.at[i].set(jnp.stack([taken[0, 0], taken[-1, -1]]))
            return down, a, taken + 1 if way == "down" else taken, seen

        first = (down, a, jnp.zeros(shape[1:], jnp.float32), jnp.zeros((num, 2), jnp.float32))
        down, a, _, seen = jax.lax.fori_loop(0, num, body, first)
        return down, a, seen

    return loop


def jit_loop(way: str, index: str, products: int, copied: Copied, mesh: Any) -> Any:
    """Return the jitted loop; the stack that it writes is donated and stays in host memory.

    On a GPU the loop has the compiler options of a streamed step. By default XLA makes a CUDA graph
    of it, in which copies and products run in turn: on an H100, such a loop took 0.96 to 1.01 times
    the sum of their times.
    """
    import jax

    from zerojax.sharding import named

    there, here = named(mesh, (), H), named(mesh, ())
    on_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    return jax.jit(
        build_loop(way, index, products, copied.shape), donate_argnums=1,
        out_shardings=(there, here, here),
        compiler_options=GPU_OPTIONS if on_gpu else None,
    )  # fmt: skip


@dataclasses.dataclass
class Arrays:
    """Arguments of the loops.

    Attributes:
      up: stack in host memory that is read.
      down: stack in host memory that is written.
      a: left matrix of the products, on the device.
      b: right matrix of the products, on the device.
      order: indices of the records, on the device.
    """

    up: Any
    down: Any
    a: Any
    b: Any
    order: Any

    @staticmethod
    def make(copied: Copied, mesh: Any) -> "Arrays":
        """Allocate the arrays on a mesh; every element of record l of `up` is l + 1."""
        import jax
        import jax.numpy as jnp

        from zerojax.sharding import named

        there, here = named(mesh, (), H), named(mesh, ())
        num = copied.shape[0]

        def stack() -> Any:
            return (
                jnp.zeros(copied.shape, jnp.float32)
                + (1 + jnp.arange(num, dtype=jnp.float32))[:, None, None]
            )

        def move(x: Any) -> Any:
            return jax.block_until_ready(jax.device_put(x, there, may_alias=False))

        on_device = jax.jit(stack, out_shardings=here)()
        up = move(on_device)
        down = move(jax.jit(lambda: jnp.zeros(copied.shape, jnp.float32), out_shardings=here)())
        del on_device
        a, b = (
            jax.jit(
                lambda n=n, size=size: jax.random.normal(jax.random.key(n), size, jnp.bfloat16),
                out_shardings=here,
            )()
            for n, size in enumerate((copied.left, copied.right))
        )
        return Arrays(
            up, down, a, b, jax.device_put(np.arange(num, dtype=np.int32)[::-1].copy(), here)
        )

    def run(self, step: Any) -> Any:
        """Run a loop once, keep the stack that it wrote, and return `seen`."""
        import jax

        self.down, _, seen = jax.block_until_ready(
            step(self.up, self.down, self.a, self.b, self.order)
        )
        return seen

    def seconds(self, step: Any, repeats: int = 3) -> float:
        """Return the median time of a loop, in seconds."""
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            self.run(step)
            found.append(time.perf_counter() - start)
        return statistics.median(found)


def wrong_records(way: str, seen: np.ndarray, down: np.ndarray) -> int:
    """Return the number of wrong records, among loaded records and in the stack afterwards."""
    num = len(seen)
    # Tick i loads record num - 1 - i, whose elements are num - i.
    descending = np.arange(num, 0, -1, dtype=np.float32)
    wrong = 0
    if way in ("up", "both"):
        wrong += int((seen != descending[:, None]).any(1).sum())
    if way in ("down", "both"):
        # Tick i writes record num - 1 - i: the value i if way is "down", which counts up, and
        # otherwise the record that tick i - 1 loaded; tick 0 writes 0.
        stored = (
            np.arange(num, dtype=np.float32)
            if way == "down"
            else np.concatenate([[0], descending[:-1]])
        )
        wrong += int((down[:, [0, -1], [0, -1]] != stored[::-1, None]).any(1).sum())
    return wrong


def check_copies(way: str) -> Callable[[Context], Iterator[Row]]:
    """Return the check of copies in one direction or in both."""

    def rows(context: Context) -> Iterator[Row]:
        copied, mesh = context.sizes.copied, one_device()
        if "arrays" not in context.shared:
            context.shared["arrays"] = Arrays.make(copied, mesh)
        arrays = context.shared["arrays"]
        judges = platform_name() == "gpu" and not context.sizes.few
        num = copied.shape[0]
        per_tick = 4 * copied.shape[1] * copied.shape[2] * (2 if way == "both" else 1)
        best = context.known.get(
            {"up": "link.to_device", "down": "link.to_host", "both": "link.both"}[way]
        )
        few, many = copied.products
        alone_products = {}
        for products in (few, many):
            step = jit_loop(NONE, LINEAR, products, copied, mesh)
            arrays.run(step)
            alone_products[products] = arrays.seconds(step)
        for index in (LINEAR, ARRAY):
            step, name = jit_loop(way, index, 0, copied, mesh), f"{way}, {index} index"
            seen = np.asarray(arrays.run(step))
            wrong = wrong_records(way, seen, np.asarray(arrays.down))
            figure = f"{wrong} of {num} records wrong" if wrong else "right"
            yield Row(f"{name}: records", figure, "right", not wrong, {"wrong": wrong})
            seconds = arrays.seconds(step)
            rate = num * per_tick / seconds
            share = rate / best if best else float("nan")
            judged = judges and index == LINEAR and best is not None
            bound = BOTH if way == "both" else ALONE
            yield Row(
                f"{name}: alone",
                f"{rate / 1e9:.1f} GB/s, {share:.2f} of device_put's",
                f"at least {bound:g}" if judged else "",
                share >= bound if judged else None,
                {"bytes_per_second": rate, "share": share, **kernel_rate(way, index, rate)},
            )
            for products in (few, many):
                step = jit_loop(way, index, products, copied, mesh)
                arrays.run(step)
                beside, own = arrays.seconds(step), alone_products[products]
                yield from beside_rows(
                    f"{name}, {products} products", num * per_tick, seconds, own, beside, judged
                )

    return rows


def kernel_rate(way: str, index: str, rate: float) -> dict[str, float]:
    """Return the rate of kernels that read host memory, for predictions.

    Only loads with an index from an array run as such kernels; other loops return {}.
    """
    return {f"{KNOWN}rates.kernel_link": rate} if (way, index) == ("up", ARRAY) else {}


def beside_rows(
    name: str, num_bytes: float, copies: float, products: float, beside: float, judged: bool
) -> Iterator[Row]:
    """Report the time of copies and products together, over the longer of the two alone.

    The row shows the link's share of its speed if copies are longer, else the products' slowdown.
    """
    text = (
        f"{1e3 * beside:.2f} ms: copies alone {1e3 * copies:.2f}, "
        f"products alone {1e3 * products:.2f}"
    )
    values = {
        "seconds": beside,
        "copies": copies,
        "products": products,
        "over_longer": beside / max(copies, products),
    }
    if copies >= products:
        share = copies / beside
        what = f"{num_bytes / beside / 1e9:.1f} GB/s, {share:.2f} of alone; {text}"
        bound, ok = f"at least {BESIDE:g} of alone", share >= BESIDE
    else:
        slowed = beside / products
        what = f"products take {slowed:.3f} of their time; {text}"
        bound, ok = f"at most {SLOWED:g}", slowed <= SLOWED
    yield Row(f"{name}: beside", what, bound if judged else "", ok if judged else None, values)


def compile_copies(way: str) -> Callable[[Context], Iterator[Row]]:
    """Return the check that compiles a loop and reports what moves its records, by XLA's thunks."""

    def rows(context: Context) -> Iterator[Row]:
        import jax
        import jax.numpy as jnp

        from zerojax import aot, hlo
        from zerojax.sharding import named

        copied, mesh = context.sizes.copied, aot.gpu_mesh(context.chip, gpus_per_host=1)
        there, here = named(mesh, (), H), named(mesh, ())
        stack = jax.ShapeDtypeStruct(copied.shape, jnp.float32, sharding=there)
        left, right = (
            jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=here)
            for size in (copied.left, copied.right)
        )
        order = jax.ShapeDtypeStruct(copied.shape[:1], jnp.int32, sharding=here)
        for index in (LINEAR, ARRAY):
            products = copied.products[1]
            start = time.perf_counter()
            with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
                lowered = jit_loop(way, index, products, copied, mesh).lower(
                    stack, stack, left, right, order
                )
                compiled = lowered.compile(
                    {"xla_gpu_enable_triton_gemm": False, "xla_dump_to": folder}
                )
                text = compiled.as_text()
                thunks = hlo.read_thunks(folder, hlo.module_name(text))
            seconds = time.perf_counter() - start
            traffic = hlo.host_traffic(text, thunks)
            predicted = hlo.simulate(text, rates=context.chip, thunks=thunks)
            moved = sum((*traffic.by_copies.values(), *traffic.by_kernels.values()))
            records = 4 * math.prod(copied.shape) * (2 if way == "both" else 1)
            share = traffic.share_of_copies
            judged = index == LINEAR
            yield Row(
                f"{way}, {index} index, {products} products",
                f"{moved / records:.3f} of the records' bytes, {100 * share:.1f} % of them by "
                "copies; predicted "
                f"{1e3 * predicted.seconds:.2f} ms, products alone "
                f"{1e3 * predicted.compute_seconds:.2f}; compiled in "
                f"{seconds:.1f} s",
                "1.000, 99 %" if judged else "1.000",
                # More bytes would mean that a full stack is copied.
                moved == records and (share >= 0.99 or not judged),
                {
                    "share": share,
                    "moved": float(moved),
                    "predicted_seconds": predicted.seconds,
                    "compile_seconds": seconds,
                },
            )

    return rows
