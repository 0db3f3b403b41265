"""Programs that put restored records in place, compiled for absent H200s.

Each record is written in place, at its own address of host memory.
"""

import jax
import jax.numpy as jnp
import pytest
import tiled_toys
import toys

import zerojax as zj
from zerojax import aot, hlo
from zerojax.checkpoint.leaves import state_arrays
from zerojax.checkpoint.program_state import leaves_of_program
from zerojax.checkpoint.restore import filler
from zerojax.sharding.specs import named

pytestmark = pytest.mark.xdist_group("h200")
HOST = "pinned_host"
ALL = {"stage": 3, "params": HOST, "grads": HOST, "opt_state": HOST}


@pytest.mark.parametrize("name", ["layers", "tiles", "fraction"])
def test_a_record_is_written_where_it_belongs(name, h200_compiler):
    mesh = aot.gpu_mesh("h200", gpus_per_host=2)
    config = zj.ZeroConfig(
        **ALL, precision="bf16", opt_state_device_fraction=0.5 if name == "fraction" else 0.0
    )
    model = tiled_toys.model(stochastic=False) if name == "tiles" else toys.layered()
    program = zj.build_train_step(model, toys.optimizer(), config, mesh)
    values = state_arrays(program.layout.abstract_state)
    first = max(leaf.first for leaf in leaves_of_program(program))
    assert bool(first) == (name == "fraction")
    chosen = {"layers": (1, ""), "tiles": (2, "first"), "fraction": (1, "")}[name]
    pairs = [
        (leaf, value) for leaf, value in zip(leaves_of_program(program), values, strict=True)
        if (leaf.lead, leaf.group) == chosen and leaf.first == first
    ]  # fmt: skip
    leaves, arrays = [leaf for leaf, _ in pairs], [jax.tree.leaves(value) for _, value in pairs]
    lead = leaves[0].lead
    values = [
        jax.ShapeDtypeStruct(leaf.shape[lead:], leaf.dtype, sharding=leaf.record(mesh).sharding)
        for leaf in leaves
    ]
    index = jax.ShapeDtypeStruct((lead,), jnp.int32, sharding=named(mesh, ()))
    for on_device in (True, False) if first else (False,):
        with jax.set_mesh(mesh):
            compiled = (
                filler(mesh, leaves, arrays, on_device).lower(arrays, values, index).compile()
            )
        text = compiled.as_text()
        written = [s for s in hlo.host_slices(text) if s.op == "dynamic-update-slice"]
        assert len(written) == (0 if on_device else len(leaves))
        assert not hlo.unsafe_host_slices(text)
        assert all(s.index == "array" and not s.has_descriptor for s in written)
        memory = compiled.memory_analysis()
        assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes  # in place
