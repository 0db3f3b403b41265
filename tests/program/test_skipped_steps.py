"""A run in which every step is skipped says so once, with advice; nothing waits for a metric."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax.program.skipped import IN_A_ROW, IN_A_ROW_SCALED, SkippedSteps, SkipWarnings


def metrics_of(finite, **others):
    return {
        "grads_finite": np.float32(finite),
        "loss": np.float32(1 if finite else np.nan),
        **others,
    }


def said_of(steps, **config):
    """Return what is reported for a sequence of finite and non-finite steps, by step number."""
    skipped = SkippedSteps(zj.ZeroConfig(**config))
    return {
        n: said
        for n, finite in enumerate(steps, 1)
        if (said := skipped.add(metrics_of(finite))) is not None
    }


def test_steps_that_are_skipped_one_after_the_other_are_said_once():
    assert not said_of([1, 0, 0, 1] * 20)
    assert not said_of([0] * (IN_A_ROW - 1))
    said = said_of([1, *[0] * 40, 1, *[0] * 40])
    assert list(said) == [1 + IN_A_ROW, 42 + IN_A_ROW]
    assert not [
        word
        for word in ("10 steps in a row", "loss nan", "data", "learning rate", "base")
        if word not in said[11]
    ]


def test_a_loss_scale_that_is_still_falling_is_given_more_steps():
    skipped = SkippedSteps(zj.ZeroConfig(precision="fp16"))
    said = [skipped.add(metrics_of(0, loss_scale=np.float32(1))) for _ in range(IN_A_ROW_SCALED)]
    assert said[:-1] == [None] * (IN_A_ROW_SCALED - 1)
    assert "the loss scale, 1 of at least 1" in (said[-1] or "")


def test_a_fault_of_the_batch_is_said_at_its_first_step_and_with_the_advice():
    skipped = SkippedSteps(zj.ZeroConfig())
    wrong = metrics_of(0, **{"fault/tokens": np.float32(0.25), "fault/others": np.float32(0)})
    said = [skipped.add(wrong) for _ in range(IN_A_ROW)]
    assert "fault/tokens = 0.25" in (said[0] or "")
    assert "others" not in (said[0] or "")
    assert said[1:-1] == [None] * (IN_A_ROW - 2)
    assert "fault/tokens = 0.25" in (said[-1] or "")
    assert skipped.add(metrics_of(1)) is None
    assert "fault/tokens" in (skipped.add(wrong) or "")


class Unready:
    """A metric whose value is unknown until the test sets it."""

    is_known = False

    def is_ready(self):
        return self.is_known

    def copy_to_host_async(self):
        pass

    def __float__(self):
        assert self.is_known, "waited"
        return 0.0


def test_no_metric_is_waited_for(caplog):
    caplog.set_level(logging.WARNING, "zerojax")
    warnings, values = SkipWarnings(zj.ZeroConfig()), [Unready() for _ in range(2 * IN_A_ROW)]
    for n, value in enumerate(values):
        warnings.add_step({"grads_finite": value, "loss": np.float32(np.nan)})
        if n >= IN_A_ROW:  # the device is this far behind
            values[n - IN_A_ROW].is_known = True
    assert not caplog.records
    warnings.look()
    assert len(caplog.records) == 1
    for value in values:
        value.is_known = True
    warnings.look()
    assert [record.getMessage()[:15] for record in caplog.records] == ["10 steps in a r"]


class Failed(Unready):
    """A metric of a step that failed."""

    is_known = True

    def __float__(self):
        raise jax.errors.JaxRuntimeError("the step failed")


def test_a_step_that_failed_raises_nothing_in_the_next_one(caplog):
    caplog.set_level(logging.WARNING, "zerojax")
    warnings = SkipWarnings(zj.ZeroConfig())
    warnings.add_step({"grads_finite": Failed()})
    known = Unready()
    known.is_known = True
    for _ in range(IN_A_ROW):
        warnings.add_step({"grads_finite": known, "loss": np.float32(np.nan)})
    assert len(caplog.records) == 1


def program_of(loss, **config):
    model = zj.Model(init=lambda key: {"w": jnp.ones(8)}, loss=loss)
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(model, optax.adamw(0.1), zj.ZeroConfig(**config), mesh)


def test_a_run_whose_weights_are_not_finite_says_so(tmp_path, caplog, capsys):
    caplog.set_level(logging.WARNING, "zerojax")
    program = program_of(lambda params, batch, key: jnp.mean(params["w"] * batch["x"]))
    state = program.init(jax.random.key(0))
    batch = {"x": np.full((4, 8), np.inf, np.float32)}
    with zj.Run(tmp_path, program=program, report_to=()) as run:
        for step in range(1, IN_A_ROW + 3):
            state, metrics = program.step(state, batch)
            run.step(step, metrics)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "10 steps in a row were skipped" in said[0]
    assert "step 10: 10 steps in a row were skipped" in capsys.readouterr().out
    assert "10 steps in a row were skipped" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("weighted", "precision"), [(False, "bf16"), (True, "fp16")])
def test_a_fault_of_a_users_own_loss_skips_the_step(weighted, precision, caplog):
    caplog.set_level(logging.WARNING, "zerojax")

    def loss(params, batch, key):
        wrong = jnp.sum(batch["x"] < 0)
        total, count = jnp.mean(params["w"] * jnp.abs(batch["x"])), jnp.sum(batch["x"] == 1)
        return zj.Loss(total, count if weighted else None, {"fault/negative": wrong})

    program = program_of(loss, precision=precision)
    state = program.init(jax.random.key(0))
    before = np.asarray(state.params["w"])
    scale = state.loss_scale and float(state.loss_scale.scale)
    state, metrics = program.step(state, {"x": np.full((4, 8), -1, np.float32)})
    assert float(metrics["fault/negative"]) == 32
    assert float(metrics["skipped_steps"]) == 1
    np.testing.assert_array_equal(state.params["w"], before)
    assert (state.loss_scale and float(state.loss_scale.scale)) == scale  # no overflow
    state, metrics = program.step(state, {"x": np.full((4, 8), 1, np.float32)})
    assert float(metrics["fault/negative"]) == 0
    assert np.any(np.asarray(state.params["w"]) != before)
    assert program.eval(state, {"x": np.ones((4, 8), np.float32)}).shape == ()
    program.warnings.look(waits=True)
    assert [record.getMessage() for record in caplog.records] == [
        "a step was skipped, and its state is unchanged: its batch has fault/negative = 32"
    ]


def test_a_fault_of_one_microbatch_skips_a_streamed_update_in_backward():
    def head(p_head, p_embed, x, batch, key):
        wrong = jnp.sum(batch["targets"] < 0)
        return zj.Loss(small.head(p_head, p_embed, x, batch, key), None, {"fault/negative": wrong})

    small = toys.small()
    model = dataclasses.replace(small, head=head)
    config = zj.ZeroConfig(
        stage=3,
        params="pinned_host",
        opt_state="pinned_host",
        update="in_backward",
        num_microbatches=2,
    )
    program = zj.build_train_step(
        model, optax.sgd(0.1), config, zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    )
    state = program.init(jax.random.key(0))
    before = [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))]
    (batch,) = toys.batches(1)
    wrong = {**batch, "targets": batch["targets"].copy()}
    wrong["targets"][1, 0] = -1
    state, metrics = program.step(state, wrong)
    assert float(metrics["fault/negative"]) == 0.5  # the mean over microbatches
    for old, new in zip(before, jax.tree.leaves((state.params, state.opt_state)), strict=True):
        np.testing.assert_array_equal(old, new)
    state, metrics = program.step(state, batch)
    assert np.isfinite(metrics["loss"])
    assert float(metrics["skipped_steps"]) == 1
