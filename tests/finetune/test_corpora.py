"""Several files with weights, and data sets that are read as they are needed."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import byte_tokenizer, write
from packed_examples import examples_of

from zerojax import data
from zerojax.data.corpora.mixing import PERIOD, Pattern

TOKENIZER = byte_tokenizer()


def texts(path, count, letter="a"):
    """Write texts of different lengths, each with its number."""
    return write(path, [{"text": f"{letter}{i:04d}" + "." * (i % 7)} for i in range(count)])


def records_in(batch):
    """Return the numbers of the records in a batch's rows, with their letter."""
    found = []
    for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
        for segment in range(1, segments.max() + 1):
            found.append(TOKENIZER.decode(tokens[segments == segment])[:5])
    return found


def test_a_pattern_has_the_shares_of_its_weights_everywhere():
    pattern = Pattern([7, 2, 1])
    files = [pattern[k][0] for k in range(2 * PERIOD)]
    for begin in range(0, 2 * PERIOD - 100, 37):
        counts = np.bincount(files[begin : begin + 100], minlength=3)
        np.testing.assert_allclose(counts, [70, 20, 10], atol=2)
    for file in range(3):  # each file's rows come one after the other
        assert [pattern[k][1] for k in range(2 * PERIOD) if files[k] == file] == [
            *range(files.count(file))
        ]
    assert Pattern([1, 1, 1])[PERIOD - 1][1] == 333


@pytest.mark.parametrize("weights", [[], [0.0, 1], [-1, 2], [float("nan"), 1], [1, 1e-5]])
def test_weights_without_a_share_are_refused(weights):
    with pytest.raises(ValueError, match="weights="):
        Pattern(weights)


def test_weighted_files_are_drawn_in_their_shares_and_continue_anywhere():
    large = data.pack(examples_of([4] * 300), 3)
    small = data.pack(examples_of([4] * 10, tokens=np.arange(40, dtype=np.int32) + 10_000), 3)
    rows = data.mix([large, small], [3, 1])
    assert len(rows) == 310
    assert rows.counts.examples == 310
    read = data.batches(rows, 8, seed=1, part=0, num_parts=1)
    taken = [next(read) for _ in range(20)]
    assert all((batch["tokens"][:, 0] >= 10_000).sum() == 2 for batch in taken)
    from_small = np.concatenate([b["tokens"][b["tokens"][:, 0] >= 10_000, 0] for b in taken])
    for epoch in from_small.reshape(4, 10):  # each of its rows once before it begins again
        assert len({*epoch.tolist()}) == 10
    again = data.batches(rows, 8, seed=1, part=0, num_parts=1)
    again.go_to(11)
    np.testing.assert_array_equal(next(again)["tokens"], taken[11]["tokens"])
    parts = [next(data.batches(rows, 8, seed=1, part=i, num_parts=2))["tokens"] for i in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(parts), taken[0]["tokens"])
    other = data.batches(data.mix([large, small], [2, 1]), 8, seed=1, part=0, num_parts=1)
    with pytest.raises(ValueError, match="the position was saved for the rows"):
        other.set_state(read.get_state())


def test_files_without_weights_come_once_an_epoch():
    files = [data.pack(examples_of([4] * n), 3) for n in (5, 7)]
    rows = data.mix(files)
    read = data.batches(rows, 12, seed=0, part=0, num_parts=1)
    every = np.sort([rows[i]["tokens"][0] for i in range(12)])
    np.testing.assert_array_equal(np.sort(next(read)["tokens"][:, 0]), every)
    once = np.concatenate([b["tokens"] for b in data.batches_once(rows, 4, part=0, num_parts=1)])
    np.testing.assert_array_equal(once[:, 0], [rows[i]["tokens"][0] for i in range(12)])
    assert data.mix(files[:1]) is files[0]
    with pytest.raises(ValueError, match="one each is needed"):
        data.mix(files, [1.0])


def streamed(path, batch_size=4, part=0, num_parts=1, **options):
    options = {"seq": 24, "window": 16} | options
    rows = data.stream(path, TOKENIZER, **options)
    return data.batches(rows, batch_size, seed=3, part=part, num_parts=num_parts)


def test_a_stream_has_every_record_once_in_an_epoch_shuffled_within_windows(tmp_path):
    read = streamed(texts(tmp_path / "a.jsonl", 100), 1)
    order = []
    while len(order) < 200:
        order += records_in(next(read))
    names = [f"a{i:04d}" for i in range(100)]
    for epoch in (order[:100], order[100:]):
        assert sorted(epoch) == names
        for begin in range(0, 100, 16):  # windows follow one another
            assert sorted(epoch[begin : begin + 16]) == names[begin : begin + 16]
    assert order[:100] != order[100:]
    assert order[:16] != names[:16]


def test_a_stream_resumes_at_the_same_sample_in_every_batch(tmp_path):
    path = texts(tmp_path / "a.jsonl", 50)
    read = streamed(path)
    states, taken = [], []
    for _ in range(20):  # more than an epoch
        states.append(json.loads(json.dumps(read.get_state())))
        taken.append(next(read)["tokens"])
    again = streamed(path)
    for step in (0, 1, 7, 13, 19, 4):
        again.set_state(states[step])
        for later in range(step, min(step + 3, 20)):
            np.testing.assert_array_equal(next(again)["tokens"], taken[later])
    again.go_to(15)
    np.testing.assert_array_equal(next(again)["tokens"], taken[15])
    parts = [next(streamed(path, part=i, num_parts=2))["tokens"] for i in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(parts), taken[0])


def read_until_it_fails(read, states):
    while True:
        states.append(read.get_state())
        next(read)


def test_a_stream_that_changed_before_its_position_is_refused_and_repaired_after_it(tmp_path):
    path = texts(tmp_path / "a.jsonl", 50)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:30], "{\n", *lines[31:]]))
    read, states = streamed(path), []
    with pytest.raises(ValueError, match=r"a\.jsonl:31: not a line of JSON"):
        read_until_it_fails(read, states)
    path.write_text("".join(lines))
    again, state = streamed(path), states[-1]
    again.set_state(state)
    next(again)
    path.write_text("".join(lines).replace("a0003", "b0003"))
    with pytest.raises(ValueError, match="the position was saved for the rows"):
        streamed(path).set_state(state)
    state = state | {
        "stream": {
            **state["stream"],
            "files": [{**f, "checksum": ""} for f in state["stream"]["files"]],
        }
    }
    with pytest.raises(ValueError, match="have changed since the position was saved"):
        again.set_state(state)


def test_streams_are_drawn_by_weight_and_resume(tmp_path):
    paths = [texts(tmp_path / f"{c}.jsonl", n, c) for c, n in (("a", 60), ("b", 20))]
    read = streamed(paths, 5, weights=[4, 1], seq=12)
    state: Any = None
    batch: Any = None
    for _ in range(9):
        state = read.get_state()
        batch = next(read)
        of_row = [
            records_in({name: a[k : k + 1] for name, a in batch.items()})[0][0] for k in range(5)
        ]
        assert sorted(of_row) == ["a"] * 4 + ["b"]
    again = streamed(paths, 5, weights=[4, 1], seq=12)
    again.set_state(state)
    np.testing.assert_array_equal(next(again)["tokens"], batch["tokens"])


def test_a_folder_is_streamed_like_its_lines(tmp_path):
    import datasets

    path = texts(tmp_path / "a.jsonl", 40)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "folder")
    read, folder = streamed(path), streamed(tmp_path / "folder")
    state: Any = None
    expected: Any = None
    for _ in range(12):
        state = folder.get_state()
        expected = next(read)["tokens"]
        np.testing.assert_array_equal(next(folder)["tokens"], expected)
    folder.set_state(state)
    np.testing.assert_array_equal(next(folder)["tokens"], expected)


def test_long_records_of_a_stream_are_dropped_or_refused(tmp_path):
    path = write(
        tmp_path / "a.jsonl", [{"text": "." * (40 if 4 <= i < 8 else 10)} for i in range(12)]
    )
    read = streamed(path, window=4, too_long="drop")
    assert all((next(read)["targets"] >= 0).any() for _ in range(6))
    read = streamed(path, window=4)
    with pytest.raises(ValueError, match=r"a\.jsonl:5: .* use a longer seq"):
        list(itertools.islice(read, 6))
    with pytest.raises(ValueError, match="gives a row of seq=8"):
        streamed(path, window=4, seq=8, too_long="drop")
    with pytest.raises(ValueError, match="give the share of each by weights="):
        streamed([path, path])
