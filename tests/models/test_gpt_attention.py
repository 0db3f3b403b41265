"""The attention of the example's GPT: cuDNN's on NVIDIA GPUs in 16 bits, XLA's elsewhere.

Unsupported settings are refused.
"""

import functools
import logging

import gpt
import jax
import jax.numpy as jnp
import pytest
from devices import on_gpu

from pallas_kernels.dispatch import Target
from zerojax import aot
from zerojax.hf import attention
from zerojax.jaxprs import count_flops, flatten


def traced(implementation, dtype=jnp.bfloat16, width=64):
    q = jax.ShapeDtypeStruct((2, 8, 4, width), dtype)
    return str(jax.make_jaxpr(lambda q: gpt.attention(q, q, q, implementation))(q))


def test_attention_is_cudnns_for_a_described_gpu_in_16_bits_and_xlas_elsewhere(
    h200_compiler, caplog
):
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=1)
    attention.takes_cudnn.cache_clear()
    attention._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="zerojax"):
        with jax.set_mesh(mesh):
            assert "dot_product_attention" in traced("auto")
            assert "dot_general" in traced("xla")
            assert "dot_general" in traced("auto", jnp.float32)
        assert "dot_general" in traced("auto")
        assert "dot_general" in traced("auto")  # logged once
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "attention runs as cudnn"
    assert (
        messages[1]
        == "attention runs as xla (not cudnn: it takes bfloat16 and float16, not float32)"
    )
    assert messages[2:] == [
        "attention runs as xla (not cudnn: it is for NVIDIA GPUs, but the program is for cpu 'cpu')"
    ]


def test_cudnns_attention_named_where_it_does_not_serve_is_refused():
    with pytest.raises(
        ValueError,
        match=r"attention='cudnn' cannot be used: it is for NVIDIA GPUs.*choose 'auto' or 'xla'",
    ):
        traced("cudnn")
    for dtype, width, reason in (
        (jnp.float32, 64, "16, not float32"),
        (jnp.bfloat16, 264, "at most 256 on NVIDIA H200 in steps of 8, not 264"),
        (jnp.bfloat16, 60, "60"),
    ):
        with on_gpu("NVIDIA H200"), pytest.raises(ValueError, match=reason):
            traced("cudnn", dtype, width)
    with (
        on_gpu("NVIDIA A100-SXM4-80GB"),
        pytest.raises(ValueError, match="at most 128 on NVIDIA A100-SXM4-80GB"),
    ):
        traced("cudnn", jnp.bfloat16, 256)
    with pytest.raises(
        ValueError, match="attention='flash' is unknown: choose from auto, xla, cudnn"
    ):
        traced("flash")


@pytest.mark.parametrize(
    ("chip", "widest"),
    [
        ("NVIDIA A100-SXM4-80GB", 128),
        ("NVIDIA L4", 128),
        ("NVIDIA H200", 256),
        ("NVIDIA B200", 256),
    ],
)
def test_the_widest_heads_of_cudnn_are_those_of_the_chip(chip, widest):
    target = Target(chip, "gpu", num_cores=100, is_hopper="H200" in chip)

    def takes(width: int) -> bool:
        kind = attention.Kind(dtype=jnp.bfloat16, length=128, heads=4, kv_heads=4, width=width)
        return attention.takes_cudnn(kind, target, False)

    assert [takes(width) for width in (64, widest, widest + 8, widest - 4)] == [
        True,
        True,
        False,
        False,
    ]


def test_where_cudnn_refuses_a_small_attention_xlas_is_taken_and_the_reason_logged(
    monkeypatch, caplog
):
    """Without a GPU, JAX refuses to compile cuDNN's attention, like a cuDNN without a kernel."""
    monkeypatch.setattr(attention, "_find_local_device", lambda target: jax.devices()[0])
    for cached in (attention.takes_cudnn, attention._log_choice, attention.cudnn_refusal):
        cached.cache_clear()
    with caplog.at_level(logging.INFO, logger="zerojax"), on_gpu("NVIDIA H200"):
        assert "dot_general" in traced("auto", width=256)
        with pytest.raises(
            ValueError,
            match=r"attention='cudnn' cannot be used: it refused a small test of the same kind: ",
        ):
            traced("cudnn", width=256)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith(
        "attention runs as xla (not cudnn: it refused a small test of the same kind: "
    )
    for cached in (attention.takes_cudnn, attention._log_choice, attention.cudnn_refusal):
        cached.cache_clear()


def test_a_machine_that_is_there_is_asked_itself(h200_compiler):
    """The answers for described GPUs do not apply to another mesh: JAX finds no GPU here."""
    aot.gpu_devices("h200", 1, 1)
    qkv = [
        jax.ShapeDtypeStruct((2, 8, 4, 256), jnp.bfloat16)
    ] * 3  # heads of 256: supported on Hopper, which this process does not have
    with on_gpu("NVIDIA A100-SXM4-80GB"), pytest.raises((NotImplementedError, RuntimeError)):
        jax.eval_shape(
            lambda *qkv: jax.nn.dot_product_attention(*qkv, implementation="cudnn"), *qkv
        )


def test_flops_of_cudnns_attention(h200_compiler):
    aot.gpu_devices("h200", 1, 1)
    q, kv = (jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16) for length in (16, 8))

    def flops(function, **options):
        attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **options)
        with on_gpu(aot.CHIPS["h200"].device_kinds[0]):
            jaxpr = jax.make_jaxpr(function(attend))(q, kv, kv)
        return sum(count_flops(i.eqn) for i in flatten(jaxpr.jaxpr, jaxpr.consts).instructions)

    scores = 2 * 4 * 16 * 8
    assert flops(lambda attend: attend) == 2 * 2 * scores * 64
    assert flops(lambda attend: attend, is_causal=True) == 2 * scores * 64
    assert (
        flops(lambda attend: jax.grad(lambda *qkv: attend(*qkv).sum())) == (2 + 5) * 2 * scores * 64
    )
