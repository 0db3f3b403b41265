"""Several processes on meshes whose `context` spans them."""

import dataclasses

import numpy as np
import processes
import pytest
from jax.sharding import Mesh

from zerojax.sharding import batch_part


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of a process."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def mesh_of(num_processes: int, **sizes: int) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    per_process = count // num_processes
    devices = np.array([Device(n, n // per_process) for n in range(count)], dtype=object)
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


@pytest.mark.parametrize(
    ("num_processes", "sizes", "expected"),
    [
        (4, {"data": 2, "fsdp": 4, "tensor": 1}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (4, {"data": 1, "fsdp": 2, "context": 4, "tensor": 1}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (2, {"data": 1, "fsdp": 1, "context": 4, "tensor": 2}, [(0, 1), (0, 1)]),
        (2, {"data": 1, "fsdp": 2, "expert": 2, "context": 2, "tensor": 1}, [(0, 2), (1, 2)]),
        (2, {"pipe": 2, "data": 1, "fsdp": 2, "tensor": 1}, [(0, 1), (0, 1)]),
        (4, {"pipe": 2, "data": 1, "fsdp": 2, "tensor": 1}, [(0, 2), (1, 2), (0, 2), (1, 2)]),
        (4, {"tensor": 2, "data": 2, "fsdp": 2}, [(0, 2), (1, 2), (0, 2), (1, 2)]),
    ],
)
def test_processes_that_share_rows_provide_the_same_part(num_processes, sizes, expected):
    mesh = mesh_of(num_processes, **sizes)
    assert [batch_part(mesh, process) for process in range(num_processes)] == expected


WORKER = """
import functools
import long_decoder, optax
import numpy as np
import zerojax as zj

attend = functools.partial(long_decoder.split_attention, "ring")
found = {}
for name, sizes in (("across", {"fsdp": 1, "context": 4}), ("inside", {"fsdp": 2, "context": 2})):
    mesh = zj.make_mesh(**sizes, devices=jax.devices()[:4])
    config = zj.ZeroConfig(params="pinned_host", num_microbatches=2)
    program = zj.build_train_step(long_decoder.model(attend), optax.sgd(0.1), config, mesh)
    part, num_parts = program.batch_part
    rows = long_decoder.BATCH // num_parts
    own = slice(part * rows, (part + 1) * rows)
    data = [{key: a[own] for key, a in batch.items()} for batch in long_decoder.batches(3)]
    state = program.init(jax.random.key(0))
    losses = []
    for batch in data:
        state, metrics = jax.block_until_ready(program.step(state, batch))
        losses.append(float(metrics["loss"]))
    evaluation = zj.perplexity(program, state, data)
    found[name] = [*losses, evaluation.loss, evaluation.tokens, num_parts]
"""


@pytest.mark.exhaustive
def test_two_processes_with_a_sequence_across_them_train_as_one(tmp_path):
    (one,) = processes.launch(WORKER, tmp_path / "one", 1, devices=4)
    for other in processes.launch(WORKER, tmp_path / "two", 2, devices=4):
        for name in one:
            np.testing.assert_allclose(other[name][:-1], one[name][:-1], rtol=2e-6)
        assert [other["across"][-1], other["inside"][-1]] == [1, 2]
