"""The language model of an image model is trained within its folder, or saved alone.

docs/fine_tuning.md says how.
"""

import math
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
from hf_models import (
    CASES,
    SIZES,
    batch_of,
    bits,
    losses_of,
    need,
    program_of,
    torch_logits,
    torch_losses,
)
from mixture_models import CASES as MIXTURES
from safetensors.numpy import load_file, save_file

import zerojax as zj
from zerojax.hf import FAMILIES, config_of, model_of
from zerojax.weights import open_weights, renaming

need("torch", "transformers")

PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "fine_tuning.md"
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def write(kind, folder):
    """Write a tiny image model."""
    import torch
    import transformers

    torch.manual_seed(0)
    tokens = {"image_token_index": 95}
    if kind == "gemma3":
        text = {**SIZES, "head_dim": 16, "sliding_window": 5}
        tokens |= {"boi_token_index": 94, "eoi_token_index": 93}
        config = transformers.Gemma3Config(
            text_config=text, vision_config=VISION, mm_tokens_per_image=4, **tokens
        )
    elif kind == "llava":
        text, vision = transformers.LlamaConfig(**SIZES), transformers.CLIPVisionConfig(**VISION)
        config = transformers.LlavaConfig(text_config=text, vision_config=vision, **tokens)
    elif kind == "mllama":
        text = {**SIZES, "num_hidden_layers": 4, "cross_attention_layers": [1], "pad_token_id": 0}
        text["rope_parameters"] = CASES["llama3"][1]["rope_parameters"]
        vision = {**VISION, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 64}
        vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
        config = transformers.MllamaConfig(text_config=text, vision_config=vision, **tokens)
    elif kind == "llama4":
        text = {**SIZES, **MIXTURES["llama4-dense"][1]}
        vision = {
            **VISION,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        }
        config = transformers.Llama4Config(text_config=text, vision_config=vision, **tokens)
    else:
        text = transformers.MistralConfig(**SIZES, sliding_window=None)
        if kind == "ministral3":
            text = transformers.Ministral3Config(**{**SIZES, **CASES["ministral3"][1]})
        vision = transformers.PixtralVisionConfig(**VISION)
        config = transformers.Mistral3Config(
            text_config=text,
            vision_config=vision,
            tie_word_embeddings=kind == "ministral3",
            **tokens,
        )
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", trust_remote_code=False
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="60KB")
    return model.eval()


def callable_half(full):
    """Return a model that takes text alone: transformers 5.24 fails in Llama 4's full model."""
    return full.language_model if full.config.model_type == "llama4" else full


def save(program, state, folder):
    with zj.Checkpointer(folder) as ckpt:
        ckpt.save(program, state)


@pytest.mark.by_default("ministral3")
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "ministral3", "mllama", "llama4"])
def test_the_text_half_of_a_folder_is_trained_and_the_rest_is_copied(tmp_path, kind):
    import torch
    import transformers

    like = tmp_path / "full"
    full = write(kind, like)
    program = program_of(model_of(like), "device", tmp_path)
    state = zj.import_hf(program, like, key=jax.random.key(0))
    expected = torch_logits(callable_half(full), batch_of()).detach().numpy()
    assert np.abs(np.asarray(program.apply(state, batch_of())) - expected).max() < 1e-4
    save(program, state, tmp_path / "untouched")
    zj.export_hf(tmp_path / "untouched", tmp_path / "same", like=like)
    assert bits(tmp_path / "same") == bits(like)
    losses, state = losses_of(program, state)
    text = [p for name, p in full.named_parameters() if is_text(name)]
    np.testing.assert_allclose(
        losses, torch_losses(callable_half(full), parameters=text), rtol=0, atol=1e-4
    )
    save(program, state, tmp_path / "trained")
    zj.export_hf(tmp_path / "trained", tmp_path / "out", like=like)
    pair: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out",
        output_loading_info=True,
        attn_implementation="eager",
        dtype=torch.float32,
        trust_remote_code=False,
    )
    loaded, info = pair
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = np.asarray(program.apply(state, batch_of()))
    assert (
        np.abs(ours - torch_logits(callable_half(loaded.eval()), batch_of()).detach().numpy()).max()
        < 1e-4
    )
    before, after = bits(like), bits(tmp_path / "out")
    vision = {name for name in before if "vision" in name or "multi_modal_projector" in name}
    assert len(vision) > 5
    assert all(before[name] == after[name] for name in vision)


def is_text(name):
    return ("language_model" in name or "lm_head" in name) and "cross_attn" not in name


@pytest.mark.exhaustive  # by default, the newer names
def test_older_names_of_a_folder_of_images_are_read_and_exported(tmp_path):
    """The hub's files of Gemma 3 begin with `language_model.model` and `vision_tower`."""
    like = tmp_path / "full"
    full = write("gemma3", like)
    renamed = {}
    for file in like.glob("*.safetensors"):
        for name, array in load_file(file).items():
            name = name.removeprefix("model.")
            if name.startswith("language_model.") and "language_model.model." not in name:
                name = name.replace("language_model.", "language_model.model.")
            renamed[name] = array
        file.unlink()
    (like / "model.safetensors.index.json").unlink()
    save_file(renamed, like / "model.safetensors", {"format": "pt"})
    program = program_of(model_of(like), "nvme", tmp_path)
    state = zj.import_hf(program, like, key=jax.random.key(0))
    expected = torch_logits(full, batch_of()).detach().numpy()
    assert np.abs(np.asarray(program.apply(state, batch_of())) - expected).max() < 1e-4
    save(program, state, tmp_path / "ckpt")
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=like)
    assert bits(tmp_path / "out") == bits(like)


def test_the_language_model_of_another_model_of_images_is_saved_alone(tmp_path):
    full, inner = write("llava", tmp_path / "full"), "llama"
    with pytest.raises(
        ValueError,
        match=rf"language model belongs to a supported family, '{inner}': docs/fine_tuning.md shows",
    ):
        config_of(tmp_path / "full")
    block = next(
        b
        for b in re.findall(r"```python[^\n]*\n(.*?)```", PAGE.read_text(), re.S)
        if "language_model" in b
    )
    block = block.replace("llava-1.5-7b-hf", str(tmp_path / "full")).replace(
        "llava-text", str(tmp_path / "text")
    )
    exec(block, {})
    config, file = config_of(tmp_path / "text"), open_weights(tmp_path / "text")
    assert sum(math.prod(tensor.shape) for tensor in file.tensors.values()) == config.num_params
    place = renaming(FAMILIES[inner].names)
    assert {place(name).name.split(".")[0] for name in file.tensors} == {"embed", "blocks", "head"}
    table = full.model.language_model.embed_tokens.weight.detach().numpy()
    assert (
        file.read("model.embed_tokens.weight", tuple((0, n) for n in table.shape)) == table
    ).all()
