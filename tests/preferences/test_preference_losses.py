"""The losses over pairs equal their equations in float64, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax as zj

KINDS = ("sigmoid", "ipo", "orpo", "kto", "simpo")
BETA, GAMMA, GOOD, BAD = 0.3, 0.4, 1.5, 0.75
LOSS, GRADIENT = 1e-5, 1e-5
ROWS, SEQ = 3, 14


def packed_batch() -> dict[str, np.ndarray]:
    """Return three rows with 2, 1 and 0 pairs of random tokens, of which some do not count."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (ROWS, SEQ + 1)).astype(np.int32)
    segments = np.zeros((ROWS, SEQ), np.int32)
    segments[0] = [1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4, 0, 0]
    segments[1, :7] = [1, 1, 2, 2, 2, 2, 2]
    targets = tokens[:, 1:].copy()
    starts = np.diff(segments, axis=1, prepend=0) != 0
    targets[starts | (segments == 0)] = -1  # the first position predicts a prompt's token
    return {
        "tokens": tokens[:, :-1],
        "targets": targets,
        "segment_ids": segments,
        "labels": np.asarray([[1, -1], [1, 0], [0, 0]], np.int32),
        "reference": rng.normal(-9, 2, (ROWS, 4)).astype(np.float32),
    }


def expected(kind: str, log_probs: np.ndarray, batch: dict[str, np.ndarray]) -> float:
    """Return the loss by the equations of the papers, in float64, one pair after the other."""
    sums, lengths, ratios, labels = [], [], [], []
    nll = []
    for row in range(ROWS):
        for pair in np.flatnonzero(batch["labels"][row]):
            both = []
            for side in (0, 1):
                inside = batch["segment_ids"][row] == 2 * pair + side + 1
                counted = inside & (batch["targets"][row] >= 0)
                both.append((log_probs[row][counted].sum(), counted.sum()))
                if not side:
                    nll += list(-log_probs[row][inside])
            sums.append([s for s, _ in both])
            lengths.append([n for _, n in both])
            reference = batch["reference"][row].astype(np.float64)
            ratios.append(sums[-1] - reference[2 * pair : 2 * pair + 2])
            labels.append(batch["labels"][row, pair])
    s, n, r = np.asarray(sums), np.asarray(lengths), np.asarray(ratios)
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    if kind == "sigmoid":
        return float(np.mean(-np.log(sigmoid(BETA * (r[:, 0] - r[:, 1])))))
    if kind == "ipo":
        return float(np.mean((r[:, 0] / n[:, 0] - r[:, 1] / n[:, 1] - 1 / (2 * BETA)) ** 2))
    if kind == "simpo":
        margin = BETA * (s[:, 0] / n[:, 0] - s[:, 1] / n[:, 1]) - GAMMA
        return float(np.mean(-np.log(sigmoid(margin))))
    if kind == "orpo":
        p = np.exp(s / n)
        odds = p / (1 - p)
        ratio = np.log(sigmoid(np.log(odds[:, 0]) - np.log(odds[:, 1])))
        return float(np.mean(nll) - BETA * np.mean(ratio))
    kl = kl_of(r)
    desirable = np.asarray(labels) > 0
    value = np.where(desirable, sigmoid(BETA * (r[:, 0] - kl)), sigmoid(BETA * (kl - r[:, 0])))
    return float(np.mean(np.where(desirable, GOOD, BAD) * (1 - value)))


def kl_of(ratios: np.ndarray) -> float:
    """Return the KL term, which is held fixed while the gradient is taken."""
    return FIXED_KL[0] if FIXED_KL else max(0.0, float(np.mean(ratios[:, 1])))


FIXED_KL: list[float] = []


@pytest.mark.parametrize("kind", KINDS)
def test_preference_loss_is_its_equation_in_value_and_gradient(kind, monkeypatch):
    batch = packed_batch()
    log_probs = -np.random.default_rng(1).gamma(2, 1.5, (ROWS, SEQ))
    loss = zj.dpo_loss(BETA, kind, gamma=GAMMA, desirable_weight=GOOD, undesirable_weight=BAD)
    needed = np.asarray(loss.targets(batch)) >= 0
    log_probs = np.where(needed, log_probs, 0)
    if not loss.reads_reference:
        del batch["reference"]

    def mean(values):
        out = loss(values, batch)
        return out.total / out.weight

    value, gradient = jax.jit(jax.value_and_grad(mean))(jnp.float32(log_probs))
    with_reference = packed_batch()
    assert abs(value - expected(kind, log_probs, with_reference)) < LOSS
    assert loss(jnp.float32(log_probs), batch).weight == 3
    if kind == "kto":
        ratios = (
            np.asarray(loss.predict(jnp.float32(log_probs), batch)) - with_reference["reference"]
        )
        kl = max(0.0, float((ratios[0, 1] + ratios[0, 3] + ratios[1, 1]) / 3))
        assert kl > 0
        monkeypatch.setattr(f"{__name__}.FIXED_KL", [kl])
    slopes = np.zeros_like(log_probs)
    for place in np.argwhere(needed):
        sides = []
        for step in (1e-4, -1e-4):
            moved = log_probs.copy()
            moved[tuple(place)] += step
            sides.append(expected(kind, moved, with_reference))
        slopes[tuple(place)] = (sides[0] - sides[1]) / 2e-4
    assert np.abs(slopes).max() > 1e-2
    np.testing.assert_allclose(gradient, slopes, rtol=0, atol=GRADIENT)


def test_odds_of_sure_answers_are_finite():
    """A mean log-probability of 0 has infinite odds, and one of -1e-9 cancels in 1 - e^a."""
    batch = packed_batch()
    loss = zj.dpo_loss(BETA, "orpo")
    gradient = jax.jit(jax.grad(lambda values: loss(values, batch).total))
    for level in (0.0, -1e-9, -80.0):
        assert np.isfinite(gradient(jnp.full((ROWS, SEQ), level))).all()


def test_metrics_are_means_over_pairs():
    batch = packed_batch()
    log_probs = jnp.full((ROWS, SEQ), -1.0)
    metrics = zj.dpo_loss(2.0, "simpo")(log_probs, batch).metrics
    assert metrics["rewards/chosen"].total / metrics["rewards/chosen"].weight == -2
    assert metrics["rewards/accuracies"].total == 0
    # Sequences with 2, 1 and 1 counted targets are chosen, and with 3, 2 and 4 rejected.
    assert metrics["logps/chosen"].total == -4
    assert metrics["logps/rejected"].total == -9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "hinge"}, "kind='hinge' is unknown: choose from sigmoid, ipo, orpo, kto, simpo"),
        ({"beta": 0}, "beta=0"),
        ({"gamma": -1}, "gamma=-1: a number of at least 0"),
        ({"desirable_weight": "much"}, "desirable_weight='much'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zj.dpo_loss(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": None}, "has no 'reference': compute it by"),
        ({"labels": None}, "needs 'labels' too: zerojax.data.preferences.pack_pairs"),
        ({"labels": np.ones((3, 2), np.float32)}, "signed integers \\[B, P\\] are needed"),
        ({"reference": np.ones((3, 2), np.float32)}, "floats \\[B, 4\\] are needed"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change, message):
    batch = {**packed_batch(), **change}
    batch = {name: array for name, array in batch.items() if array is not None}
    with pytest.raises(ValueError, match=message):
        zj.dpo_loss()(jnp.zeros((ROWS, SEQ)), batch)
