"""Options of adapters: rates, noise, dropout in tiles, and combinations that are refused by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hf_models import batch_of, losses_of, need, program_of, write
from safetensors.numpy import load_file, save_file

import zerojax as zj
from zerojax.hf import lora_plus, model_of, read_peft

need("torch", "transformers")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": "yes"}, "use_dora='yes' of a Lora: a bool is needed"),
        ({"use_rslora": 1}, "use_rslora=1 of a Lora"),
        ({"init": "olora"}, "init='olora' of a Lora: 'default', 'pissa' or"),
        ({"init": "pissa_niter_0"}, "init='pissa_niter_0'"),
        ({"modules_to_save": "lm_head"}, r"modules_to_save='lm_head' of a Lora: a tuple"),
        ({"modules_to_save": ("q_proj",)}, "q_proj is a target, too"),
        (
            {"targets": ("lm_head",), "use_dora": True},
            "use_dora=True of a Lora is not built for the target lm_head",
        ),
        (
            {"targets": ("embed_tokens",), "init": "pissa"},
            "init='pissa' of a Lora is not built for the target embed_tokens",
        ),
    ],
)
def test_options_of_adapters_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        zj.Lora(**{"rank": 4, "alpha": 8, **fields})


def test_adapters_that_a_model_cannot_have_are_refused(tmp_path):
    write("llama", tmp_path / "model")
    write("llama-tied", tmp_path / "tied")
    cases = [
        ("model", {"modules_to_save": ("score",)}, {}, "no module .* ends with 'score'; .*lm_head"),
        ("model", {"modules_to_save": ("self_attn.q_proj",)}, {}, "q_proj is a target, too"),
        ("model", {"targets": "all", "use_dora": True}, {"mlp_tiles": 2}, "mlp_tiles=2 .*use_dora"),
        ("model", {"targets": "all", "dropout": 0.1}, {"mlp_tiles": 2}, "mlp_tiles=2 .*dropout"),
        ("model", {"modules_to_save": ("mlp",)}, {"mlp_tiles": 2}, "mlp_tiles=2 .*modules_to_save"),
        ("model", {}, {"neftune_noise_alpha": -1}, "neftune_noise_alpha=-1: a finite number"),
        ("tied", {"targets": ("lm_head",)}, {}, "ties lm_head to the embedding, so it has no"),
        ("tied", {"modules_to_save": ("embed_tokens",)}, {}, "ties lm_head .*would train a copy"),
        ("tied", {"modules_to_save": ("lm_head",)}, {}, "modules_to_save=.*lm_head"),
    ]
    for folder, options, model, message in cases:
        lora = zj.Lora(**{"rank": 2, "alpha": 4, **options})
        with pytest.raises(ValueError, match=message):
            model_of(tmp_path / folder, lora=lora, **model)


def test_folders_of_adapters_that_do_not_fit_are_refused(tmp_path):
    like = tmp_path / "model"
    write("llama", like, num_hidden_layers=1)
    lora = zj.Lora(rank=2, alpha=4)
    program = program_of(model_of(like, lora=lora), "device", tmp_path, 1)
    with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
        ckpt.save(program, zj.import_hf(program, like, key=jax.random.key(0)))
    folder = tmp_path / "adapters"
    zj.export_peft(tmp_path / "ckpt", folder, like=like)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")

    def replace(options, weights):
        (folder / "adapter_config.json").write_text(json.dumps(config | options))
        save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})

    def import_adapters():
        zj.import_hf(program, like, key=jax.random.key(0), adapters=folder)

    for key, value in {
        "peft_type": "ADALORA",
        "bias": "all",
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"q_proj": 4},
        "layers_to_transform": [0],
        "trainable_token_indices": [1],
        "init_lora_weights": "olora",
    }.items():
        replace({key: value}, tensors)
        with pytest.raises(ValueError, match=f"adapter_config.json has {key}="):
            read_peft(folder)
    replace({"lora_alpha": 8}, tensors)
    with pytest.raises(ValueError, match=r"adapters with scale=4.0, and here it is 2.0: build"):
        import_adapters()
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    replace({}, {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(zj.CheckpointError, match=f"holds other adapters: no {name}"):
        import_adapters()
    replace({}, tensors | {name: tensors[name][:-1].copy()})
    with pytest.raises(zj.CheckpointError, match=rf"{name} \[23, 2\], and here it is \[24, 2\]"):
        import_adapters()
    replace({}, tensors | {"base_model.model.score.weight": tensors[name]})
    with pytest.raises(zj.CheckpointError, match=r"score.weight, which this model does not have"):
        import_adapters()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(zj.CheckpointError, match=r"adapter_model.bin, a pickle"):
        read_peft(folder)
    plain = program_of(model_of(like), "device", tmp_path, 1)
    with pytest.raises(ValueError, match=r"adapters=.*, but the program's model has no adapters"):
        zj.import_hf(plain, like, key=jax.random.key(0), adapters=folder)


def test_adapters_that_are_not_beside_the_base_are_not_switched_off(tmp_path):
    write("llama", tmp_path)
    batch = batch_of() | {"adapters": np.float32(0)}
    for options in ({"use_dora": True}, {"init": "pissa"}, {"modules_to_save": ("norm",)}):
        check = model_of(tmp_path, lora=zj.Lora(rank=2, alpha=4, **options)).check_batch
        assert check is not None
        with pytest.raises(ValueError, match="a batch has 'adapters', but the model without"):
            check(batch)


def test_lora_plus_trains_b_at_its_own_rate():
    a = jnp.ones((2, 3))
    params = {
        "embed": {"embed_tokens": {"lora": {"lora_a": a}}},
        "blocks": {"q_proj": {"lora": {"lora_a": a, "lora_b": a, "lora_m": a[0]}}},
        "head": {"norm": {"scale": a[0]}},
    }
    tx = lora_plus(optax.sgd, lambda count: 0.5, 4, embedding_rate=0.25)
    updates, _ = tx.update(params, tx.init(params), params)
    found = jax.tree.map(lambda u: float(-u.ravel()[0]), updates)
    assert found["embed"]["embed_tokens"]["lora"] == {"lora_a": 0.25}
    assert found["blocks"]["q_proj"]["lora"] == {"lora_a": 0.5, "lora_b": 2.0, "lora_m": 2.0}
    assert found["head"]["norm"]["scale"] == 2.0
    for arguments, message in (
        ((1e-4, 0), "ratio"),
        ((0, 2), "learning_rate"),
        ((-1.0, 2), "rate"),
    ):
        with pytest.raises(ValueError, match=message):
            lora_plus(optax.adamw, *arguments)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning")
@pytest.mark.exhaustive  # by default, the groups of parameters are checked alone
def test_lora_plus_trains_as_in_peft(tmp_path):
    import functools

    import peft
    import torch
    from hf_models import torch_loss
    from peft.optimizers import create_loraplus_optimizer

    like = tmp_path / "model"
    theirs = write("llama", like)
    lora = zj.Lora(rank=2, alpha=4, targets=("q_proj", "embed_tokens"), use_rslora=True)
    tx = lora_plus(functools.partial(optax.adamw, weight_decay=0.0), 1e-3, 8, embedding_rate=1e-4)
    program = program_of(model_of(like, lora=lora), "device", tmp_path, 1, tx=tx)
    state = zj.import_hf(program, like, key=jax.random.key(0))
    with zj.Checkpointer(tmp_path / "ckpt") as ckpt:
        ckpt.save(program, state)
    zj.export_peft(tmp_path / "ckpt", tmp_path / "adapters", like=like)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters", is_trainable=True)
    optimizer = create_loraplus_optimizer(
        adapted, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=8, loraplus_lr_embedding=1e-4
    )
    losses = []
    for step in range(4):
        loss = torch_loss(adapted, batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ours, _ = losses_of(program, state, steps=4)
    np.testing.assert_allclose(ours, losses, rtol=0, atol=1e-4)


def test_noise_is_uniform_bounded_and_in_training_alone():
    from flax import nnx

    from zerojax.hf.adapters.layers import Noise

    noise = Noise(5.0, rngs=nnx.Rngs(0))
    x = jnp.zeros((4, 16, 64))
    values = np.asarray(noise(x))
    bound = 5.0 / np.sqrt(16 * 64)
    assert np.abs(values).max() <= bound
    np.testing.assert_allclose(values.std(), bound / np.sqrt(3), rtol=0.05)
    assert (np.asarray(noise(x)) != values).any()
    noise.eval()
    assert not np.asarray(noise(x)).any()


@pytest.mark.exhaustive  # by default, the noise is checked alone
def test_a_step_trains_with_noise_and_an_evaluation_has_none(tmp_path):
    write("llama", tmp_path, num_hidden_layers=1)
    lora = zj.Lora(rank=2, alpha=4)
    program = program_of(
        model_of(tmp_path, lora=lora, neftune_noise_alpha=5.0), "device", tmp_path, 1
    )
    state = zj.import_hf(program, tmp_path, key=jax.random.key(1))
    evaluated = float(program.eval(state, batch_of()))
    assert evaluated == float(program.eval(state, batch_of()))
    (loss,), _ = losses_of(program, state, steps=1)
    assert 1e-4 < abs(loss - evaluated) < 0.5
