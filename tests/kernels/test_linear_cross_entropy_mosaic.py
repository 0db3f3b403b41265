"""The Hopper kernels of linear_cross_entropy equal float64 in value and gradient.

They are interpreted with race detection; the choice of kernel is tested too.
"""

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import on_gpu
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from test_linear_cross_entropy import OPTIONS, check, problem

import zerojax as zj
from pallas_kernels import dispatch
from pallas_kernels import linear_cross_entropy as op
from pallas_kernels.linear_cross_entropy import (
    Config,
    KernelConfig,
    Split,
    linear_cross_entropy,
    xla,
)
from pallas_kernels.linear_cross_entropy import mosaic as mosaic_kernels
from pallas_kernels.linear_cross_entropy.kernel_config import CACHE, ROWS
from pallas_kernels.linear_cross_entropy.reference import Form

pytestmark = pytest.mark.xdist_group("kernels")
# One block runs through all tiles and reuses its slots: the interpreter compiles each block's
# program.
SMALL: dict[str, Any] = {"block_v": 64, "num_stages": 2, "num_parts": 2, "num_cores": 1}
SMALL |= {"width": 64, "num_slopes": 1, "num_backward_stages": 2, "backward": True}
mosaic = functools.partial(linear_cross_entropy, implementation="mosaic")


def test_loss_kernels_interpreted_equal_float64_without_races(races):
    """Every option, and no dim divisible by a tile: 2 or 3 tiles each, and sums between groups."""
    arrays = problem("bfloat16", (130, 72, 140), 0.5)
    with races():
        check(
            *arrays,
            dtype="bfloat16",
            implementation="mosaic",
            config=KernelConfig(**SMALL),
            **OPTIONS["all"],
        )


@pytest.mark.exhaustive
def test_loss_kernel_interpreted_with_xlas_backward_equals_float64_without_races(races):
    config = KernelConfig(**SMALL | {"backward": False})
    with races():
        check(
            *problem("bfloat16", (40, 24, 101)),
            dtype="bfloat16",
            implementation="mosaic",
            config=config,
        )


# by default the tests of XLA's form cover these, and the kernels equal float64 on smaller ones
@pytest.mark.exhaustive
def test_loss_kernels_interpreted_keep_large_logits_of_either_sign_without_races(races):
    """Logits of about 1e5 or -1e5.

    Forward has two blocks with a part each; backward has one group, and no sums between groups.
    """
    x, w, labels = problem("float16", (40, 24, 101), 80.0)
    x, w = abs(x) * (1 - 2 * (jnp.arange(40) % 2))[:, None].astype(x.dtype), abs(w)
    config = KernelConfig(**SMALL | {"num_slopes": 2, "num_cores": 2})
    with races():
        check(x, w, labels, dtype="float16", implementation="mosaic", config=config)


def test_forward_kernel_of_some_columns_of_the_vocabulary_finds_their_labels_alone(races):
    """Columns from 70 of 140, as on the second of two devices."""
    x, w, labels = problem("bfloat16", (40, 64, 140), 0.5)
    with races():
        stats = mosaic_kernels.forward(
            Form(140, label_smoothing=0.1), KernelConfig(**SMALL), x, w[:, 70:], labels - 70
        )
        found = [np.asarray(each, np.float64) for each in stats]
    z = np.asarray(x, np.float64) @ np.asarray(w[:, 70:], np.float64)
    of_label = np.where(
        labels >= 70, np.take_along_axis(z, np.maximum(labels - 70, 0)[:, None], 1)[:, 0], 0
    )
    np.testing.assert_allclose(found[0] + np.log(found[1]), np.log(np.exp(z).sum(1)), rtol=1e-6)
    np.testing.assert_allclose(found[2], of_label, atol=1e-5)
    np.testing.assert_allclose(found[3], z.sum(1), atol=1e-4)


@pytest.mark.parametrize(
    ("axes", "w", "dw"),
    [
        ({"tensor": 4}, P(None, "tensor"), None),
        ({"data": 2, "fsdp": 2}, P(), P("fsdp")),
        ({"data": 2, "fsdp": 2, "tensor": 2}, P(None, "tensor"), P(None, ("tensor", "fsdp"))),
    ],
    ids=str,
)
def test_loss_kernels_on_split_arrays_are_joined_as_on_one_device(monkeypatch, axes, w, dw):
    """Test what surrounds the kernels, with XLA's loops as their stand-ins.

    The interpreter does not run kernels on several devices.
    """

    def pieces(form, x, w, labels):
        return xla.Pieces(form, Config(block_t=8, block_v=16), None, x, w, labels)

    def forward(form, config, x, w, labels):
        assert config.num_cores == 132
        return xla.forward(pieces(form, x, w, labels))

    def backward(form, config, x, w, labels, lse, weight):
        return xla.backward(pieces(form, x, w, labels), lse, weight)

    monkeypatch.setattr(mosaic_kernels, "forward", forward)
    monkeypatch.setattr(mosaic_kernels, "backward", backward)
    monkeypatch.setattr(
        op, "find_target", lambda *_: dispatch.Target("NVIDIA H200", "gpu", 132, is_hopper=True)
    )
    size = math.prod(axes.values())
    mesh = zj.make_mesh(**{"data": 1, "fsdp": 1} | axes, devices=jax.devices()[:size])
    split = Split(mesh, ("data", "fsdp"), w, dw)
    options = {"implementation": "mosaic", "split": split, "label_smoothing": 0.1, "z_loss": 0.01}
    check(
        *problem("bfloat16", (40, 24, 104)),
        "bfloat16",
        **options,
        config=KernelConfig(backward=True),
    )


BF16 = problem("bfloat16", (8, 64, 128))


@pytest.mark.parametrize(
    ("kind", "arrays", "options", "words"),
    [
        (
            "NVIDIA A100-SXM4-80GB",
            BF16,
            {},
            r"needs a Hopper GPU \(compute capability 9.0: H100, H200\), and the program is for",
        ),
        ("NVIDIA B200", BF16, {}, "needs a Hopper GPU"),
        (
            "NVIDIA H200",
            problem("float32"),
            {},
            "it multiplies bfloat16 and float16, not float32; choose xla, reference or None",
        ),
        ("NVIDIA H200", BF16, {"num_tiles": 2}, "num_tiles=2 is for XLA's loops"),
    ],
)
def test_loss_kernels_that_cannot_serve_say_why_and_xla_is_chosen(kind, arrays, options, words):
    x, w, labels = arrays
    with on_gpu(kind):
        with pytest.raises(
            NotImplementedError, match=f"implementation='mosaic' cannot serve: .*{words}"
        ):
            mosaic(x, w, labels, **options)
        jaxpr = jax.make_jaxpr(lambda: linear_cross_entropy(x, w, labels, **options))()
    assert "mpmd_map" not in str(jaxpr)


def test_loss_of_a_matrix_that_rests_on_shards_is_xlas():
    x, w, labels = BF16
    with (
        on_gpu("NVIDIA H200", count=2),
        pytest.raises(
            NotImplementedError, match="w is stored split over data, and only XLA's loops"
        ),
    ):
        mosaic(x, w, labels, split=Split(jax.sharding.get_abstract_mesh(), ("data",), P("data")))


@pytest.mark.parametrize("checks", [True, False])
def test_loss_kernels_in_shard_map_run_on_each_devices_tokens(checks):
    def gradients(implementation, x, w, labels):
        def of_shard(x, w, labels):
            config = KernelConfig(backward=True) if implementation == "mosaic" else None
            total = linear_cross_entropy(
                x, w, labels, reduction="sum", implementation=implementation, config=config
            )
            return jax.lax.psum(total, "data")

        specs = (P("data"), P(), P("data"))
        return jax.grad(
            jax.shard_map(of_shard, in_specs=specs, out_specs=P(), check_vma=checks), (0, 1)
        )(x, w, labels)

    with on_gpu("NVIDIA H200", count=2):
        found, expected = (
            str(jax.make_jaxpr(functools.partial(gradients, name))(*BF16))
            for name in ("mosaic", "xla")
        )
    assert found.count("mpmd_map[") == 3 > expected.count("mpmd_map[")
    assert found.count("psum") == expected.count("psum") > 0


def test_backward_of_the_kernels_runs_where_a_config_asks_for_it_alone():
    def kernels(config):
        jaxpr = jax.make_jaxpr(jax.grad(functools.partial(mosaic, config=config), argnums=(0, 1)))(
            *BF16
        )
        return str(jaxpr).count("mpmd_map[")

    with on_gpu("NVIDIA H200"):
        assert [
            kernels(config) for config in (None, KernelConfig(), KernelConfig(backward=True))
        ] == [1, 1, 3]


def test_loss_on_hopper_is_xlas_until_a_measurement_says_otherwise(caplog):
    dispatch.log_choice.cache_clear()
    with on_gpu("NVIDIA H200"), caplog.at_level(logging.INFO, logger="pallas_kernels"):
        chosen = jax.make_jaxpr(lambda: linear_cross_entropy(*BF16))()
        named = jax.make_jaxpr(lambda: mosaic(*BF16))()
    assert "mpmd_map" not in str(chosen)
    assert "mpmd_map" in str(named)
    assert [record.getMessage() for record in caplog.records] == [
        "linear_cross_entropy runs as xla (not mosaic: no measurement on a GPU says yet that it is faster)"
    ]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"block_v": 320}, "block_v=320: a multiple of 64, at most 256"),
        ({"width": 96}, "width=96: a multiple of 64"),
        ({"num_slopes": 0}, "counts of 1 or more"),
        ({"num_parts": 0}, "counts of 1 or more"),
        ({"num_stages": 1}, "2 stages or more"),
        ({"num_stages": 5}, "245760 bytes of shared memory forward, and a block has 231424"),
        ({"num_backward_stages": 4}, "262144 bytes of shared memory backward"),
    ],
)
def test_sizes_of_loss_kernels_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        KernelConfig(**sizes)


def test_sizes_of_one_implementation_are_refused_by_another():
    with pytest.raises(
        ValueError,
        match="is for the kernels, but implementation=None: set implementation='mosaic'",
    ):
        linear_cross_entropy(*BF16, config=KernelConfig())
    with pytest.raises(
        ValueError, match="is for XLA's loops, but implementation='mosaic': pass a KernelConfig"
    ):
        mosaic(*BF16, config=Config())


@given(
    tokens=st.integers(1, 1 << 17),
    hidden=st.integers(1, 1 << 14),
    vocab=st.integers(1, 1 << 18),
    cores=st.integers(1, 132),
)
def test_parts_of_the_vocabulary_chosen_are_never_empty_and_keep_tokens_in_the_cache(
    tokens, hidden, vocab, cores
):
    config = KernelConfig(num_cores=cores)
    num_parts, num_tiles = config.count_parts(tokens, hidden, vocab), -(-vocab // config.block_v)
    tiles_a_part = -(-num_tiles // num_parts)
    assert (num_parts - 1) * tiles_a_part < num_tiles <= num_parts * tiles_a_part
    together = 2 * min(cores, -(-tokens // ROWS)) * ROWS * hidden / num_parts
    assert together <= 2 * CACHE or num_parts == num_tiles
