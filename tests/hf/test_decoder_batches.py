"""A batch with values out of range moves nothing and is named.

Wrong keys, dtypes or shapes are refused.
"""

import collections
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzed_batches import fuzzed, outcome_of
from processes import launch
from small_decoder import VOCAB, batch_of, bytes_of, program_of, write

import zerojax as zj
from zerojax.hf.batches import check_batch


def changed(**others):
    """Return a batch with other arrays; numbers replace the first element of a copy."""
    batch = batch_of()
    for name, value in others.items():
        if isinstance(value, int):
            array = batch.get(name, np.zeros_like(batch["tokens"])).copy()
            array[0, 0], value = value, array
        batch[name] = value
    return batch


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    program = program_of(write(tmp_path_factory.mktemp("model")), precision="fp32")
    return program, program.init(jax.random.key(0))


class Foreign:
    """An array of another library, like torch's tensors, with its own dtype class."""

    dtype, shape = "torch.int64", (4, 6)

    def numpy(self):
        return np.zeros(self.shape, np.int64)


@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_arrays_of_other_libraries_are_refused_with_the_way_round(name):
    with pytest.raises(
        ValueError,
        match=rf"batch\['{name}'\] is a Foreign of .*: use batch\['{name}'\]\.numpy\(\)",
    ):
        check_batch(changed(**{name: Foreign()}))


def test_tensors_of_torch_are_refused_with_the_way_round():
    torch = pytest.importorskip("torch")
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(
            ValueError,
            match=r"batch\['tokens'\] is a Tensor of .*torch\.int.*batch\['tokens'\]\.numpy\(\)",
        ):
            check_batch(changed(tokens=torch.zeros((4, 6), dtype=dtype)))


OUT_OF_RANGE = {
    "token-negative": ({"tokens": -1}, "fault/tokens_outside_0..95"),
    "token-above": ({"tokens": VOCAB}, "fault/tokens_outside_0..95"),
    "token-uint32": (
        {"tokens": np.full((4, 6), 2**32 - 1, np.uint32)},
        "fault/tokens_outside_0..95",
    ),
    "target-above": ({"targets": VOCAB}, "fault/targets_above_95"),
    "position-negative": ({"positions": -1}, "fault/positions_outside_0..16777216"),
    "no-target-counts": (
        {"tokens": -1, "targets": np.full((4, 6), -1, np.int32)},
        "fault/tokens_outside_0..95",
    ),
}
HOW = {
    "resident": {"stage": 3, "precision": "bf16"},
    "stage-0": {"stage": 0},
    "microbatches": {"stage": 2, "num_microbatches": 2},
    "fp16": {"stage": 3, "precision": "fp16"},
    "streamed": {"params": "pinned_host", "opt_state": "pinned_host", "precision": "bf16"},
    "in-backward": {
        "params": "pinned_host",
        "opt_state": "pinned_host",
        "update": "in_backward",
        "num_microbatches": 2,
    },
    "on-host": {
        "params": "pinned_host",
        "opt_state": "pinned_host",
        "grads": "pinned_host",
        "update_on": "host",
    },
    "nvme": {"params": "nvme", "opt_state": "nvme", "grads": "nvme"},
}


# by default tests/program/test_skipped_steps.py covers this with smaller models
@pytest.mark.exhaustive
@pytest.mark.parametrize("how", HOW)
def test_a_batch_out_of_range_moves_nothing_and_is_named(how, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "zerojax")
    swap = {"swap_dir": str(tmp_path)} if how == "nvme" else {}
    with program_of(write(tmp_path / "model"), 2, **HOW[how], **swap) as program:
        state, _ = program.step(program.init(jax.random.key(0)), batch_of())
        before, skipped = bytes_of(program, state), int(state.skipped)
        for n, name in enumerate(
            OUT_OF_RANGE if how == "resident" else ("token-negative", "target-above")
        ):
            others, fault = OUT_OF_RANGE[name]
            state, metrics = program.step(state, changed(**others))
            assert np.isnan(metrics["loss"])
            assert float(metrics["skipped_steps"]) == skipped + n + 1
            assert float(metrics[fault]) > 0
            assert bytes_of(program, state) == before, name
        state, metrics = program.step(state, batch_of())
        assert np.isfinite(metrics["loss"])
        assert not any(float(value) for name, value in metrics.items() if name.startswith("fault/"))
        assert bytes_of(program, state) != before
    said = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(said) == 1  # once, however many consecutive steps have it
    assert "fault/" in said[0]


@pytest.mark.by_default("token-negative", "token-uint32", "target-above", "no-target-counts")
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_evaluation_of_a_batch_out_of_range_is_nan_and_named(resident, name, caplog):
    caplog.set_level(logging.WARNING, "zerojax")
    (program, state), (others, fault) = resident, OUT_OF_RANGE[name]
    assert np.isnan(program.eval(state, changed(**others)))
    assert np.isfinite(program.eval(state, batch_of()))
    program.warnings.look(waits=True)
    (said,) = [record.getMessage() for record in caplog.records]
    assert fault in said


def test_logits_of_tokens_out_of_range_are_nan(resident):
    program, state = resident
    for wrong in (-1, VOCAB):
        logits = np.asarray(program.apply(state, {"tokens": changed(tokens=wrong)["tokens"]}))
        assert np.isnan(logits[0, 0]).all()
        assert np.isfinite(logits[1:]).all()
    for last in (-1, 6):
        at = np.array([last, 5, 5, 5], np.int32)
        logits = np.asarray(program.apply(state, {"tokens": batch_of()["tokens"], "last": at}))
        assert np.isnan(logits[0]).all()
        assert np.isfinite(logits[1:]).all()


def test_integers_of_every_width_give_the_same_loss(resident):
    program, state = resident
    batch = batch_of()
    expected = float(program.eval(state, batch))
    for dtype in ("uint8", ">i4", "int64", "uint64"):
        signed = np.dtype(dtype.replace("uint", "int"))
        other = {
            "tokens": batch["tokens"].astype(dtype),
            "targets": batch["targets"].astype(signed),
        }
        assert float(program.eval(state, other)) == expected, dtype
    ignored = {**batch, "targets": np.where(batch["targets"] < 0, -100, batch["targets"])}
    assert float(program.eval(state, ignored)) == expected


REFUSED = {
    "no-dict": ([1, 2], ["dict", "list"]),
    "none": (None, ["dict", "NoneType"]),
    "empty": ({}, ["no keys", "'tokens'"]),
    "no-tokens": ({"targets": batch_of()["targets"]}, ["'targets'", "'tokens' are needed"]),
    "no-targets": ({"tokens": batch_of()["tokens"]}, ["'tokens'", "needs 'targets'"]),
    "list": (changed(tokens=[[1, 2], [3, 4]]), ["batch['tokens'] is of type list", "np.asarray"]),
    "tokens-none": (changed(tokens=None), ["batch['tokens'] is None"]),
    "text": (changed(tokens="abc"), ["batch['tokens'] is of type str"]),
    "attention-mask": (changed(attention_mask=np.ones((4, 6), np.int32)), ["'attention_mask'", "does not read"]),
    "keys-of-two-kinds": ({**batch_of(), 3: np.zeros(4)}, ["3, which"]),
    "uint32-targets": (changed(targets=batch_of()["targets"].astype(np.uint32)), ["batch['targets'] has dtype uint32", "-1"]),
    "float": (changed(tokens=np.zeros((4, 6), np.float32)), ["batch['tokens']", "float32", "integers"]),
    "bool": (changed(segment_ids=np.zeros((4, 6), bool)), ["batch['segment_ids']", "bool"]),
    "objects": (changed(tokens=np.full((4, 6), None)), ["batch['tokens']", "object"]),
    "positions-float": (changed(positions=np.zeros((4, 6))), ["batch['positions']", "float64"]),
    "one-dim": (changed(tokens=np.zeros(4, np.int32)), ["batch['tokens'] has shape [4]", "[B, T]"]),
    "no-length": ({n: np.zeros((4, 0), np.int32) for n in ("tokens", "targets")}, ["batch['tokens'] is [4, 0]", "one token"]),
    "no-rows": ({n: np.zeros((0, 6), np.int32) for n in ("tokens", "targets")}, ["batch of 0", "['tokens']"]),
    "other-length": (changed(targets=np.zeros((4, 5), np.int32)), ["batch['targets'] is [4, 5]", "[4, 6]"]),
    "other-rows": (changed(targets=np.zeros((2, 6), np.int32)), ["differ", "['targets']", "2"]),
    "too-large": (changed(tokens=np.full((4, 6), 2**32 + 1)), ["['tokens']", "int64", "4294967297", "int32"]),
    "masked": (
        {n: np.ma.masked_less(a, 3) for n, a in batch_of().items()}, ["masked array", ".filled(-1)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_batch_that_cannot_be_read_is_refused_by_name(resident, name):
    program, state = resident
    batch, words = REFUSED[name]
    for call in (program.eval, program.step):
        with pytest.raises(ValueError, match=r"batch") as error:
            call(state, batch)
        assert not [word for word in words if word not in str(error.value)], str(error.value)


def test_shapes_alone_are_refused_before_anything_is_compiled(resident):
    program, _ = resident
    wrong = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.uint32), batch_of())
    for call in (program.lower, program.memory, program.check, program.kept):
        with pytest.raises(ValueError, match=r"batch\['targets'\] has dtype uint32"):
            call(wrong)


# Most are refused, so nothing is compiled for them.
@pytest.mark.parametrize(
    "seeds",
    [(0, 1, 2, *range(6, 15)), pytest.param(range(500), marks=pytest.mark.exhaustive)],
    ids=len,
)
def test_a_batch_of_any_kind_is_refused_by_name_or_right(resident, seeds):
    """Each takes less than 10 seconds of processor time, since other processes may use it too."""
    (program, state), outcomes = resident, collections.Counter[str]()
    for seed in seeds:
        start = time.process_time()
        outcomes[outcome_of(program, state, fuzzed(seed))] += 1
        assert time.process_time() - start < 10, seed
    print(dict(outcomes))
    assert set(outcomes) == {"refused", "right", "out of range"}


def test_perplexity_names_a_batch_out_of_range(resident, caplog):
    caplog.set_level(logging.WARNING, "zerojax")
    program, state = resident
    result = zj.perplexity(program, state, [batch_of(), changed(tokens=-1)])
    assert np.isnan(result.loss)
    assert "fault/tokens_outside_0..95" in caplog.text


IN_PROCESSES = """
import logging
import numpy as np
import small_decoder
import zerojax as zj
said = []
class Kept(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("zerojax").addHandler(Kept(logging.WARNING))
program = small_decoder.program_of(small_decoder.write(out / str(me)), 2)
state = program.init(jax.random.key(0))
mine = slice(2 * me, 2 * me + 2)
batch = {name: array[mine].copy() for name, array in small_decoder.batch_of().items()}
wrong = {name: array.copy() for name, array in batch.items()}
if me == 1:
    wrong["tokens"][0, 0] = -1
found = {"losses": [], "skipped": []}
for given in (batch, wrong, batch):
    state, metrics = program.step(state, given)
    given["targets"][:] = -1  # the step that runs has its own
    found["losses"].append(repr(float(metrics["loss"])))
    found["skipped"].append(int(metrics["skipped_steps"]))
    given["targets"][:] = small_decoder.batch_of()["targets"][mine]
program.warnings.look(waits=True)
found["said"] = [text for text in said if "skipped" in text]
"""


@pytest.mark.exhaustive
def test_a_batch_that_is_wrong_in_one_process_is_skipped_by_all(tmp_path):
    first, second = launch(IN_PROCESSES, tmp_path / "two", 2, 2)
    assert first["losses"] == second["losses"]
    assert first["losses"][1] == "nan"
    assert first["skipped"] == second["skipped"] == [0, 1, 1]
    assert "fault/tokens_outside_0..95" in first["said"][0]
    assert not second["said"]  # the first one represents them all
