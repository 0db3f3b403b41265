"""The sweep of matmul's sizes: its candidates, its findings from made-up times, and its table."""

import dataclasses
import sys
from typing import Any

import jax
import kernels
import matmul_sweep
import numpy as np
import pytest
from kernel_cases import MOSAIC, XLA, Case, Product
from matmul_sweep import JAX

from pallas_kernels.dispatch import Target
from pallas_kernels.matmul import measured
from pallas_kernels.matmul.config import Config
from pallas_kernels.shared_memory import SHARED_BYTES

H200 = Target("NVIDIA H200", "gpu", 132, is_hopper=True)
PRODUCT = Product(192, 128, 320)


@pytest.mark.parametrize(
    "product", matmul_sweep.swept(small=False), ids=lambda product: product.name
)
def test_a_sweep_tries_tiles_in_and_out_of_clusters_with_the_deepest_pipeline_that_fits(product):
    tried = matmul_sweep.tiles_and_clusters(product.problem, 132)
    tiles = {(c.block_m, c.block_n) for c in tried}
    assert (128, 256) in tiles
    assert {(c.block_m, c.block_n, c.cluster_m, c.cluster_n) for c in tried} == {
        (*tile, *cluster) for tile in tiles for cluster in ((1, 1), (2, 1), (1, 2))
    }
    # Each of two weights has half of the columns, in multiples of 64.
    assert ((128, 64) in tiles) == ((128, 192) in tiles) == (not product.gated)
    for config in tried:
        assert product.problem.shared_bytes(config) <= SHARED_BYTES
        deeper = dataclasses.replace(config, num_stages=config.num_stages + 1)
        assert config.num_stages == 6 or product.problem.shared_bytes(deeper) > SHARED_BYTES


def test_what_does_not_fit_registers_or_shared_memory_is_left_out_before_it_is_compiled():
    sizes = [
        {"block_m": 256, "block_n": 256},
        {"num_stages": 8},
        {"cluster_m": 2, "num_cores": 131},
        {"num_stages": 2},
    ]
    assert matmul_sweep.fitting(PRODUCT.problem, sizes) == [Config(num_stages=2)]
    assert matmul_sweep.deepest(PRODUCT.problem, block_k=1024) == []


def test_a_search_finds_the_fastest_tile_and_cluster_then_cores_depth_and_bands_of_it():
    best = Config(block_m=256, block_n=128, num_stages=3, num_cores=128, raster=16, cluster_n=2)

    def seconds(config: Config) -> float:
        return 1.0 + sum(
            getattr(config, f.name) != getattr(best, f.name) for f in dataclasses.fields(Config)
        )

    times = matmul_sweep.search(PRODUCT.problem, 132, seconds)
    assert min(times, key=lambda config: times[config]) == best
    assert times[best] == 1.0
    assert (
        len(times) == 5 * 3 + 1 + 2 + 2
    )  # tiles and clusters; 128 cores; one stage less, and wider ones; two bands


class Contender:
    """A stand-in for a program, with the seconds and the result given by its label."""

    seconds_of: dict[str, float]
    off = 1.0

    def __init__(self, case: Any, steps: Any, arrays: Any):
        [(self.name, self.config)] = steps
        self.arrays = arrays

    def seconds(self, repeats: int) -> float:
        # Among the kernel's sizes, clusters along M are the fastest.
        return self.seconds_of[self.name] * (
            1.0 if self.config is None or self.config.cluster_m == 2 else 2.0
        )

    def __call__(self) -> Any:
        off = self.off if self.name == MOSAIC and self.config.cluster_m == 2 else 1.0
        return off * (
            np.asarray(self.arrays[0], np.float32) @ np.asarray(self.arrays[1], np.float32)
        )


@pytest.fixture
def made_up(monkeypatch):
    """Return a function that sweeps with made-up times."""
    monkeypatch.setattr(matmul_sweep, "find_target", lambda *_: H200)
    monkeypatch.setattr(
        Product, "step", lambda _, implementation, config=None: (implementation, config)
    )
    monkeypatch.setattr(matmul_sweep, "jax_steps", lambda _: [(JAX, None)])
    monkeypatch.setattr(kernels, "Contender", Contender)
    draw = np.random.default_rng(0).standard_normal
    monkeypatch.setattr(Case, "draw", lambda case: tuple(draw(a.shape) for a in case.arrays))
    monkeypatch.setattr(
        matmul_sweep, "swept", lambda _: [PRODUCT, dataclasses.replace(PRODUCT, m=64)]
    )

    def outcomes(kernel: float, off: float = 1.0, **options: Any):
        monkeypatch.setattr(
            Contender, "seconds_of", {MOSAIC: kernel, XLA: 1.0, JAX: 0.8}, raising=False
        )
        monkeypatch.setattr(Contender, "off", off)
        return list(kernels.sweep_outcomes(False, 3, **options))

    return outcomes


@pytest.mark.parametrize(("kernel", "verdict"), [(0.5, "kernel"), (1.5, "XLA")])
def test_a_sweep_writes_the_winner_with_its_times_and_keeps_other_rows(
    made_up, tmp_path, kernel, verdict
):
    path = tmp_path / "measured.json"
    other = dataclasses.replace(made_up(2.0)[0].row, chip="H100")
    matmul_sweep.save_row(path, other)
    first, second = made_up(kernel, save=path)
    assert (first.row.seconds, first.row.xla_seconds, first.row.jax_seconds) == (kernel, 1.0, 0.8)
    assert first.row.config.cluster_m == 2
    assert (first.row.chip, first.row.num_cores, first.row.device) == ("H200", 132, "NVIDIA H200")
    assert set(measured.parse(path.read_text(), "table")) == {other, first.row, second.row}
    assert measured.find([first.row, second.row], PRODUCT.problem, None, H200) == first.row
    [line] = [
        text for text, _ in kernels.sweep_table([first]) if text.startswith(f"| {PRODUCT.name} |")
    ]
    assert [cell.strip() for cell in line.split("|")[4:7]] == [
        f"{kernel:.3f}",
        f"{kernel / 0.8:.3f}",
        verdict,
    ]


def test_sizes_that_are_wrong_never_win_and_are_told(made_up):
    told, first, *_ = made_up(0.5, off=1.05)
    assert first.row.config.cluster_m == 1
    assert first.is_right
    assert told.row is None
    assert told.note.count("failed: Config(") == 5  # one tile each
    assert [right for _, right in kernels.sweep_table([told, first])][-2:] == [False, True]


def test_a_winner_that_is_as_wrong_as_xlas_form_makes_no_row(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(Product, "error", lambda *_: 1.5)
    path = tmp_path / "measured.json"
    first, _ = made_up(0.5, save=path)
    assert (first.row, first.is_right, path.exists()) == (None, False, False)
    assert first.note.startswith("wrong with Config(")


def test_a_kernel_that_does_not_run_with_any_size_makes_no_row(made_up, monkeypatch):
    def fail(contender: Any) -> Any:
        if contender.name == MOSAIC:
            raise jax.errors.JaxRuntimeError("no such launch")
        return contender.arrays[0]

    monkeypatch.setattr(Contender, "__call__", fail)
    first, _ = made_up(0.5)
    assert (first.row, first.is_right) == (None, False)
    assert "no such launch" in first.note


def test_a_sweep_that_is_out_of_time_tells_what_it_left_out(made_up):
    assert [outcome.note for outcome in made_up(0.5, seconds=-1.0)] == [
        "left out: -1 s are over"
    ] * 2


def test_a_sweep_on_a_cpu_says_that_the_kernel_does_not_run_and_writes_nothing(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "measured.json"
    outcomes = list(kernels.sweep_outcomes(True, 1, path))
    assert [outcome.row for outcome in outcomes] == [None] * len(matmul_sweep.swept(small=True))
    assert all("needs a Hopper GPU" in outcome.note for outcome in outcomes)
    assert not path.exists()
    monkeypatch.setattr(sys, "argv", ["kernels.py", "sweep", "--small", "--save", str(path)])
    with pytest.raises(SystemExit):
        kernels.main()
    assert "--small measures nothing" in capsys.readouterr().err
