"""Write docs/reference/compatibility.md: which settings of ZeroConfig work together.

    python docs/generate_matrix.py

Each pair of settings is built on a small stack of layers over two devices, and its step is traced.
`tests/docs/test_matrix.py` builds some pairs again, and all of them in the exhaustive suite.
"""

import itertools
import os
import pathlib
import re
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

Each cell combines two settings, on a stack of layers over two devices. ✓: the step is built and
traced. A letter is a refusal; the list below the table gives the reason. `=`: both settings set the
same field to different values.

"""


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


def page() -> str:
    """Return the page."""
    names = list(FEATURES)
    results = {pair: combine(*pair) for pair in itertools.combinations(names, 2)}
    reasons = list(dict.fromkeys(r for r in results.values() if r is not None and r != "="))
    lines = ["| | " + " | ".join(str(n + 1) for n in range(len(names))) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for n, one in enumerate(names):
        cells = []
        for m, other in enumerate(names):
            if n == m:
                cells.append("·")
                continue
            reason = results[one, other] if n < m else results[other, one]
            shown = "✓" if reason is None else "="
            if reason is not None and reason != "=":
                shown = chr(ord("a") + reasons.index(reason))
            cells.append(shown)
        lines.append(f"| {n + 1} {one} | " + " | ".join(cells) + " |")
    lines += ["", "| letter | why it is refused |", "|---|---|"]
    lines += [f"| {chr(ord('a') + n)} | {reason} |" for n, reason in enumerate(reasons)]
    tail = "\n`python docs/generate_matrix.py` writes this page.\n"
    return HEAD + "\n".join(lines) + "\n" + tail


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"
    PAGE.write_text(page())
