"""A folder whose config computes something different from the program's model is refused.

That applies even if all shapes are the same.
"""

import json

import jax
import pytest
from hf_models import SIZES, adamw

import zerojax as zj
from zerojax.hf import model_of

OTHER = {
    "heads": ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}, "heads"),
    "epsilon": ({"rms_norm_eps": 1e-3}, "eps"),
    "rotations": ({"rope_theta": 5e5}, "rope"),
}


def folder_of(path, **changes):
    path.mkdir()
    config = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6, **SIZES, **changes}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_second_import_of_another_config_is_refused(tmp_path):
    like = folder_of(tmp_path / "like")
    program = zj.build_train_step(
        model_of(like), adamw(), zj.ZeroConfig(), zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    )
    for name, (changes, key) in OTHER.items():
        other = folder_of(tmp_path / name, **changes)
        message = rf"{name}/config\.json has decoder=.*{key}.*this program's model has"
        with pytest.raises(zj.CheckpointError, match=message):
            zj.import_hf(program, other, key=jax.random.key(0))
    # Its own folder is read: here it has no weights.
    with pytest.raises(zj.CheckpointError, match="like"):
        zj.import_hf(program, like, key=jax.random.key(0))


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder_of(tmp_path / "like")
    program = zj.build_train_step(
        model_of("~/like"),
        adamw(),
        zj.ZeroConfig(),
        zj.make_mesh(fsdp=1, devices=jax.devices()[:1]),
    )
    with pytest.raises(zj.CheckpointError, match=rf"{tmp_path}/like"):
        zj.import_hf(program, "~/like", key=jax.random.key(0))
