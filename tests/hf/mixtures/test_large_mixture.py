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
from zerojax.costs import traced
from zerojax.hf import model_of
from zerojax.weights import Tensor, write_safetensors

layers, limit, root = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
H, F, E, V, HEADS, D = 512, 512, 16, 2048, 8, 64
config = {
    "model_type": "qwen3_moe", "vocab_size": V, "hidden_size": H, "intermediate_size": F, "moe_intermediate_size": F,
    "num_experts": E, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_hidden_layers": layers,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": D, "max_position_embeddings": 128,
}
like = root / "like"
like.mkdir()
(like / "config.json").write_text(json.dumps(config))
tensors = {"model.embed_tokens.weight": (V, H), "lm_head.weight": (V, H), "model.norm.weight": (H,)}
for n in range(layers):
    layer = f"model.layers.{n}"
    tensors |= {f"{layer}.self_attn.{p}_proj.weight": (HEADS * D, H) for p in "qkv"}
    tensors |= {f"{layer}.self_attn.o_proj.weight": (H, HEADS * D)}
    tensors |= {f"{layer}.self_attn.{p}_norm.weight": (D,) for p in "qk"}
    tensors |= {f"{layer}.{p}_layernorm.weight": (H,) for p in ("input", "post_attention")}
    tensors |= {f"{layer}.mlp.gate.weight": (E, H)}
    for e in range(E):
        expert = f"{layer}.mlp.experts.{e}"
        tensors |= {f"{expert}.{p}_proj.weight": (H, F) if p == "down" else (F, H) for p in ("gate", "up", "down")}
# Random bits of one piece, again and again: bfloat16 from 2^-16 to 2^-5.
bits = np.random.default_rng(0).integers(0x3780, 0x3D00, 1 << 20, dtype=np.uint16)


def pieces(name):
    yield np.roll(bits, len(name))[: int(np.prod(tensors[name]))]


names, files = list(tensors), {}
for n in range(3):
    mine = names[n::3]
    file = f"model-{n + 1:05}-of-00003.safetensors"
    write_safetensors(str(like / file), {m: Tensor(tensors[m], "bfloat16") for m in mine}, pieces, {"format": "pt"})
    files |= dict.fromkeys(mine, file)
(like / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
num_bytes = sum(int(np.prod(shape)) * 2 for shape in tensors.values())

lora = zj.Lora(rank=4, alpha=8, targets=("q_proj", "v_proj"))
model, tx = model_of(like, lora=lora), optax.adamw(1e-3)
mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
fields = {"frozen": "nvme", "frozen_dtype": "nf4", "swap_dir": str(root / "swap")}
(root / "swap").mkdir()
tokens = np.random.default_rng(1).integers(0, V, (1, 9)).astype(np.int32)
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
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
names = ("stage", "params", "grads", "opt_state", "frozen", "frozen_dtype", "swap_dir", "activations")
fixed = {name: getattr(config, name) for name in names}
plan = zj.plan(model, tx, mesh, batch, machine, fixed=fixed)
found = {"bytes": num_bytes, "losses": losses, "read": read, "plan": plan.disk_bytes["read"]}
print(json.dumps(found))
"""


def run(tmp_path, layers, limit):
    # glibc reserves 64 MiB of address space for each of 20 threads, and uses little of it.
    env = processes.environment() | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(layers), str(limit), str(tmp_path)],
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
@pytest.mark.parametrize(("layers", "least"), [(4, 1e8), (150, 4e9)])
def test_adapters_train_over_a_mixture_larger_than_the_address_space(tmp_path, layers, least):
    if (free := shutil.disk_usage(tmp_path).free) < (needed := 8 << 30):
        pytest.skip(f"needs {needed >> 30} GiB of disk, but only {free >> 30} are free")
    found = run(tmp_path, layers, 3 << 30)
    assert found["bytes"] > least
    assert found["losses"][2] < found["losses"][0]
    assert found["read"][1:] == [found["plan"]] * 2
    shutil.rmtree(tmp_path / "like")
