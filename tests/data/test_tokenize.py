"""Records as tokens: which tokens count, by marks and by prefixes.

Refused records are named with their place.
"""

import contextlib
import tracemalloc

import datasets
import numpy as np
import pytest
from chat_tokenizers import MARKED, PLAIN, THINKING, byte_tokenizer, conversation, write
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from zerojax import data
from zerojax.progress import shown_by

TWO = conversation("hi é", "yes", "why?", "no!")


def parts(examples, tokenizer):
    """Return (full text, counted text) of each example."""
    spans = [slice(*examples.starts[i : i + 2]) for i in range(len(examples))]
    return [
        (
            tokenizer.decode(examples.tokens[s]),
            tokenizer.decode(examples.tokens[s][examples.counted[s]]),
        )
        for s in spans
    ]


def read(path, records, template=PLAIN, **options):
    tokenizer = byte_tokenizer(template)
    return parts(data.tokenize(write(path / "a.jsonl", records), tokenizer, **options), tokenizer)


def test_answers_count_by_marks_and_by_prefixes(tmp_path):
    whole = "<|im_start|>user\nhi é<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    whole += "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nno!<|im_end|>\n"
    assert read(tmp_path, [TWO]) == [
        (whole, "yes<|im_end|>\nno!<|im_end|>\n")
    ]  # including what the template writes after an answer
    assert read(tmp_path, [TWO], MARKED) == [(whole, "yes<|im_end|>no!<|im_end|>")]
    assert (
        read(tmp_path, [conversation("hi", "")])[0][1] == "<|im_end|>\n"
    )  # an empty answer is an answer
    greeting = {"messages": [{"role": "assistant", "content": "Hello"}, *TWO["messages"]]}
    assert read(tmp_path, [greeting], MARKED)[0][1] == "Hello<|im_end|>yes<|im_end|>no!<|im_end|>"
    with pytest.raises(ValueError, match=r"a.jsonl:2: the conversation begins with an answer"):
        read(tmp_path, [TWO, greeting])


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_each_answer_is_an_example_in_its_own_context(tmp_path, template):
    end = "<|im_end|>" if template == MARKED else "<|im_end|>\n"
    (first, counted), (second, last) = read(tmp_path, [TWO], template, each_answer=True)
    assert second.startswith(first)
    assert (counted, last) == ("yes" + end, "no!" + end)


def test_a_template_that_forgets_thinking_is_refused_or_cut_into_answers(tmp_path):
    thoughts = conversation("hi", "yes", "why?", "no!")
    for message, thought in zip(thoughts["messages"][1::2], ("one", "two"), strict=True):
        message["reasoning_content"] = thought
    one_turn = conversation("a", "b")
    with pytest.raises(
        ValueError,
        match=r"a.jsonl:3: the chat template writes messages 0 to 1 differently when more follows",
    ):
        read(tmp_path, [one_turn, one_turn, thoughts], THINKING)
    found = read(tmp_path, [one_turn, thoughts], THINKING, each_answer=True)
    assert [counted for _, counted in found] == [
        "<think></think>b<|im_end|>\n", "<think>one</think>yes<|im_end|>\n", "<think>two</think>no!<|im_end|>\n",
    ]  # fmt: skip
    assert found[2][0].startswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    no_thinking = read(tmp_path, [one_turn], THINKING, template_options={"enable_thinking": False})
    assert (
        no_thinking[0][1] == "b<|im_end|>\n"
    )  # a model with thinking switched off is given empty thinking
    with pytest.raises(ValueError, match="and the prompt for an answer differently"):
        read(
            tmp_path,
            [thoughts],
            THINKING,
            each_answer=True,
            template_options={"enable_thinking": False},
        )


def test_completions_and_texts_count(tmp_path):
    asked = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "why"},
    ]
    records = [
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": asked, "completion": [{"role": "assistant", "content": "so"}]},
        {"text": "free"},
    ]
    found = read(tmp_path, records)
    assert found[0] == ("2+2=4<|im_end|>", "4<|im_end|>")
    assert found[1][1] == "so<|im_end|>\n"
    assert found[2] == ("free<|im_end|>", "free<|im_end|>")
    assert read(tmp_path, records[2:], add_eos=False) == [("free", "free")]
    assert read(tmp_path, [{"text": "free<|im_end|>"}])[0][0] == "free<|im_end|>"  # not twice


def test_a_token_counts_where_a_part_of_it_does(tmp_path):
    """A tokenizer of words, in which `:yes` spans the border between prompt and completion.

    The token counts, as in transformers' masks.
    """
    words = Tokenizer(
        models.WordLevel({"[UNK]": 0, "q": 1, ":yes": 2, "sir": 3, "<s>": 4}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<s>", unk_token="[UNK]")
    examples = data.tokenize(
        write(tmp_path / "a.jsonl", [{"prompt": "q :", "completion": "yes sir"}]), tokenizer
    )
    assert examples.tokens.tolist() == [1, 2, 3, 4]
    assert examples.counted.tolist() == [False, True, True, True]


def test_a_folder_of_datasets_is_read(tmp_path):
    rows = datasets.Dataset.from_list([TWO, conversation("a", "b")])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "two")
    tokenizer = byte_tokenizer()
    one = data.tokenize(tmp_path / "one", tokenizer)
    assert parts(one, tokenizer) == read(tmp_path, [TWO, conversation("a", "b")])
    assert len(data.tokenize(tmp_path / "two", tokenizer, split="test")) == 1
    with pytest.raises(ValueError, match=r"holds the splits \['test', 'train'\]"):
        data.tokenize(tmp_path / "two", tokenizer)
    datasets.Dataset.from_list(
        [TWO, {"messages": [{"role": "user", "content": "a"}]}]
    ).save_to_disk(tmp_path / "bad")
    with pytest.raises(
        ValueError,
        match="bad: example 1: no token counts in the loss: no message has the role 'assistant'",
    ):
        data.tokenize(tmp_path / "bad", tokenizer)


USER = '{"role": "user", "content": "a"}'
WRONG = {
    "json": ('{"text": "a"', "not a line of JSON"),
    "utf8": (b'{"text": "\xff"}', "not a line of JSON"),
    "list": ("[1]", "a JSON object is needed, got list"),
    "keys": ('{"instruction": "a"}', r"the keys are \['instruction'\]: 'messages' or 'prompt' and 'completion' or 'text'"),
    "two": ('{"text": "a", "prompt": "b", "completion": "c"}', "fit prompt and text: choose one by form="),
    "type": ('{"text": 3}', "'text' must be text, got int"),
    "mixed": ('{"prompt": [], "completion": "a"}', "'prompt' must be text, or both lists of messages, got list"),
    "messages": ('{"messages": ["a"]}', "messages must be a list of objects"),
    "role": ('{"messages": [{"content": "a"}]}', r"message 0 has the keys \['content'\]"),
    "nobody": ('{"messages": [{"role": "user", "content": "a"}]}', "no message has the role 'assistant'"),
    "asked": ('{"prompt": [USER], "completion": [USER]}'.replace("USER", USER), "no message from message 1 on has the role"),
    "empty": ('{"text": ""}', "no token counts in the loss: of 1 tokens none after the first"),
    "template": ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}', "a.jsonl:3"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_with_file_and_line(tmp_path, name):
    line, message = WRONG[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + (line.encode() if isinstance(line, str) else line))
    with pytest.raises(ValueError, match=r"a\.jsonl:3: ") as error:
        data.tokenize(path, byte_tokenizer())
    assert error.match(message)


def test_marks_without_an_answer_are_an_error(tmp_path):
    """A template whose marks do not enclose this answer: transformers returns a mask of zeros."""
    template = MARKED.replace('m.role == "assistant"', 'm.role == "model"')
    with pytest.raises(ValueError, match=r"a\.jsonl:1: no token counts in the loss"):
        read(tmp_path, [TWO], template)


def test_what_cannot_be_tokenized_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [TWO])
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        data.tokenize(path, byte_tokenizer(None))
    with pytest.raises(ValueError, match="no such file or folder"):
        data.tokenize(tmp_path / "b.jsonl", byte_tokenizer())
    with pytest.raises(ValueError, match="is unknown: choose from messages, prompt, text"):
        data.tokenize(path, byte_tokenizer(), form="chat")
    with pytest.raises(ValueError, match="does not map tokens to characters"):
        data.tokenize(path, object())
    with pytest.raises(ValueError, match="no eos_token"):
        data.tokenize(write(tmp_path / "c.jsonl", [{"text": "a"}]), byte_tokenizer(eos=None))
    with pytest.raises(ValueError, match="it holds no examples"):
        data.tokenize(write(tmp_path / "d.jsonl", []), byte_tokenizer())


def test_progress_is_told_by_record(tmp_path):
    seen = []

    @contextlib.contextmanager
    def show(what, total):
        seen.append([what, total, 0])
        yield lambda count: seen.__setitem__(-1, [what, total, seen[-1][2] + count])

    datasets.Dataset.from_list([TWO, TWO]).save_to_disk(tmp_path / "folder")
    with shown_by(show):
        read(tmp_path, [TWO, TWO, conversation("a", "b")])
        data.tokenize(tmp_path / "folder", byte_tokenizer())
    assert seen == [["tokenize", 3, 3], ["tokenize", 2, 2]]


def test_a_file_takes_few_bytes_a_token(tmp_path):
    path, tokenizer = write(tmp_path / "a.jsonl", [{"text": "x" * 500}] * 400), byte_tokenizer()
    tracemalloc.start()
    try:
        examples = data.tokenize(path, tokenizer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (examples.tokens.dtype, examples.counted.dtype) == (np.int32, bool)
    # 5 bytes, and space to grow; a list takes 8 or more per token
    assert peak < 7 * len(examples.tokens)


def test_some_examples_are_held_out(tmp_path):
    texts = [{"text": f"text {i}"} for i in range(10)]
    examples = data.tokenize(write(tmp_path / "a.jsonl", texts), byte_tokenizer())
    train, held_out = examples.hold_out(5)
    assert held_out.numbers.tolist() == [5, 10]
    assert sorted([*train.numbers, *held_out.numbers]) == list(range(1, 11))
    assert [text for text, _ in parts(held_out, byte_tokenizer())] == [
        "text 4<|im_end|>",
        "text 9<|im_end|>",
    ]
    with pytest.raises(ValueError, match="cannot hold out one in 20 of "):
        examples.hold_out(20)
    # Empty lines are not records.
    (tmp_path / "b.jsonl").write_text(
        "\n" + (tmp_path / "a.jsonl").read_text().replace("\n", "\n\n")
    )
    sparse = data.tokenize(tmp_path / "b.jsonl", byte_tokenizer()).hold_out(5)
    for part, expected in zip(sparse, (train, held_out), strict=True):
        np.testing.assert_array_equal(part.tokens, expected.tokens)
