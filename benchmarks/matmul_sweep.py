"""Search for the fastest sizes of `matmul`'s kernel, as rows of its table.

The winner is compared with XLA's form and with JAX's own kernel.

The sweep does not try all combinations of sizes for a product. It tries all pairs of a tile and a
cluster, with the deepest pipeline that fits and all cores. Starting from the best pair, it then
tries fewer cores, other depths, and bands of other widths, one after another. Sizes that do not fit
into shared memory or registers are left out before compilation (`Config` and `Problem.check` refuse
them).

Each result is compared in full with that of XLA's form. The winner, XLA's form and the fastest
sizes of JAX's `hopper_matmul_mgpu` then take turns in rounds, and the medians make a row of
`pallas_kernels/matmul/measured.json`. Sizes that are wrong or do not run are reported and never
win; a winner that exceeds the op's bound against float64 makes no row.
"""

import dataclasses
import datetime
import itertools
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from kernel_cases import MOSAIC, XLA, Product, Step, products

from pallas_kernels.dispatch import Target, find_target
from pallas_kernels.matmul import measured, mosaic
from pallas_kernels.matmul.config import BLOCKS, MAX_STAGES, Config, Problem

TILES = (*BLOCKS, (128, 192))
CLUSTERS = ((1, 1), (2, 1), (1, 2))  # blocks along M and N
RASTERS = (4, 16)  # in addition to the default
JAX = "JAX's kernel"


def swept(small: bool) -> list[Product]:
    """Return the products of the sweep.

    They are the benchmark's products, and a Llama's projection and its MLP in 4 tiles.
    """
    if small:
        return products(small)
    tokens, hidden, tile = 16384, 4096, 3584
    return [
        *products(small),
        Product(tokens, hidden, hidden),
        Product(tokens, tile, hidden, gated=True, activation="silu"),
        Product(tokens, hidden, tile, accumulates=True),
    ]


def fitting(problem: Problem, sizes: Iterable[dict[str, int]]) -> list[Config]:
    """Return the configs of the sizes that fit."""
    found = []
    for size in sizes:
        try:
            config = Config(**size)
            problem.check(config)
        except ValueError:
            continue
        found.append(config)
    return found


def deepest(problem: Problem, **sizes: int) -> list[Config]:
    """Return the config of these sizes with the deepest pipeline that fits, or an empty list."""
    return fitting(problem, [sizes | {"num_stages": depth} for depth in range(MAX_STAGES, 1, -1)])[
        :1
    ]


def tiles_and_clusters(problem: Problem, num_cores: int) -> list[Config]:
    """Return the configs of all pairs of a tile and a cluster that fit."""
    found = []
    for (block_m, block_n), (cluster_m, cluster_n) in itertools.product(TILES, CLUSTERS):
        cores = num_cores - num_cores % (cluster_m * cluster_n)
        sizes = {
            "block_m": block_m,
            "block_n": block_n,
            "cluster_m": cluster_m,
            "cluster_n": cluster_n,
            "num_cores": cores,
        }
        found += deepest(problem, **sizes)
    return found


def fewer_cores(problem: Problem, config: Config) -> list[Config]:
    """Return a config with the cores rounded down to a multiple of 8, such as 128 of 132.

    Grids of tiles are often powers of two.
    """
    return fitting(problem, [dataclasses.asdict(config) | {"num_cores": config.num_cores // 8 * 8}])


def other_depths(problem: Problem, config: Config) -> list[Config]:
    """Return configs with one stage less, and with stages of twice the width."""
    own = dataclasses.asdict(config)
    wider = deepest(problem, **(own | {"block_k": 2 * config.block_k}))
    return fitting(problem, [own | {"num_stages": config.num_stages - 1}]) + wider


def other_bands(problem: Problem, config: Config) -> list[Config]:
    """Return configs with narrower and wider bands of tiles."""
    return fitting(problem, [dataclasses.asdict(config) | {"raster": raster} for raster in RASTERS])


def search(
    problem: Problem, num_cores: int, seconds: Callable[[Config], float]
) -> dict[Config, float]:
    """Return the seconds of all configs that were tried, by a function that times one config."""
    times: dict[Config, float] = {}

    def fastest(configs: Iterable[Config]) -> Config:
        for config in configs:
            if config not in times:
                times[config] = seconds(config)
        return min(times, key=lambda config: times[config])

    best = fastest(tiles_and_clusters(problem, num_cores))
    for vary in (fewer_cores, other_depths, other_bands):
        best = fastest(vary(problem, best))
    return times


def jax_steps(product: Product) -> list[Step]:
    """Return calls of JAX's own kernel in various sizes; none if it lacks the product's form."""
    if product.gated or product.bias or product.activation:
        return []
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as jaxs

    M, N = jaxs.MatmulDimension.M, jaxs.MatmulDimension.N
    # A tile belongs to a warpgroup, and two make a block: 128 x 256, 256 x 128 and 128 x 128.
    sizes = [(128, 128, N, cluster) for cluster in (None, M, N)] + [
        (128, 128, M, None),
        (128, 64, N, None),
    ]

    def step(tile_m: int, tile_n: int, two: Any, cluster: Any) -> Step:
        config = jaxs.TuningConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=64,
            max_concurrent_steps=4,
            epi_tile_n=32 if product.accumulates else 64,
            grid_tile_width=8,
            wg_dimension=two,
            cluster_dimension=cluster,
        )
        return lambda arrays, total: jaxs.matmul(arrays[0], arrays[1], total, config)

    return [step(*size) for size in sizes]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One finding of a product's sweep.

    Attributes:
      product: product that was swept.
      row: row for the table; None if there is none.
      note: reason why there is no row, or the number of sizes that were tried.
      is_right: False if sizes are wrong or do not run.
    """

    product: Product
    row: measured.Row | None
    note: str
    is_right: bool = True

    def words(self) -> list[str]:
        """Return the cells of the product's line.

        They show time, rate, time over XLA's and over JAX's kernel, the choice of None, and sizes.
        """
        if self.row is None:
            return [self.note, *[""] * 5]
        row, work = self.row, self.product.case().work
        over_jax = "" if row.jax_seconds is None else f"{row.seconds / row.jax_seconds:.3f}"
        config = row.config
        sizes = (
            f"{config.block_m} x {config.block_n} x {config.block_k}, "
            f"{config.num_stages} stages, {config.num_cores} cores"
        )
        cluster = f", cluster {config.cluster_m} x {config.cluster_n}" if config.cluster > 1 else ""
        return [
            f"{1e3 * row.seconds:.4g} ms",
            f"{work / row.seconds / 1e12:.4g} TFLOP/s",
            f"{row.over_xla:.3f}",
            over_jax,
            "kernel" if row.is_faster else "XLA",
            f"{sizes}, bands of {config.raster}{cluster} ({self.note})",
        ]


def sweep(
    product: Product, contender: Callable[..., Any], rounds: int, min_seconds: float = 0.02
) -> Iterator[Outcome]:
    """Yield the outcomes of one product's sweep: failed sizes if there are any, and the winner.

    Args:
      product: product to sweep.
      contender: `kernels.Contender`, which compiles steps.
      rounds: number of rounds in which the three contenders take turns at the end.
      min_seconds: least total seconds of the calls that time one candidate.
    """
    target: Target = find_target()
    if reason := mosaic.refusal(product.problem, target):
        yield Outcome(product, None, f"not run: {reason}")
        return
    case = product.case()
    arrays = case.draw()

    def ready(one: Any) -> tuple[Any, int]:
        one.seconds(1)
        return one, max(2, min(50, int(min_seconds / one.seconds(1))))

    def seconds(one: Any) -> float:
        one, repeats = ready(one)
        return min(one.seconds(repeats) for _ in range(3))

    expected = contender(case, [product.step(XLA)], arrays)()
    failed: dict[Config, str] = {}

    def seconds_of(config: Config) -> float:
        try:
            one = contender(case, [product.step(MOSAIC, config)], arrays)
            if (apart := product.apart(one(), expected)) <= 1:
                return seconds(one)
            failed[config] = f"{apart:.3g} of the bound from XLA's form"
        except jax.errors.JaxRuntimeError as e:
            failed[config] = str(e).split("\n")[0]
        return math.inf

    times = search(product.problem, target.num_cores, seconds_of)
    config = min(times, key=lambda config: times[config])
    if failed:
        yield Outcome(
            product,
            None,
            "; ".join(f"failed: {size}: {why}" for size, why in failed.items()),
            is_right=False,
        )
    if config in failed:  # then all sizes failed
        return
    jaxs: dict[Step, float] = {}
    for step in jax_steps(product):
        try:
            jaxs[step] = seconds(contender(case, [step], arrays))
        # The sizes may not divide the product, or may need too much shared memory.
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            continue
    steps = {MOSAIC: product.step(MOSAIC, config), XLA: product.step(XLA)}
    if jaxs:
        steps[JAX] = min(jaxs, key=lambda step: jaxs[step])
    error = case.error(arrays, contender(case, [steps[MOSAIC]], arrays)())
    if error > 1:
        yield Outcome(
            product, None, f"wrong with {config}: {error:.2f} of its bound", is_right=False
        )
        return
    found = {name: (*ready(contender(case, [step], arrays)), []) for name, step in steps.items()}
    for _ in range(rounds):
        for one, repeats, taken in found.values():
            taken.append(one.seconds(repeats))
    median = {name: statistics.median(taken) for name, (_, _, taken) in found.items()}
    row = measured.Row(
        chip=target.chip,
        num_cores=target.num_cores,
        problem=product.problem,
        activation=product.activation,
        config=config,
        seconds=median[MOSAIC],
        xla_seconds=median[XLA],
        jax_seconds=median.get(JAX),
        device=target.kind,
        jax=jax.__version__,
        date=f"{datetime.date.today():%Y-%m-%d}",
    )
    yield Outcome(product, row, f"of {len(times)} sizes tried")


def save_row(path: pathlib.Path, row: measured.Row) -> None:
    """Put a row into a table on disk, which is complete at any time."""
    rows = measured.parse(path.read_text(), str(path)) if path.exists() else ()
    new = path.with_name(f"{path.name}.new")
    new.write_text(measured.dump(measured.merged(rows, [row])))
    os.replace(new, path)
