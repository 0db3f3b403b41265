"""Adapters on attention over frozen experts, in 32, 8 or 4 bits and any tier, track PEFT.

A step reads from the disk what the plan says.
"""

import jax
import numpy as np
import optax
import pytest
from hf_models import need
from mixture_models import batch_of, program_of, torch_losses, write

import zerojax as zj
from zerojax.costs import traced
from zerojax.hf import model_of

need("torch", "transformers", "peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
)

LORA = zj.Lora(rank=3, alpha=12, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4}
"""Sizes wide enough for blocks of 64 and 256 numbers."""
BASES = {"float32": {}, "int8": {"frozen_dtype": "int8"}, "nf4": {"frozen_dtype": "nf4"}}
MACHINE = zj.Machine(
    name="toy", device_bytes=10**9, host_bytes=10**12, disk_bytes=10**12, flops={"fp32": 1e11, "bf16": 1e11},
    memory_rate=1e10, link_up=1e10, link_down=1e10, link_both=2e10, disk_read=3e9, disk_write=3e9, disk_both=3e9,
    host_kernel=2e10, devices_per_node=2, network_in_node=1e10, network_between_nodes=1e10,
)  # fmt: skip


def set_base(theirs, program, state):
    """Give a torch model the base that a program computes with, decoded; return the largest change."""
    import torch

    pieces = {name: jax.tree.map(np.asarray, tree) for name, tree in program.iter_params(state)}
    largest = 0.0

    def put(parameter, value):
        nonlocal largest
        value = torch.tensor(np.asarray(value, np.float32))
        with torch.no_grad():
            largest = max(largest, float((parameter - value).abs().max()))
            parameter.copy_(value)

    put(theirs.model.embed_tokens.weight, pieces["embed"]["embed_tokens"]["embedding"])
    put(theirs.lm_head.weight, pieces["head"]["lm_head"]["embedding"])
    for number, layer in enumerate(theirs.model.layers):
        ours = pieces[f"blocks/{number}"]
        for name in LORA.targets:
            put(getattr(layer.self_attn, name).weight, ours["self_attn"][name]["kernel"].T)
        experts = ours["mlp"]["experts"]
        fused = np.concatenate([experts["gate_proj"], experts["up_proj"]], -1)
        put(layer.mlp.experts.gate_up_proj, fused.swapaxes(1, 2))
        put(layer.mlp.experts.down_proj, experts["down_proj"].swapaxes(1, 2))
        put(layer.mlp.gate.weight, ours["mlp"]["router"]["kernel"].T)
    return largest


@pytest.mark.exhaustive  # by default test_lora.py tracks PEFT
def test_adapters_of_all_projections_are_on_attention(tmp_path):
    import peft

    like = tmp_path / "model"
    theirs = write("glm4_moe", like)
    model = model_of(like, lora=zj.Lora(rank=3, alpha=12, targets="all"))
    program = program_of(model, "device", tmp_path)
    state = zj.import_hf(program, like, key=jax.random.key(1))
    with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
        ckpt.save(program, state)
    zj.export_peft(tmp_path / "ckpt", tmp_path / "adapters", like=like)
    losses = []
    for step in range(5):
        state, metrics = program.step(state, batch_of(step))
        losses.append(float(jax.block_until_ready(metrics["loss"])))
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters", is_trainable=True)
    trained = [p for name, p in adapted.named_parameters() if "lora_" in name]
    assert len(trained) == 2 * 4 * 3
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert count == sum(p.numel() for p in trained)
    np.testing.assert_allclose(losses, torch_losses(adapted, parameters=trained), rtol=0, atol=1e-4)


# by default test_lora.py tracks PEFT from disk, and the other file here imports experts
@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", ["device", "pinned_host", "nvme"])
@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("mesh", ["alone", "experts"])
def test_adapters_over_frozen_experts_track_peft_and_the_plan(
    tmp_path, monkeypatch, mesh, base, tier
):
    import peft

    monkeypatch.setattr(traced, "is_there", lambda mesh: False)  # the plan's bytes matter alone
    like = tmp_path / "model"
    theirs = write("qwen3_moe", like, **SIZES)
    model = model_of(like, lora=LORA)
    fields = {"frozen": tier, **BASES[base]}
    with program_of(model, mesh, tmp_path, stage=3, **fields) as program:
        state = zj.import_hf(program, like, key=jax.random.key(1))
        error = set_base(theirs, program, state)
        assert (error > 1e-3) == (base != "float32")
        with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
            ckpt.save(program, state)
        zj.export_peft(tmp_path / "ckpt", tmp_path / "adapters", like=like)
        losses, read = [], []
        for step in range(5):
            state, metrics = program.step(state, batch_of(step))
            losses.append(float(jax.block_until_ready(metrics["loss"])))
            assert not metrics.get("swap_write_bytes", 0.0)
            read.append(float(metrics.get("swap_read_bytes", 0.0)))
        config, devices = program.config, program.mesh
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters", is_trainable=True)
    trained = [p for name, p in adapted.named_parameters() if "lora_" in name]
    assert len(trained) == 2 * 4 * 3
    np.testing.assert_allclose(losses, torch_losses(adapted, parameters=trained), rtol=0, atol=1e-4)
    if tier != "nvme":
        assert not any(read)
        return
    assert all(read)
    if mesh == "experts":  # which zj.plan does not support
        return
    fixed = {
        name: getattr(config, name)
        for name in ("stage", "params", "grads", "opt_state", "frozen", "frozen_dtype", "swap_dir")
    }
    plan = zj.plan(model, optax.adamw(1e-3), devices, batch_of(), MACHINE, fixed=fixed)
    assert read[1:] == [plan.disk_bytes["read"]] * 4
