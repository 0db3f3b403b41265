"""The language model of an image model can be saved as docs/fine_tuning.md says.

The result is a folder from which a model can be built.
"""

import math
import pathlib
import re

import pytest
from hf_models import SIZES, need

from zerojax.hf import FAMILIES, config_of
from zerojax.weights import open_weights, renaming

need("torch", "transformers")

PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "fine_tuning.md"
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def write(kind, folder):
    """Write a tiny image model."""
    import transformers

    if kind == "gemma3":
        text = {**SIZES, "head_dim": 16, "sliding_window": 5}
        tokens = {"image_token_index": 95, "boi_token_index": 94, "eoi_token_index": 93}
        config = transformers.Gemma3Config(
            text_config=text, vision_config=VISION, mm_tokens_per_image=4, **tokens
        )
    elif kind == "llava":
        text, vision = transformers.LlamaConfig(**SIZES), transformers.CLIPVisionConfig(**VISION)
        config = transformers.LlavaConfig(
            text_config=text, vision_config=vision, image_token_index=95
        )
    else:
        text, vision = (
            transformers.MistralConfig(**SIZES),
            transformers.PixtralVisionConfig(**VISION),
        )
        config = transformers.Mistral3Config(
            text_config=text, vision_config=vision, image_token_index=95
        )
    model = transformers.AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    model.save_pretrained(folder)
    return model


@pytest.mark.by_default("gemma3")
@pytest.mark.parametrize(("kind", "inner"), [("gemma3", "gemma3_text"), ("llava", "llama"), ("mistral3", "mistral")],
                         ids=["gemma3", "llava", "mistral3"])  # fmt: skip
def test_the_language_model_of_a_model_of_images_is_built(tmp_path, kind, inner):
    full = write(kind, tmp_path / "full")
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
    block = block.replace("gemma-3-4b-it", str(tmp_path / "full")).replace(
        "gemma-3-4b-text", str(tmp_path / "text")
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
