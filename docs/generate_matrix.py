"""Write docs/reference/compatibility.md: which settings of ZeroConfig work together.

    python docs/generate_matrix.py

Each pair of settings is built on a small stack of layers over two devices, and its step is traced.
`tests/docs/test_matrix.py` builds some pairs again, and all of them in the exhaustive suite.
"""

import itertools
import os
import pathlib
import re
import string
import tempfile
from typing import Any

FEATURES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "params on host": {"params": "pinned_host"},
    "params on disk": {"params": "nvme"},
    "grads on host": {"grads": "pinned_host"},
    "grads on disk": {"grads": "nvme"},
    "opt_state on host": {"opt_state": "pinned_host"},
    "opt_state on disk": {"opt_state": "nvme"},
    "half of opt_state on the device": {
        "opt_state": "pinned_host",
        "opt_state_device_fraction": 0.5,
    },
    "update in backward": {"update": "in_backward"},
    "update in forward": {"update": "in_forward"},
    "update on the host": {"update_on": "host", "opt_state": "pinned_host"},
    "delayed update": {
        "update_on": "host",
        "opt_state": "pinned_host",
        "delayed_update": True,
        "precision": "bf16",
    },
    "everything kept": {"activations": "everything"},
    "selective": {"activations": "selective"},
    "remat": {"activations": "remat"},
    "activations on host": {"activations": "pinned_host"},
    "activations on disk": {"activations": "nvme"},
    "gather ahead": {"gather_ahead": True},
    "microbatches": {"num_microbatches": 2},
    "clipping": {"clip_norm": 1.0},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "moments in bf16": {"moments": "bfloat16"},
    "sums in float32": {"precision": "bf16", "reduce_dtype": "float32"},
    "reduced once a step": {"reduce_every": "step", "num_microbatches": 2},
    "sequence parallel": {"sequence_parallel": True},
}
"""Settings by name; fields that are missing have their defaults."""
PAGE = pathlib.Path(__file__).parent / "reference/compatibility.md"
HEAD = """\
# Which settings work together

Two settings are combined on a stack of layers over two devices, and the step is built and traced.
The first table lists what is refused, and why. All other pairs are built, unless both settings give
one field different values, such as two tiers of the parameters. The tables of
[all pairs](#all-pairs) show each result.

A plain `zj.Model`, whose layers are unknown, excludes more:
[the configuration](../config.md#configuration) lists it.

## What is refused

| | settings | with | why |
|---|---|---|---|
"""
PAIRS = """
## All pairs

Rows and columns are the same settings, and the rows name the numbers. ✓: the step is built and
traced. A letter: it is refused, for that reason of the table above. `=`: both settings set the same
field to different values.

"""
TAIL = "\n`python docs/generate_matrix.py` writes this page.\n"
COLUMNS = 14
"""Columns of one table of all pairs: two tables fit a window of 1280 pixels."""


def build(fields: dict[str, Any]) -> str | None:
    """Build and trace a step; return why it is refused, or None."""
    import jax
    import jax.numpy as jnp
    import optax

    import zerojax as zj

    model = zj.LayeredModel(
        2,
        lambda key: {"table": jnp.ones((8, 8))},
        lambda p, batch, key: p["table"][batch["tokens"]],
        lambda key: {"w": jnp.ones((8, 8))},
        lambda p, x, key: x + jnp.tanh(x @ p["w"]),
        lambda key: {"out": jnp.ones((8, 8))},
        lambda p, p_embed, x, batch, key: jnp.mean((x @ p["out"]) ** 2),
    )
    batch = {"tokens": jax.ShapeDtypeStruct((8, 4), jnp.int32)}
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = zj.ZeroConfig(**fields, swap_dir=folder)
            with zj.build_train_step(model, optax.adamw(1e-3), config, mesh) as program:
                program.check(batch)
        except (ValueError, NotImplementedError) as error:
            # Three stages and two tiers are refused for one reason.
            reason = re.sub(r"got stage=\d", "got a lower stage", str(error).split("; ")[0])
            return re.sub(r"^params='\w+'", "params off the device", reason)
    return None


def combine(one: str, other: str) -> str | None:
    """Return why a pair is refused, "=" if both set a field differently, or None if it works."""
    a, b = FEATURES[one], FEATURES[other]
    if any(a[name] != b[name] for name in a.keys() & b.keys()):
        return "="
    return build(a | b)


def refused_rows(results: dict[tuple[str, str], str | None], reasons: list[str]) -> list[str]:
    """Return a row for each reason: the settings that are refused with others, and why."""
    rows = []
    for letter, reason in zip(string.ascii_lowercase, reasons, strict=False):
        pairs = [pair for pair, found in results.items() if found == reason]
        firsts = list(dict.fromkeys(one for one, _ in pairs))
        seconds = list(dict.fromkeys(other for _, other in pairs))
        # One row says it for several pairs only if all of their combinations are refused.
        assert len(pairs) == len(firsts) * len(seconds)
        rows.append(f"| {letter} | {', '.join(firsts)} | {', '.join(seconds)} | {reason} |")
    return rows


def pair_table(
    results: dict[tuple[str, str], str | None], reasons: list[str], columns: range
) -> list[str]:
    """Return the table of all settings beside some of them."""
    names = list(FEATURES)
    lines = ["| | " + " | ".join(str(m + 1) for m in columns) + " |"]
    lines.append("|---" + "|:-:" * len(columns) + "|")
    for n, one in enumerate(names):
        cells = []
        for m in columns:
            if n == m:
                cells.append("·")
                continue
            reason = results[one, names[m]] if n < m else results[names[m], one]
            shown = "✓" if reason is None else "="
            if reason is not None and reason != "=":
                shown = string.ascii_lowercase[reasons.index(reason)]
            cells.append(shown)
        lines.append(f"| {n + 1} {one} | " + " | ".join(cells) + " |")
    return lines


def page() -> str:
    """Return the page."""
    count = len(FEATURES)
    results = {pair: combine(*pair) for pair in itertools.combinations(FEATURES, 2)}
    reasons = list(dict.fromkeys(r for r in results.values() if r is not None and r != "="))
    tables = [
        "\n".join(pair_table(results, reasons, range(first, min(first + COLUMNS, count))))
        for first in range(0, count, COLUMNS)
    ]
    refused = "\n".join(refused_rows(results, reasons))
    return HEAD + refused + "\n" + PAIRS + "\n\n".join(tables) + "\n" + TAIL


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"
    PAGE.write_text(page())
