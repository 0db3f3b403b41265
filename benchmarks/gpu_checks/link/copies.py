"""Slices of host memory in a loop: the right records, bytes a second alone and beside products, one
way and both at once.

A stack `W[L, D, F]` rests in pinned host memory, and tick i of a loop uses record `order[i]`, from
the last to the first, as backward does. The index is read from an array, or linear in the loop's
counter:

    up     load W[order[i]]
    down   store what is on the device at W[order[i]]
    both   load U[order[i]], and store at W[order[i]] what the tick before loaded: while one array is read another is written

Beside them run products that nothing but the loop ties to the copies: as few as let a copy be the
longer of the two, which tells the link's speed beside products, or as many as take longer than it,
which tells what copies cost products.
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
"""Those of a streamed step (`zerojax.program.compile`)."""


def build_loop(
    way: str, index: str, products: int, shape: tuple[int, int, int]
) -> Callable[..., Any]:
    """Return (U, W, a, b, order) -> (W, a, seen f32[L, 2]): of each tick's record the first and the
    last element.

    Args:
      way: of `WAYS`; "none" moves nothing.
      index: "linear" or "array".
      products: in a tick.
      shape: of U and W.
    """
    import jax
    import jax.numpy as jnp

    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    num = shape[0]

    def loop(up: Any, down: Any, a: Any, b: Any, order: Any) -> Any:
        # Keeps elements near 1 however many products follow each other: numbers that fade to 0 are
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
    """Return the loop, jitted: the stack that it writes is donated, and stays in host memory.

    On a GPU it has the options of a streamed step. By default XLA makes a CUDA graph of it, in
    which copies and products run in turn: on an H100 the loop took 0.96 to 1.01 times the sum of
    their times.
    """
    import jax

    from zerojax.sharding import named

    there, here = named(mesh, (), H), named(mesh, ())
    on_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    return jax.jit(
        build_loop(way, index, products, copied.shape), donate_argnums=1, out_shardings=(there, here, here),
        compiler_options=GPU_OPTIONS if on_gpu else None,
    )  # fmt: skip


@dataclasses.dataclass
class Arrays:
    """What the loops run over: stacks in host memory, matrices on the device, the order as an
    array.
    """

    up: Any
    down: Any
    a: Any
    b: Any
    order: Any

    @staticmethod
    def make(copied: Copied, mesh: Any) -> "Arrays":
        """Make them. Record l of `up` is l + 1 everywhere."""
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
        """Run a loop once; returns what it saw, and keeps the stack."""
        import jax

        self.down, _, seen = jax.block_until_ready(
            step(self.up, self.down, self.a, self.b, self.order)
        )
        return seen

    def seconds(self, step: Any, repeats: int = 3) -> float:
        """Return the median time of a loop."""
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            self.run(step)
            found.append(time.perf_counter() - start)
        return statistics.median(found)


def wrong_records(way: str, seen: np.ndarray, down: np.ndarray) -> int:
    """Return how many records were not the right ones: of those that were loaded, and of those in
    the stack afterwards.
    """
    num = len(seen)
    descending = np.arange(
        num, 0, -1, dtype=np.float32
    )  # tick i loads record num - 1 - i, whose elements are num - i
    wrong = 0
    if way in ("up", "both"):
        wrong += int((seen != descending[:, None]).any(1).sum())
    if way in ("down", "both"):
        # Tick i stores, at num - 1 - i, i where records are counted up, and else what tick i - 1
        # loaded; tick 0 stores 0.
        stored = (
            np.arange(num, dtype=np.float32)
            if way == "down"
            else np.concatenate([[0], descending[:-1]])
        )
        wrong += int((down[:, [0, -1], [0, -1]] != stored[::-1, None]).any(1).sum())
    return wrong


def check_copies(way: str) -> Callable[[Context], Iterator[Row]]:
    """Return the check of one way."""

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
    """Return the rate of kernels that read host memory, for predictions: an index from an array
    makes one.
    """
    return {f"{KNOWN}rates.kernel_link": rate} if (way, index) == ("up", ARRAY) else {}


def beside_rows(
    name: str, num_bytes: float, copies: float, products: float, beside: float, judged: bool
) -> Iterator[Row]:
    """Say what copies and products take together, over the longer of the two: the link's share, or
    the products' slowdown.
    """
    text = f"{1e3 * beside:.2f} ms: copies alone {1e3 * copies:.2f}, products alone {1e3 * products:.2f}"
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
    """Return the check of one way, compiled for a GPU: who moves the records, by XLA's thunks."""

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
                f"{moved / records:.3f} of the records' bytes, {100 * share:.1f} % of them by copies; predicted "
                f"{1e3 * predicted.seconds:.2f} ms, products alone {1e3 * predicted.compute_seconds:.2f}; compiled in "
                f"{seconds:.1f} s",
                "1.000, 99 %" if judged else "1.000",
                moved == records
                and (share >= 0.99 or not judged),  # more would be a stack that is copied whole
                {
                    "share": share,
                    "moved": float(moved),
                    "predicted_seconds": predicted.seconds,
                    "compile_seconds": seconds,
                },
            )

    return rows
