"""Folders written as GGUF: names and numbers as llama.cpp reads them, and what is refused.

llama.cpp itself (xllamacpp 2026.10) was compared with transformers on the cases here: the same
tokens, and the same greedy continuations.
"""

import json

import numpy as np
import pytest
from hf_models import need
from hf_models import write as write_model
from split_tokenizers import split_tokenizer

from zerojax.hf import check_gguf, config_of, export_gguf
from zerojax.weights import open_weights

need("torch", "transformers")


def write(case, folder, split="llama-bpe", has_bos=True, **sizes):
    tokenizer = split_tokenizer(split, has_bos)
    write_model(case, folder, vocab_size=len(tokenizer) + 3, **sizes)
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_a_folder_is_written_with_llama_cpps_names_and_order(tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'zerojax[gguf]'")
    tokenizer = write("llama3", tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    weights = open_weights(tmp_path / "model")

    def read(name):
        return weights.read(name, tuple((0, n) for n in weights.tensors[name].shape))

    assert len(tensors) == len(weights.tensors) + 1  # rope_freqs
    np.testing.assert_array_equal(
        tensors["blk.1.ffn_down.weight"], read("model.layers.1.mlp.down_proj.weight")
    )
    q = read("model.layers.0.self_attn.q_proj.weight")  # 4 heads of 12
    rows = [24 + i // 2 + i % 2 * 6 for i in range(12)]
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight"][24:36], q[rows])
    frequencies = tensors["rope_freqs.weight"] * config_of(tmp_path / "model").ropes[0].frequencies
    np.testing.assert_allclose(frequencies, 5e5 ** (-np.arange(6) / 6), rtol=1e-6)
    assert fields["tokenizer.ggml.pre"] == "llama-bpe"
    assert fields["tokenizer.ggml.add_bos_token"] is True
    assert fields["tokenizer.ggml.tokens"][: len(tokenizer)] == tokenizer.convert_ids_to_tokens(
        range(len(tokenizer))
    )
    assert fields["tokenizer.ggml.tokens"][-1] == f"[PAD{len(tokenizer) + 2}]"
    assert fields["tokenizer.ggml.bos_token_id"] == tokenizer.bos_token_id
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    assert fields["llama.rope.freq_base"] == 5e5
    with pytest.raises(ValueError, match="exists"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("gemma2", "model_type 'gemma2' is not written to GGUF, only llama, mistral, qwen2"),
        ("mistral", "a window of attention, which llama.cpp's architecture 'llama' leaves out"),
        ("llama-yarn", "a factor of rotated queries and keys"),
        ("llama-gelu", "the activation gelu"),
        ("qwen3-biases", "biases of the MLP or after attention"),
    ],
)
def test_models_that_llama_cpp_would_compute_differently_are_refused(
    tmp_path, monkeypatch, case, words
):
    monkeypatch.setattr("zerojax.hf.gguf_files.export._gguf", lambda: None)
    write(case, tmp_path / "model")
    with pytest.raises(ValueError, match=f"{words}.*convert it with llama.cpp's own script"):
        check_gguf(tmp_path / "model")


def test_tokenizers_that_llama_cpp_would_read_differently_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("zerojax.hf.gguf_files.export._gguf", lambda: None)
    write("llama", tmp_path / "model")
    check_gguf(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["ignore_merges"] = False
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"tokenizer\.json: this tokenizer \(BPE, .* is none of"):
        check_gguf(tmp_path / "model")
    path.write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        check_gguf(tmp_path / "model")
