"""The table of measurements: its form, and the calls that a row applies to.

`None` and named kernels use it differently.
"""

import dataclasses
import json

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from devices import on_gpu

from pallas_kernels.dispatch import Target
from pallas_kernels.matmul import Config, is_faster, is_measured, matmul, measured, mosaic
from pallas_kernels.matmul.config import Problem, choose

BF16 = jnp.dtype(jnp.bfloat16)
CORES = 108  # of the devices of `on_gpu`
SIZES = Config(block_m=128, block_n=128, num_stages=3, num_cores=CORES, cluster_m=2)


def row(m=1024, n=512, k=256, ratio=0.9, **changes):
    """Return a made-up row, not a measurement."""
    terms = {
        "out_dtype": BF16,
        "bias_dtype": None,
        "accumulate_dtype": None,
        "num_weights": 1,
        "dtype": BF16,
    }
    problem = Problem(
        m=m, n=n, k=k, **{name: changes.pop(name, value) for name, value in terms.items()}
    )
    about = {
        "device": "NVIDIA H200",
        "jax": "0.12.0",
        "date": "2026-01-01",
        "chip": "H200",
        "num_cores": CORES,
    }
    times = {"seconds": ratio * 1e-3, "xla_seconds": 1e-3, "jax_seconds": None}
    return measured.Row(
        problem=problem, **{"activation": None, "config": SIZES} | about | times | changes
    )


ROWS = (
    row(activation="silu", num_weights=2, bias_dtype=jnp.dtype(jnp.float32)),
    row(m=3, ratio=1.5, jax_seconds=2e-3),
    row(
        num_cores=132,
        config=Config(num_stages=3),
        accumulate_dtype=jnp.dtype(jnp.float32),
        out_dtype=jnp.dtype(jnp.float32),
    ),
)


def test_a_table_is_read_as_it_was_written_and_the_committed_one_is_in_that_form():
    assert set(measured.parse(measured.dump(ROWS), "table")) == set(ROWS)
    assert measured.dump(reversed(ROWS)) == measured.dump(ROWS)
    text = measured.PATH.read_text()
    assert measured.dump(measured.parse(text, "table")) == text
    assert measured.table() == measured.parse(text, "table")


def test_new_rows_take_the_places_of_those_of_the_same_problem():
    new = (row(m=3, ratio=0.5), row(m=5))
    assert set(measured.merged(ROWS, new)) == {ROWS[0], ROWS[2], *new}


def with_fields(**changes):
    fields = json.loads(measured.dump(ROWS[1:2]))["rows"][0]
    return json.dumps(
        {"rows": [{name: value for name, value in (fields | changes).items() if value != "absent"}]}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "table: no JSON"),
        ("[]", r'table: {"rows": \[..\]} is needed'),
        ('{"rows": [3]}', "row 0: an object is needed, not int"),
        (with_fields(m="absent"), r"row 0: without \['m'\]"),
        (with_fields(speed=3), r"unknown \['speed'\]"),
        (with_fields(m=0), "'m': 0.*integers of 1 or more"),
        (with_fields(n=64.0), "'n': 64.0.*integers"),
        (with_fields(num_weights=3), "one weight or two"),
        (with_fields(dtype=None), "dtype: names of dtypes"),
        (with_fields(out_dtype=None), "out_dtype: names of dtypes"),
        (with_fields(dtype="bfloat17"), "row 0: .*bfloat17"),
        (with_fields(activation="tanh"), "activation='tanh' is unknown"),
        (with_fields(seconds=0.0), "seconds=0.0: seconds above 0"),
        (with_fields(xla_seconds=None), "xla_seconds=None"),
        (with_fields(jax=""), "jax: text is needed"),
        (with_fields(config={"block_m": 128}), "config is without"),
        (with_fields(config=dataclasses.asdict(SIZES) | {"raster": 1.5}), "an object of integers"),
        (
            with_fields(config=dataclasses.asdict(SIZES) | {"num_stages": 6, "block_n": 256}),
            "bytes of shared memory",
        ),
        (with_fields(num_cores=64), "config has num_cores=108, and the chip 64"),
        (
            json.dumps({"rows": json.loads(with_fields())["rows"] * 2}),
            "row 1: an earlier row has the same chip",
        ),
    ],
)
def test_a_table_of_another_form_is_refused_with_the_row(text, message):
    with pytest.raises(ValueError, match=message):
        measured.parse(text, "table")


@pytest.mark.parametrize(
    ("m", "changes", "found"),
    [
        (1024, {}, 1024),
        (1032, {}, 1024),
        (2040, {}, 1024),
        (2048, {}, 2048),  # its own row, and no longer that of 1024
        (4096, {}, None),
        (1016, {}, None),
        (1028, {}, None),  # 8 does not divide it: it would be padded
        (1024, {"n": 576}, None),
        (1024, {"k": 128}, None),
        (1024, {"dtype": jnp.dtype(jnp.float16)}, None),
        (1024, {"out_dtype": jnp.dtype(jnp.float32)}, None),
        (1024, {"bias_dtype": BF16}, None),
        (1024, {"accumulate_dtype": BF16}, None),
        (1024, {"num_weights": 2}, None),
    ],
)
def test_a_row_speaks_for_its_own_problem_and_a_larger_m_below_twice_its_own(m, changes, found):
    rows = (row(), row(m=2048))
    target = Target("NVIDIA H200 141GB HBM3e", "gpu", CORES, is_hopper=True)
    problem = dataclasses.replace(row(m=m).problem, **changes)
    serving = measured.find(rows, problem, None, target)
    assert (serving and serving.problem.m) == found
    assert measured.find(rows, problem, "gelu", target) is None
    for other in (
        {"num_cores": 132},
        {"kind": "NVIDIA GH200 480GB"},
        {"kind": "NVIDIA H100 80GB HBM3"},
    ):
        assert measured.find(rows, problem, None, dataclasses.replace(target, **other)) is None


@pytest.mark.parametrize(
    ("ratio", "kind", "m", "taken"),
    [
        (0.9, "NVIDIA H200", 1024, True),
        (0.99, "NVIDIA H200", 1024, False),  # within the margin
        (1.1, "NVIDIA H200", 1024, False),
        (0.9, "NVIDIA H100 80GB HBM3", 1024, False),
        (0.9, "NVIDIA B200", 1024, False),
        (0.9, "NVIDIA H200", 512, False),
    ],
)
def test_matmul_of_none_takes_the_kernel_with_its_sizes_where_the_table_says_that_it_is_faster(
    monkeypatch, ratio, kind, m, taken
):
    configs = []
    kernel = mosaic.matmul
    monkeypatch.setattr(measured, "table", lambda: (row(ratio=ratio),))
    monkeypatch.setattr(
        mosaic,
        "matmul",
        lambda form, config, *a, **o: configs.append(config) or kernel(form, config, *a, **o),
    )
    x, w = jnp.ones((m, 256), BF16), jnp.ones((256, 512), BF16)
    with on_gpu(kind):
        jaxpr = jax.make_jaxpr(lambda: matmul(x, w))()
        assert is_faster(x, w) == taken
        assert is_measured(x) == ("H200" in kind)
    assert ("mpmd_map" in str(jaxpr)) == taken
    assert configs == [SIZES] * taken


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_matmul_of_none_takes_xlas_form_under_vmap_whatever_the_table_says(monkeypatch, axes):
    monkeypatch.setattr(measured, "table", lambda: (row(activation="silu"),))
    rng = np.random.default_rng(0)
    one = tuple(
        jnp.asarray(rng.standard_normal(shape), BF16) for shape in ((1024, 256), (256, 512))
    )
    batch = tuple(
        array if axis is None else jnp.stack([array, -array])
        for array, axis in zip(one, axes, strict=True)
    )

    def program(implementation):
        def loss(x, w):
            y = matmul(x, w, activation="silu", implementation=implementation)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        return jax.vmap(
            lambda x, w: (loss(x, w), jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, w)), axes
        )

    with on_gpu("NVIDIA H200"):
        assert "mpmd_map" in str(jax.make_jaxpr(lambda x, w: matmul(x, w, activation="silu"))(*one))
        programs = [
            jax.make_jaxpr(program(implementation))(*batch) for implementation in (None, "xla")
        ]
    assert "mpmd_map" not in str(programs[0])
    if axes == (0, None):  # CPUs have no other batched product that sums bfloat16 in float32
        for result, expected in zip(
            *(jex.jaxpr_as_fun(jaxpr)(*batch) for jaxpr in programs), strict=True
        ):
            np.testing.assert_array_equal(
                np.asarray(result, np.float32), np.asarray(expected, np.float32)
            )


def test_a_named_kernel_has_the_sizes_of_the_table_and_elsewhere_those_of_the_closed_form(
    monkeypatch,
):
    configs = []
    kernel = mosaic.matmul
    monkeypatch.setattr(measured, "table", lambda: (row(ratio=1.5),))
    monkeypatch.setattr(
        mosaic,
        "matmul",
        lambda form, config, *a, **o: configs.append(config) or kernel(form, config, *a, **o),
    )
    with on_gpu("NVIDIA H200"):
        for m in (1024, 512):
            x, w = jnp.ones((m, 256), BF16), jnp.ones((256, 512), BF16)
            jax.make_jaxpr(lambda x=x, w=w: matmul(x, w, implementation="mosaic"))()
    assert configs == [SIZES, choose(row(m=512).problem, CORES)]
