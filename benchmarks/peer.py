"""Train the same GPT in plain torch, FSDP2 or DeepSpeed, on CPU (gloo) or GPUs (NCCL).

beside_plain.py, nvme_peers.py and gpu_check.py run this program.

"fsdp2-offload" is FSDP2 with parameters, gradients and optimizer state in host memory, and with the
optimizer on the host; "deepspeed3-offload" is ZeRO-3 with the same. "deepspeed3-nvme" is ZeRO-3
with parameters and optimizer state in files below --swap-dir (ZeRO-Infinity), which are removed at
the end. The environment needs torch, and deepspeed for its modes, but not zerojax. Prints one line
of JSON.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from problem import Problem, add_arguments, batches, from_arguments, shapes, weight
from torch import nn
from torch.nn import functional
from usage import disk_bytes, peak_resident_bytes


class Block(nn.Module):
    """Transformer block with pre-norm attention and MLP."""

    def __init__(self, p: Problem) -> None:
        """Make the block's layers with torch's initial weights."""
        super().__init__()
        h = p.hidden
        self.heads = p.heads
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc, self.out = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for x[B, T, H]."""
        batch, seq, hidden = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, seq, 3, self.heads, hidden // self.heads)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.out(functional.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Full model, which returns the mean loss."""

    def __init__(self, p: Problem) -> None:
        """Make the model's layers with torch's initial weights."""
        super().__init__()
        self.wte, self.wpe = nn.Embedding(p.vocab, p.hidden), nn.Embedding(p.seq, p.hidden)
        self.blocks = nn.ModuleList(Block(p) for _ in range(p.layers))
        self.ln_f, self.head = nn.LayerNorm(p.hidden), nn.Linear(p.hidden, p.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens[B, T] with targets[B, T]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(
            self.head(self.ln_f(x)).float().flatten(0, 1), targets.flatten()
        )


def deepspeed_config(mode: str, p: Problem, folder: str | None) -> dict[str, Any]:
    """Return DeepSpeed's settings for a mode; `folder` is for its files, or None."""
    zero: dict[str, Any] = {"stage": int(mode.removeprefix("deepspeed")[0]), "overlap_comm": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": p.batch // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": p.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": p.learning_rate,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.1,
            },
        },
        "steps_per_print": 10**9,
    }
    if mode.endswith("offload"):
        on_host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        zero |= {"offload_optimizer": on_host, "offload_param": on_host}
    if folder is None:
        return config
    on_disk = {"device": "nvme", "nvme_path": folder, "pin_memory": torch.cuda.is_available()}
    largest = max(math.prod(shape) for shape in shapes(p).values())
    zero |= {
        "offload_optimizer": on_disk | {"buffer_count": 4},
        # A buffer holds one parameter; max_in_cpu and max_live_parameters would keep some
        # parameters off the disk.
        "offload_param": on_disk | {"buffer_count": 8, "buffer_size": largest, "max_in_cpu": 0},
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 10**4,
        "stage3_prefetch_bucket_size": 0,
    }
    return config | {
        "aio": {
            "block_size": 2**20,
            "queue_depth": 32,
            "single_submit": False,
            "overlap_events": True,
        }
    }


def make_model(p: Problem, device: torch.device, config: dict[str, Any] | None = None) -> GPT:
    """Return the model with the problem's initial weights.

    With DeepSpeed's `config`, the weights are created directly in DeepSpeed's files.
    """
    if config is None:
        model, whole = GPT(p), contextlib.nullcontext
    else:
        import deepspeed  # type: ignore[import-not-found]

        with deepspeed.zero.Init(config_dict_or_path=config):
            model = GPT(p)
        whole = functools.partial(deepspeed.zero.GatheredParameters, modifier_rank=0)
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(shapes(p))
    for name, parameter in parameters.items():
        with whole(parameter), torch.no_grad():
            parameter.copy_(torch.from_numpy(weight(p, name)))
    return model if config is not None else model.to(device)


def make_step(mode: str, p: Problem, device: torch.device, folder: str | None) -> Any:
    """Return a function step(tokens, targets) that trains a step and returns this rank's loss."""
    adam = {"lr": p.learning_rate, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    half = p.precision == "bf16"
    if mode.startswith("deepspeed"):
        import deepspeed  # type: ignore[import-not-found]

        config = deepspeed_config(mode, p, folder)
        model = make_model(p, device, config if folder is not None else None)
        engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]

        def deepspeed_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return deepspeed_step

    model = make_model(p, device)
    if mode.startswith("fsdp2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        kind: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
        if half:
            kind["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
            )
        if mode == "fsdp2-offload":
            kind["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        for block in model.blocks:
            fully_shard(block, **kind)
        fully_shard(model, **kind)
        half = False  # FSDP2 keeps the float32 masters itself
    masters = (
        [q.detach().clone().requires_grad_() for q in model.parameters()]
        if half
        else list(model.parameters())
    )
    if half:
        model.bfloat16()
    optimizer = torch.optim.AdamW(masters, fused=True, **adam)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        if half:
            for master, q in zip(masters, model.parameters(), strict=True):
                assert q.grad is not None
                master.grad, q.grad = q.grad.float(), None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if half:
            with torch.no_grad():
                for master, q in zip(masters, model.parameters(), strict=True):
                    q.copy_(master)
        return loss.detach()

    return step


def main() -> None:
    """Run one contender and print its losses and step times."""
    parser = argparse.ArgumentParser()
    modes = ["plain", "fsdp2", "fsdp2-offload"]
    modes += ["deepspeed1", "deepspeed2", "deepspeed3", "deepspeed3-offload", "deepspeed3-nvme"]
    parser.add_argument("--mode", choices=modes, required=True)
    parser.add_argument("--swap-dir", help="folder in which deepspeed3-nvme stores its files")
    parser.add_argument(
        "--attention",
        choices=["default", "cudnn"],
        default="default",
        help="torch's choice of attention, or only cuDNN's",
    )
    add_arguments(parser)
    options = parser.parse_args()
    on_disk = options.mode.endswith("nvme")
    if on_disk and options.swap_dir is None:
        parser.error(f"--mode {options.mode} needs a folder on the disk; give --swap-dir")
    with contextlib.ExitStack() as stack:
        folder = (
            stack.enter_context(tempfile.TemporaryDirectory(dir=options.swap_dir))
            if on_disk
            else None
        )
        if options.attention == "cudnn":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
        train(options.mode, from_arguments(options), folder)


def train(mode: str, p: Problem, folder: str | None) -> None:
    """Train in a mode and print the result on rank 0."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpu = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    )
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if ranks > 1 or mode != "plain":
        dist.init_process_group("nccl" if gpu else "gloo")
    step = make_step(mode, p, device, folder)
    each = p.batch // ranks
    losses, seconds, disk = [], [], []
    for tokens, targets in batches(p):
        rows = slice(rank * each, (rank + 1) * each)
        local = [
            torch.from_numpy(np.ascontiguousarray(a[rows])).to(device) for a in (tokens, targets)
        ]
        start = time.perf_counter()
        loss = step(*local).float().clone()
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / ranks)
        disk.append(disk_bytes())
    if rank == 0:
        version = f"torch {torch.__version__}"
        if mode.startswith("deepspeed"):
            import deepspeed  # type: ignore[import-not-found]

            version = f"DeepSpeed {deepspeed.__version__}"
        result = {
            "losses": losses,
            "seconds": seconds,
            "version": version,
            "threads": torch.get_num_threads(),
            "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
            "resident_bytes": peak_resident_bytes(),
            "disk_bytes": disk,
        }
        print("RESULT " + json.dumps(result))
        sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
