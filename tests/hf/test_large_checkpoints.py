"""A checkpoint is read from a folder's shards to disk and exported to a folder again.

The memory needed does not depend on its size.
"""

import json
import shutil
import subprocess
import sys

import processes
import pytest

SCRIPT = """
import ctypes, gc, json, pathlib, resource, shutil, sys
from typing import Any

import jax, numpy as np, optax
import zerojax as zj
from zerojax.hf import config_of, model_of
from zerojax.weights import Tensor, open_weights, write_safetensors

sizes, limit, root = json.loads(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])


def write(folder, layers):
    # Random bits of one piece, again and again: bfloat16 from 2^-16 to 2^-1.
    folder.mkdir()
    config = {"model_type": "llama", **sizes, "num_hidden_layers": layers, "num_attention_heads": 8}
    (folder / "config.json").write_text(json.dumps(config))
    h, f, v, kv = config["hidden_size"], config["intermediate_size"], config["vocab_size"], config["hidden_size"]
    tensors = {"model.embed_tokens.weight": (v, h), "lm_head.weight": (v, h), "model.norm.weight": (h,)}
    for n in range(layers):
        tensors |= {f"model.layers.{n}.self_attn.{p}_proj.weight": (h, h) for p in "qkvo"}
        tensors |= {f"model.layers.{n}.mlp.{p}_proj.weight": (h, f) if p == "down" else (f, h) for p in ("gate", "up", "down")}
        tensors |= {f"model.layers.{n}.{p}_layernorm.weight": (h,) for p in ("input", "post_attention")}
    bits = np.random.default_rng(0).integers(0x3780, 0x3F00, 1 << 22, dtype=np.uint16)

    def pieces(name):
        left, seed = int(np.prod(tensors[name])), hash(name) % 1000
        while left:
            piece = np.roll(bits, seed)[: min(left, bits.size)]
            yield piece
            left, seed = left - piece.size, seed + 1

    names, files = list(tensors), {}
    for n in range(3):
        mine = names[n::3]
        file = f"model-{n + 1:05}-of-00003.safetensors"
        write_safetensors(str(folder / file), {m: Tensor(tensors[m], "bfloat16") for m in mine}, pieces, {"format": "pt"})
        files |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return sum(int(np.prod(shape)) * 2 for shape in tensors.values())


def same(first, second):
    a, b = open_weights(first), open_weights(second)
    assert a.tensors == b.tensors, set(a.tensors) ^ set(b.tensors)
    for name, t in a.tensors.items():
        rest = tuple((0, n) for n in t.shape[1:])
        for start in range(0, t.shape[0], 1024):
            box = ((start, min(start + 1024, t.shape[0])), *rest)
            assert np.array_equal(a.read(name, box).view(np.uint16), b.read(name, box).view(np.uint16)), name


def peak():
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


# The first pass starts what is started once, such as threads and the compiler.
found = []
for layers in json.loads(sys.argv[4]):
    like, out, ckpt, swap = (root / f"{what}{layers}" for what in ("like", "out", "ckpt", "swap"))
    num_bytes = write(like, layers)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    swap.mkdir()
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    tiers = {"params": "nvme", "opt_state": "nvme", "update": "in_backward", "swap_dir": str(swap)}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the pass before took and gave back is not counted again
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    with zj.build_train_step(model_of(like), optax.sgd(0.1), zj.ZeroConfig(**tiers), mesh) as program:
        state = zj.import_hf(program, like, key=jax.random.key(0))
        with zj.Checkpointer(ckpt) as checkpointer:
            checkpointer.save(program, state)
    zj.export_hf(ckpt, out, like=like, shard_bytes=num_bytes / 3)
    found.append({"bytes": num_bytes, "peak": peak(), "files": len(list(out.glob("*.safetensors")))})
    same(like, out)
    for folder in (like, out, ckpt, swap):
        shutil.rmtree(folder)
print(json.dumps(found))
"""


def run(tmp_path, sizes, limit, layers):
    arguments = [json.dumps(sizes), str(limit), str(tmp_path), json.dumps(layers)]
    # glibc reserves 64 MiB of address space for each of 20 threads, and uses little of it.
    env = processes.environment() | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux reports peak memory in /proc/self/status"
)
def test_peak_of_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """Four times the layers, and the same record."""
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 768}
    _, small, large = run(tmp_path, sizes, 3 << 30, [2, 16, 64])
    assert large["bytes"] - small["bytes"] > 75e6
    assert large["peak"] - small["peak"] < (large["bytes"] - small["bytes"]) / 8
    assert small["files"] >= 3


@pytest.mark.exhaustive
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux reports peak memory in /proc/self/status"
)
def test_four_gigabytes_pass_through_three_of_address_space(tmp_path):
    if (free := shutil.disk_usage(tmp_path).free) < (needed := 24 << 30):
        pytest.skip(f"needs {needed >> 30} GiB of disk, but only {free >> 30} are free")
    sizes = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816}
    _, small, large = run(tmp_path, sizes, 3 << 30, [4, 73, 152])
    assert small["bytes"] > 2.0e9
    assert large["bytes"] > 4.0e9
    assert abs(large["peak"] - small["peak"]) < 0.02 * small["peak"]
