"""Several processes whose pipeline stages are on different processes."""

import numpy as np
import processes
import pytest

WORKER = """
import long_decoder, optax
import zerojax as zj

mesh = zj.make_mesh(pipe=2, fsdp=2, devices=jax.devices()[:4])
config = zj.ZeroConfig(num_microbatches=4, pipe_chunks=2, opt_state="pinned_host")
program = zj.build_train_step(long_decoder.model(layers=4), optax.sgd(0.1), config, mesh)
part, num_parts = program.batch_part
assert (part, num_parts) == (0, 1)  # the stages see the same rows
state = program.init(jax.random.key(0))
found = []
for batch in long_decoder.batches(3):
    state, metrics = jax.block_until_ready(program.step(state, batch))
    found.append(float(metrics["loss"]))
evaluation = zj.perplexity(program, state, long_decoder.batches(2))
found += [evaluation.loss, evaluation.tokens]
"""


@pytest.mark.exhaustive
def test_two_processes_with_stages_across_them_train_as_one(tmp_path):
    (one,) = processes.launch(WORKER, tmp_path / "one", 1, devices=4)
    for other in processes.launch(WORKER, tmp_path / "two", 2, devices=4):
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=2e-6)
