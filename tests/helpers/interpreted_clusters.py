"""Clusters of two blocks in the interpreter of jax 0.10.

That interpreter has neither cluster barriers nor loads shared between blocks. The hardware (PTX,
`mbarrier` and `cp.async.bulk.tensor` with `.multicast::cluster`) works as follows. An arrival on a
cluster's barrier arrives on the barrier of every block. In a shared load, each block reads half of
the data and writes it to the memory of all blocks, at the same place; every block's barrier waits
for both halves. Later interpreters have the barriers, and each block loads all of the data itself.
"""

import functools
import time
from typing import Any
from unittest import mock

import jax
from jax._src import core
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import indexing
from jax._src.state import types as state_types
from jax.experimental import io_callback
from jax.experimental import pallas as pl

BLOCKS = 2
PATIENCE = 20.0  # seconds to wait for a block's memory to exist


class ClusterBarrierType(gpu_core.BarrierType):
    """Type of a barrier that collects the arrivals of all blocks."""


def interpret_clusters(monkeypatch) -> None:
    """Let the interpreter run clusters of two blocks."""
    Interpreter: Any = jaxpr_interpret.JaxprInterpreter
    arrive, copy = (
        Interpreter._interpret_barrier_arrive_p,
        Interpreter._interpret_copy_gmem_to_smem_p,
    )

    def aval_of(barrier: gpu_core.ClusterBarrier) -> state_types.AbstractRef:
        dtype = ClusterBarrierType(BLOCKS * barrier.num_arrivals, barrier.orders_tensor_core)
        return state_types.AbstractRef(core.ShapedArray(barrier.num_barriers, dtype), gpu_core.SMEM)

    def arrive_at_all(interpreter: Any, eqn: Any, token: Any, get_invals: Any) -> Any:
        if not isinstance(eqn.invars[0].aval.inner_aval.dtype, ClusterBarrierType):
            return arrive(interpreter, eqn, token, get_invals)
        barriers, *indices = get_invals()
        for block in range(BLOCKS):
            token, _ = arrive(
                interpreter, eqn, token, lambda b=block: [_of_block(barriers, b), *indices]
            )
        return token, []

    def copy_for_all(interpreter: Any, eqn: Any, token: Any, get_invals: Any) -> Any:
        if not eqn.params["collective_axes"]:
            return copy(interpreter, eqn, token, get_invals)
        assert interpreter.cluster_dims == (BLOCKS,)
        [block] = interpreter.cluster_coords
        with mock.patch.object(
            gpu_callbacks,
            "call_execute_device_local_memory_transfer",
            functools.partial(_call_shared_load, block=block),
        ):
            return copy(interpreter, eqn, token, get_invals)

    get = shared_memory.GPUSharedMemory.get_barrier_and_increment_clock

    def get_when_there(memory: Any, key: Any, *who: Any) -> Any:
        # A cluster's kernel starts when the memory of all its blocks exists.
        until = time.monotonic() + PATIENCE
        while key not in memory.mem:
            assert time.monotonic() < until, (
                f"block {key.thread_id} has no such barrier: the block has ended or never started"
            )
            time.sleep(1e-3)
        return get(memory, key, *who)

    monkeypatch.setattr(gpu_core.ClusterBarrier, "get_ref_aval", aval_of)
    monkeypatch.setattr(Interpreter, "_interpret_barrier_arrive_p", arrive_at_all)
    monkeypatch.setattr(Interpreter, "_interpret_copy_gmem_to_smem_p", copy_for_all)
    monkeypatch.setattr(
        shared_memory.GPUSharedMemory, "get_barrier_and_increment_clock", get_when_there
    )


def _of_block(keys: jax.Array, block: int) -> jax.Array:
    """Return the keys of the same allocations in another block."""
    return keys.at[..., 2].set(
        block
    )  # `HostAllocationKey.thread_id`, of what a block's threads share the block's index


def _call_shared_load(*, token: Any, source_info: Any, **call: Any) -> Any:
    load = functools.partial(_shared_load, source_info=source_info)
    return io_callback(load, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, **call)


def _shared_load(
    *,
    token: Any,
    block: Any,
    dst_allocation_key_as_array: Any,
    barrier_allocation_key_as_array: Any,
    **call: Any,
) -> Any:
    """Write this block's half of the loaded data to both blocks."""
    dst, barrier = (
        jax.numpy.asarray(key)
        for key in (dst_allocation_key_as_array, barrier_allocation_key_as_array)
    )
    where = call["src_transforms"][-1].get_indexer_shape()
    half = where[0] // BLOCKS
    rows = indexing.NDIndexer.from_indices_shape(
        (pl.ds(int(block) * half, half), *[slice(None)] * (len(where) - 1)), where
    )
    for name in ("src_transforms", "dst_transforms"):
        call[name] = (*call[name], rows)
    for target in range(BLOCKS):
        memory, key = gpu_callbacks._get_shared_memory(), _of_block(barrier, target)
        arrivals: Any = memory.get_barrier_and_increment_clock(
            gpu_callbacks.HostAllocationKey.from_array(key),
            int(call["device_id"]),
            int(call["thread_id"]),
        )[0]
        with arrivals.cv:
            arrivals.arrivals_count -= 1 / BLOCKS  # the transfer counts as a full one
        token = gpu_callbacks._execute_device_local_memory_transfer(
            token=token,
            dst_allocation_key_as_array=_of_block(dst, target),
            barrier_allocation_key_as_array=key,
            **call,
        )
    return token
