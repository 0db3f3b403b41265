"""Optimizers and learning-rate schedules of the training scripts, by name.

    schedule(k)  = peak * (k + 1) / (warmup + 1)       k < warmup
                   then from peak to final_rate * peak, along a cosine or a line, or constant

The first step's rate is not zero. All optimizers take the same rates: Muon's updates are scaled to
the size of Adam's (arXiv:2502.16982, section 2.2), and Adafactor's are not scaled by the size of
the weights, which would stop adapters that begin at zero. All decay weights by `weight_decay` times
the rate, as AdamW does.
"""

from typing import Any, Literal, cast

import jax
import optax

import zerojax as zj

Optimizer = Literal["adamw", "adafactor", "muon", "schedule_free"]
Schedule = Literal["cosine", "linear", "constant"]


def check_optimizer(
    optimizer: Optimizer,
    schedule: Schedule | None,
    warmup_steps: int | None,
    final_rate: float | None,
    zero: zj.ZeroConfig,
) -> None:
    """Check the options of the optimizer and its schedule.

    Raises:
      ValueError: an option is out of range, or contradicts another.
    """
    if warmup_steps is not None and warmup_steps < 0:
        raise ValueError(f"--warmup-steps {warmup_steps}: a number of at least 0 is needed")
    if final_rate is not None and not 0 <= final_rate <= 1:
        raise ValueError(
            f"--final-rate {final_rate}: a fraction of the peak rate is needed, from 0 to 1"
        )
    if final_rate is not None and named_schedule(optimizer, schedule) == "constant":
        raise ValueError(
            f"--final-rate {final_rate} needs a rate that decays: use --schedule cosine or linear"
        )
    if optimizer != "schedule_free":
        return
    if schedule not in (None, "constant"):
        raise ValueError(
            f"--optimizer schedule_free with --schedule {schedule}: it averages the weights "
            "in place of a decaying rate; use --schedule constant"
        )
    for name, value in (("params", "nvme"), ("update", "in_forward")):
        if getattr(zero, name) == value:
            raise ValueError(
                f"--optimizer schedule_free is evaluated with averages, which --{name} {value} "
                f"cannot take the place of weights for: use another --{name}, or --optimizer adamw"
            )


def named_schedule(optimizer: Optimizer, schedule: Schedule | None) -> Schedule:
    """Return the schedule of a run: the given one, or the optimizer's default."""
    if schedule is not None:
        return schedule
    return "constant" if optimizer == "schedule_free" else "cosine"


def build_schedule(
    schedule: Schedule,
    peak: float,
    steps: int,
    warmup_steps: int | None = None,
    final_rate: float | None = None,
) -> optax.Schedule:
    """Return the learning rate as a function of the step, counted from 0.

    Args:
      schedule: course of the rate after the warmup.
      peak: rate after the warmup.
      steps: number of steps in the run.
      warmup_steps: number of steps with a smaller rate; by default a thirtieth of `steps`.
      final_rate: rate at the end as a fraction of the peak; by default a tenth.

    Raises:
      ValueError: the warmup is as long as the run.
    """
    warmup = max(1, steps // 30) if warmup_steps is None else warmup_steps
    if warmup_steps is not None and 0 < steps <= warmup:
        raise ValueError(
            f"--warmup-steps {warmup}: the run has only {steps} steps, and the rate reaches its "
            "peak after the warmup"
        )
    first, last = peak / (warmup + 1), peak * (0.1 if final_rate is None else final_rate)
    # The decay must be longer than 0 steps, even in a run of one step.
    decay = max(steps, warmup + 1) - warmup
    if schedule == "cosine" and warmup:
        return optax.warmup_cosine_decay_schedule(first, peak, warmup, warmup + decay, last)
    after: dict[Schedule, optax.Schedule] = {
        "cosine": optax.cosine_decay_schedule(peak, decay, last / peak),
        "linear": optax.linear_schedule(peak, last, decay),
        "constant": optax.constant_schedule(peak),
    }
    if not warmup:
        return after[schedule]
    return optax.join_schedules(
        [optax.linear_schedule(first, peak, warmup), after[schedule]], [warmup]
    )


def build_optimizer(
    optimizer: Optimizer, rate: optax.Schedule, weight_decay: float
) -> optax.GradientTransformation:
    """Return the optimizer of a name.

    Args:
      optimizer: its name.
      rate: learning rate by step.
      weight_decay: decoupled decay of the weights, multiplied by the rate.
    """
    if optimizer == "adamw":
        return optax.adamw(rate, weight_decay=weight_decay)
    if optimizer == "schedule_free":
        return zj.schedule_free_adamw(rate, weight_decay=weight_decay)
    if optimizer == "muon":
        return optax.contrib.muon(
            rate,
            weight_decay=weight_decay,
            adam_weight_decay=weight_decay,
            muon_weight_dimension_numbers=cast(Any, matrices_of_layers),
            consistent_rms=0.2,
        )
    return optax.chain(
        optax.adafactor(multiply_by_parameter_scale=False),
        optax.scale(-1.0),  # undoes adafactor's own sign
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )


def matrices_of_layers(params: Any) -> Any:
    """Return the dims of each matrix that Muon updates, and None for weights that Adam updates.

    Adam updates the embedding, the head and all vectors.
    """

    def dims(path: Any, leaf: Any) -> Any:
        is_end = str(getattr(path[0], "key", "")) in ("embed", "head")
        # Leading dims, such as the experts' or the layers', are batch dims.
        return None if is_end or leaf.ndim < 2 else optax.contrib.MuonDimensionNumbers(-2, -1)

    return jax.tree_util.tree_map_with_path(dims, params)
