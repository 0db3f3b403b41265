"""The order of layers in the records of a pipeline, and its inverse."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from zerojax.state import StageOrder, pick_stage

ORDERS = [
    StageOrder(stages * chunks * size, stages, chunks)
    for stages, chunks, size in itertools.product((2, 3, 4), (1, 2, 3), (1, 2, 3))
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_record_holds_the_layers_of_its_chunk(order):
    size = order.chunk_layers
    for record, stage in np.ndindex(order.layers.shape):
        chunk, k = divmod(record, size)
        layer = (chunk * order.num_stages + stage) * size + k
        assert order.layers[record, stage] == layer
        assert order.find(layer) == (record, stage)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_widen_and_narrow_are_inverse(order):
    stack = np.arange(3 * order.num_layers).reshape(order.num_layers, 3)
    wide = order.widen(stack)
    np.testing.assert_array_equal(wide[..., 0] // 3, order.layers)
    np.testing.assert_array_equal(order.narrow(wide), stack)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_runs_hold_neighboring_layers_and_cover_all_records(order):
    for start, stop in itertools.combinations(range(order.num_records + 1), 2):
        runs = list(order.runs(start, stop))
        assert list(itertools.chain(*runs)) == list(range(start, stop))
        for run in runs:
            assert (np.diff(order.layers[run.start : run.stop], axis=0) == 1).all()
    assert len(list(order.runs(0, order.num_records))) == order.num_chunks


def test_a_layer_is_picked_bit_for_bit():
    mesh = zj.make_mesh(pipe=2, fsdp=2, devices=jax.devices()[:4])
    values = [[0.0, -0.0, np.nan, 1e-45], [-0.0, np.inf, -1.0, 3.5]]
    for dtype in (np.float32, jnp.bfloat16, np.uint8, np.bool_, np.complex64):
        with np.errstate(invalid="ignore"):
            record = np.array(values).astype(dtype)
        placed = jax.device_put(record, NamedSharding(mesh, P("pipe", "fsdp")))
        for stage in range(2):
            layer = jax.jit(pick_stage)(placed, stage)
            assert layer.dtype == record.dtype
            assert np.asarray(layer).tobytes() == record[stage].tobytes()
