"""Layers in 8 or 4 bits compiled for 8 absent H200s.

They are gathered as stored and decoded one at a time.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.storage import abstract_encoded, choose_layout, decode, encoded_spec
from zerojax import aot

pytestmark = pytest.mark.xdist_group("kernels_h200")
D = 2048


@pytest.mark.by_default("nf4")
@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_storage_for_h200_is_gathered_encoded_and_decoded_a_layer_at_a_time(h200_compiler, format):
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=8, fsdp=8)
    layout = choose_layout(format, (D, D), (8, 1))
    stored, whole = (
        P(None, *encoded_spec(layout, ("fsdp", None))),
        P(*encoded_spec(layout, (None, None))),
    )

    def loss(bias, q, x):
        def block(x, layer):
            b, q = layer
            q, x = jax.lax.optimization_barrier((q, x))
            w = decode(
                jax.tree.map(
                    lambda a: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, whole)), q
                )
            )
            return jnp.tanh(x @ w + b), None

        x, _ = jax.lax.scan(jax.checkpoint(block), x, (bias, q))
        return x.astype(jnp.float32).sum()

    def compiled(num_layers: int) -> Any:
        def abstract(a: Any, spec: P) -> Any:
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

        q = jax.tree.map(
            lambda a: abstract(a, stored), abstract_encoded(layout, (num_layers, D, D))
        )
        bias = abstract(jax.ShapeDtypeStruct((num_layers, D), jnp.bfloat16), P())
        x = abstract(jax.ShapeDtypeStruct((256, D), jnp.bfloat16), P("fsdp"))
        return (
            jax.jit(jax.grad(loss)).trace(bias, q, x).lower(lowering_platforms=("cuda",)).compile()
        )

    program = compiled(8)
    gathered = re.findall(r"= (\(.*\)) all-gather(?:-start)?\(", program.as_text())
    # for a layer in forward, and again in backward: all its arrays together
    assert len(gathered) == 2
    codes = {"int8": f"s8[{D * D}]", "nf4": f"u8[{D * D // 2}]"}[format]
    assert all(codes in arrays and "bf16" not in arrays for arrays in gathered)
    grown = (
        program.memory_analysis().temp_size_in_bytes
        - compiled(2).memory_analysis().temp_size_in_bytes
    )
    assert grown < 2 * D * D  # 6 layers' inputs and no decoded layer
