"""Adapters are trained over a mixture that does not fit the memory: nf4 experts are read from disk."""

import json
import shutil
import subprocess
import sys

import processes
import pytest

SCRIPT = """
import json, pathlib, resource, sys

import jax, numpy as np, optax
import zerojax as zj
from plain_mixtures import batch_of, write_mixture
from zerojax.costs import traced
from zerojax.hf import model_of

layers, groups, limit, root = *map(int, sys.argv[1:4]), pathlib.Path(sys.argv[4])
like = root / "like"
# Random bits of one piece, again and again: bfloat16 from 2^-16 to 2^-5.
bits = np.random.default_rng(0).integers(0x3780, 0x3D00, 1 << 20, dtype=np.uint16)
shapes = write_mixture(
    like, "bfloat16", lambda name, shape: np.roll(bits, len(name))[: int(np.prod(shape))], 3, vocab_size=2048,
    hidden_size=512, intermediate_size=512, moe_intermediate_size=512, num_experts=16, num_hidden_layers=layers,
    num_attention_heads=8, num_key_value_heads=8, head_dim=64,
)
num_bytes = sum(int(np.prod(shape)) * 2 for shape in shapes.values())

lora = zj.Lora(rank=4, alpha=8, targets=("q_proj", "v_proj"))
model, tx = model_of(like, lora=lora, expert_groups=groups), optax.adamw(1e-3)
mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
fields = {"frozen": "nvme", "frozen_dtype": "nf4", "swap_dir": str(root / "swap")}
(root / "swap").mkdir()
batch = batch_of(1, rows=1)
traced.is_there = lambda mesh: False  # the plan's bytes matter, not its seconds
machine = zj.Machine(
    name="toy", device_bytes=10**10, host_bytes=10**11, disk_bytes=10**12, flops={"fp32": 1e11, "bf16": 1e11},
    memory_rate=1e10, link_up=1e10, link_down=1e10, link_both=2e10, disk_read=3e9, disk_write=3e9, disk_both=3e9,
    host_kernel=2e10,
)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with zj.build_train_step(model, tx, zj.ZeroConfig(**fields), mesh) as program:
    state = zj.import_hf(program, like, key=jax.random.key(0))
    losses, read = [], []
    for _ in range(3):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
        read.append(float(metrics["swap_read_bytes"]))
    config = program.config
    gathered = program.memory(batch).tiers["device"]["gathered"]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
names = ("stage", "params", "grads", "opt_state", "frozen", "frozen_dtype", "swap_dir", "activations")
fixed = {name: getattr(config, name) for name in names}
plan = zj.plan(model, tx, mesh, batch, machine, fixed=fixed)
found = {"bytes": num_bytes, "losses": losses, "read": read, "plan": plan.disk_bytes["read"]}
print(json.dumps(found | {"gathered": gathered, "peak": peak}))
"""


def run(tmp_path, layers, groups, limit):
    # glibc reserves 64 MiB of address space for each of 20 threads, and uses little of it.
    env = processes.environment() | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(layers), str(groups), str(limit), str(tmp_path)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux")
@pytest.mark.parametrize(
    ("layers", "groups", "least"), [(4, 1, 1e8), (4, 16, 1e8), (150, 1, 4e9), (150, 16, 4e9)]
)
def test_adapters_train_over_a_mixture_larger_than_the_address_space(
    tmp_path, layers, groups, least
):
    if (free := shutil.disk_usage(tmp_path).free) < (needed := 8 << 30):
        pytest.skip(f"needs {needed >> 30} GiB of disk, but only {free >> 30} are free")
    found = run(tmp_path, layers, groups, 3 << 30)
    assert found["bytes"] > least
    assert found["losses"][2] < found["losses"][0]
    assert found["read"][1:] == [found["plan"]] * 2
    # The experts of a layer are 12.6 M numbers, decoded in float32, and a single one 0.8 M.
    assert (found["gathered"] < 12.6e6) == (groups > 1)
    shutil.rmtree(tmp_path / "like")
