"""Two processes on one machine (jax.distributed, gloo) train as one process does."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

WORKER = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
processes, me, port, out = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, me)
import toys
import zerojax as zj

mesh = zj.make_mesh(data=2, fsdp=4)
assert mesh.size == 8
losses = {}
for kind in ("layered", "unrolled"):
    config = zj.ZeroConfig(stage=3, clip_norm=0.5, num_microbatches=2)
    program = zj.build_train_step(getattr(toys, kind)(), toys.optimizer(), config, mesh)
    state = program.init(jax.random.key(0))
    # numpy leaves hold this process's part: rows of the first data shard, then of the second
    data = toys.batches(6)
    part = slice(me * toys.BATCH // processes, (me + 1) * toys.BATCH // processes)
    local = [{k: v[part] if getattr(v, "ndim", 0) else v for k, v in b.items()} for b in data]
    losses[kind], state = toys.run(program, state, local)
    losses[kind].append(float(program.eval(state, local[0])))
json.dump(losses, open(f"{out}.{me}", "w"))
"""


def launch(tmp_path: pathlib.Path, processes: int) -> list[dict[str, list[float]]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    out = tmp_path / f"losses{processes}"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(8 // processes), str(processes), str(me), port, str(out)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        )
        for me in range(processes)
    ]  # fmt: skip
    for worker in workers:
        output, _ = worker.communicate(timeout=300)
        assert worker.returncode == 0, output
    return [json.loads(pathlib.Path(f"{out}.{me}").read_text()) for me in range(processes)]


def test_two_processes_train_the_losses_of_one(tmp_path):
    (alone,) = launch(tmp_path, 1)
    first, second = launch(tmp_path, 2)
    assert first == second
    for kind, losses in alone.items():
        np.testing.assert_allclose(first[kind], losses, rtol=1e-5)
        assert losses[-1] < losses[0]
