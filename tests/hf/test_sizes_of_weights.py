"""A folder whose `config.json` contradicts its weights' sizes is refused by key.

Nothing is written before that.
"""

import json

import jax
import pytest
from hf_models import CASES, SIZES, need, program_of, write
from safetensors.numpy import load_file, save_file

import zerojax as zj
from zerojax.hf import Lora, config_of, model_of
from zerojax.hf.importing import STACK, list_params

need("torch", "transformers")

SIZES_OF = {**SIZES, "num_hidden_layers": 2}
OTHERS = {
    "vocab_size": (300, r"vocab_size=300, but model\.embed_tokens\.weight \[96, 48\] has 96"),
    "hidden_size": (64, r"hidden_size=64, but model\.[a-z_.0-9]* .*has 48"),
    "intermediate_size": (
        80,
        r"intermediate_size=80, but model\.layers\.0\.mlp\.[a-z]*_proj\.weight .* has 64",
    ),
    "attention_bias": (True, r"no model\.layers\.0\.self_attn\.q_proj\.bias"),
    "mlp_bias": (True, r"no model\.layers\.0\.mlp\.gate_proj\.bias"),
}
"""A wrong value and its error message, by key.

Values that also change the computation are compared earlier.
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with a model, and checkpoints of it: `whole`, and `adapters`."""
    folder = tmp_path_factory.mktemp("sizes")
    write("llama", folder / "model", shard="1GB", num_hidden_layers=2, head_dim=12)
    for name, lora in (("whole", None), ("adapters", Lora(rank=2, alpha=4))):
        program = program_of(model_of(folder / "model", lora=lora), "device", folder, 1)
        state = zj.import_hf(program, folder / "model", key=jax.random.key(0))
        with zj.Checkpointer(folder / name) as ckpt:
            ckpt.save(program, state)
    return folder


def like_with(saved, tmp_path, **keys):
    """Return the model's folder with other values in config.json."""
    like = tmp_path / "like"
    like.mkdir()
    for file in (saved / "model").iterdir():
        (like / file.name).write_bytes(file.read_bytes())
    config = json.loads((like / "config.json").read_text())
    (like / "config.json").write_text(json.dumps(config | keys))
    return like


@pytest.mark.parametrize("key", OTHERS)
def test_an_export_names_the_key_of_another_size(saved, tmp_path, key):
    value, message = OTHERS[key]
    like = like_with(saved, tmp_path, **{key: value})
    for export, checkpoint in ((zj.export_hf, "whole"), (zj.export_peft, "adapters")):
        with pytest.raises(
            zj.CheckpointError,
            match=rf"config\.json does not describe the weights next to it: .*{message}",
        ):
            export(saved / checkpoint, tmp_path / "out", like=like)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size"])
def test_an_import_names_the_key_of_another_size(saved, tmp_path, key):
    value, message = OTHERS[key]
    like = like_with(saved, tmp_path, **{key: value})
    program = program_of(model_of(saved / "model"), "device", tmp_path, 1)
    with pytest.raises(zj.CheckpointError, match=message):
        zj.import_hf(program, like, key=jax.random.key(0))


def test_layers_and_heads_are_named(saved, tmp_path):
    like = like_with(saved, tmp_path, num_hidden_layers=3)
    program = program_of(model_of(like), "device", tmp_path, 1)
    with pytest.raises(
        zj.CheckpointError, match="num_hidden_layers=3, but the tensors have 2 layers"
    ):
        zj.import_hf(program, like, key=jax.random.key(0))
    (like / "config.json").write_text(
        json.dumps(
            json.loads((like / "config.json").read_text())
            | {"num_hidden_layers": 2, "num_attention_heads": 2}
        )
    )
    program = program_of(model_of(like), "device", tmp_path, 1)
    with pytest.raises(
        zj.CheckpointError,
        match=r"num_attention_heads=2 times head_dim=12, but .*q_proj\.weight .* has 48",
    ):
        zj.import_hf(program, like, key=jax.random.key(0))


def test_a_tensor_of_the_last_layer_that_is_missing_is_named(saved, tmp_path):
    like = like_with(saved, tmp_path)
    (file,) = like.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    program = program_of(model_of(like), "device", tmp_path, 1)
    with pytest.raises(zj.CheckpointError, match=r"no model\.layers\.1\.mlp\.up_proj\.weight"):
        zj.import_hf(program, like, key=jax.random.key(0))
    with pytest.raises(zj.CheckpointError, match=r"no model\.layers\.1\.mlp\.up_proj\.weight"):
        zj.export_hf(saved / "whole", tmp_path / "out", like=like)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "case", ["llama-biases", "llama-tied", "qwen2", "qwen3-biases", "gemma2-untied", "gemma3"]
)
def test_the_table_of_sizes_is_that_of_the_model(tmp_path, case):
    import transformers

    name, options = CASES[case]
    getattr(transformers, name)(**{**SIZES, **options, "architectures": ["x"]}).save_pretrained(
        tmp_path
    )
    config, model = config_of(tmp_path), model_of(tmp_path)
    found = {}
    for part, stem in (("embed", "embed."), ("block", STACK), ("head", "head.")):
        tree = jax.eval_shape(getattr(model, f"init_{part}"), jax.random.key(0))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            found[stem + jax.tree_util.keystr(path, simple=True, separator=".")] = leaf.shape
    assert {
        name: tuple(size.number for size in dims) for name, dims in list_params(config).items()
    } == found
