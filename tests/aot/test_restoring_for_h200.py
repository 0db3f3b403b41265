"""What puts a restored record in place, compiled for H200s that are not there: at its own address of host memory, in place."""

import jax
import jax.numpy as jnp
import pytest
import tiled_toys
import toys

import zerojax as zj
from zerojax import aot, hlo
from zerojax.checkpoint.contents import leaves_of
from zerojax.checkpoint.program_state import contents_of_program
from zerojax.checkpoint.restore import filler
from zerojax.sharding.specs import named

pytestmark = pytest.mark.xdist_group("h200")
HOST = "pinned_host"
ALL = {"stage": 3, "params": HOST, "grads": HOST, "opt_state": HOST}


@pytest.mark.parametrize("name", ["layers", "tiles", "fraction"])
def test_a_record_is_written_where_it_belongs(name, h200_compiler):
    mesh = aot.gpu_mesh("h200", gpus_per_host=2)
    config = zj.ZeroConfig(**ALL, precision="bf16", opt_state_device_fraction=0.5 if name == "fraction" else 0.0)
    model = tiled_toys.model(stochastic=False) if name == "tiles" else toys.layered()
    program = zj.build_train_step(model, toys.optimizer(), config, mesh)
    leaves = leaves_of(program.layout.abstract_state)
    first = max(content.first for content in contents_of_program(program))
    assert bool(first) == (name == "fraction")
    chosen = {"layers": (1, ""), "tiles": (2, "first"), "fraction": (1, "")}[name]
    pairs = [
        (content, leaf) for content, leaf in zip(contents_of_program(program), leaves, strict=True)
        if (content.lead, content.group) == chosen and content.first == first
    ]  # fmt: skip
    contents, arrays = [content for content, _ in pairs], [jax.tree.leaves(leaf) for _, leaf in pairs]
    lead = contents[0].lead
    values = [jax.ShapeDtypeStruct(c.shape[lead:], c.dtype, sharding=c.record(mesh).sharding) for c in contents]
    index = jax.ShapeDtypeStruct((lead,), jnp.int32, sharding=named(mesh, ()))
    for on_device in (True, False) if first else (False,):
        with jax.set_mesh(mesh):
            compiled = filler(mesh, contents, arrays, on_device).lower(arrays, values, index).compile()
        text = compiled.as_text()
        written = [s for s in hlo.host_slices(text) if s.op == "dynamic-update-slice"]
        assert len(written) == (0 if on_device else len(contents))
        assert not hlo.unsafe_host_slices(text)
        assert all(s.index == "array" and not s.has_descriptor for s in written)
        memory = compiled.memory_analysis()
        assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes  # in place
