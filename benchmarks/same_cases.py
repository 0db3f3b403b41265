"""List the programs whose numbers are compared, and collect each program's numbers.

Only the public interface is used, so that this runs with earlier and later checkouts.
"""

import collections
import dataclasses
import functools
import hashlib
import importlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from same_toys import (
    LARGE,
    TOY,
    batches,
    flax_layered,
    flax_whole,
    layered,
    linen,
    optimizer,
    tiled,
    unrolled,
)

import zerojax as zj
from zerojax import aot
from zerojax.state import OnDisk

HOST, DISK = "pinned_host", "nvme"
STEPS, DEVICES = 3, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compare.

    Attributes:
      model: function that returns the model.
      axes: axes of the mesh.
      fields: fields of the ZeroConfig.
    """

    model: Callable[..., Any]
    axes: dict[str, Any]
    fields: dict[str, Any]

    @property
    def on_disk(self) -> bool:
        """Whether anything is stored on disk."""
        return DISK in self.fields.values()


def on(tier: str, *kinds: str) -> dict[str, str]:
    """Return the fields that store these kinds of state in a tier."""
    return dict.fromkeys(kinds, tier)


STATES = ("params", "grads", "opt_state")
FP16 = {"precision": "fp16", "loss_scaling": zj.LossScaling(initial=16.0, growth_interval=2)}
FSDP, HYBRID, TENSOR = {"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}
split_layers = functools.partial(layered, tensor=True)
drawing_layers = functools.partial(layered, stochastic=True)
split_model = functools.partial(unrolled, tensor=True)
drawing_model = functools.partial(unrolled, stochastic=True)

CASES: dict[str, Case] = {
    "stage 0, clipped": Case(layered, HYBRID, {"stage": 0, "clip_norm": 0.3}),
    "stage 1, bf16, 2 microbatches": Case(
        drawing_layers, FSDP, {"stage": 1, "precision": "bf16", "num_microbatches": 2}
    ),
    "stage 2, fp16": Case(drawing_model, HYBRID, {"stage": 2, **FP16, "clip_norm": 0.3}),
    "stage 3, gather on use": Case(
        split_model, TENSOR, {"activations": "remat", "clip_norm": 0.3}
    ),
    "stage 3, scan": Case(
        layered, FSDP,
        {"precision": "bf16", "moments": "bfloat16", "num_microbatches": 2,
         "min_shard_bytes": 400},
    ),
    "stage 3, NNX in tiles": Case(flax_whole, HYBRID, {"clip_norm": 0.3}),
    "stage 3, loss in tiles": Case(
        functools.partial(unrolled, tensor=True, tiled_loss=True), TENSOR, {"precision": "bf16"}
    ),
    "host, all": Case(
        layered, FSDP,
        {**on(HOST, *STATES, "activations"), "num_microbatches": 2, "prefetch_distance": 2,
         "clip_norm": 0.3},
    ),
    "host, in backward": Case(
        functools.partial(layered, tensor=True, stochastic=True), TENSOR,
        {**on(HOST, "params", "opt_state"), "update": "in_backward", "gather_ahead": True,
         "activations": "selective"},
    ),
    "host, update there": Case(
        layered, HYBRID,
        {**on(HOST, *STATES), "update_on": "host", "precision": "bf16", "clip_norm": 0.3,
         "activations": "remat"},
    ),
    "host, delayed update": Case(
        layered, FSDP,
        {**on(HOST, "opt_state"), "update_on": "host", "delayed_update": True,
         "precision": "bf16"},
    ),
    "host, half of the state": Case(
        layered, FSDP,
        {**on(HOST, "opt_state"), "opt_state_device_fraction": 0.5, **FP16,
         "saved_names": ("hidden",), "offloaded_names": ("mlp",), "activations": "remat"},
    ),
    "host, plain model": Case(
        unrolled, FSDP, {**on(HOST, "opt_state"), "stage": 2, "clip_norm": 0.3}
    ),
    "nvme, all": Case(
        layered, FSDP,
        {**on(DISK, *STATES, "activations"), "num_microbatches": 2, "clip_norm": 0.3},
    ),
    "nvme, in backward": Case(
        drawing_layers, HYBRID,
        {**on(DISK, "params", "opt_state"), "update": "in_backward", "precision": "bf16",
         "moments": "bfloat16", "gather_ahead": True, "activations": "remat", "io": "tensorstore"},
    ),
    "nvme, update on the host": Case(
        split_layers, TENSOR,
        {**on(DISK, "grads", "opt_state"), "params": HOST, "update_on": "host", **FP16},
    ),
    "nvme, Linen": Case(linen, FSDP, {**on(DISK, "opt_state"), "clip_norm": 0.3}),
    "nvme, plain model, update on the host": Case(
        unrolled, HYBRID,
        {**on(DISK, "opt_state"), "stage": 1, "update_on": "host", "precision": "bf16"},
    ),
    "tiles, NNX": Case(flax_layered, FSDP, {"precision": "bf16"}),
    "tiles, host": Case(
        functools.partial(tiled, tensor=True), TENSOR,
        {**on(HOST, *STATES, "activations"), "num_microbatches": 2, "clip_norm": 0.3},
    ),
    "tiles, nvme, in backward": Case(
        tiled, FSDP,
        {**on(DISK, "params", "opt_state"), "update": "in_backward", "prefetch_distance": 2,
         "precision": "bf16"},
    ),
}  # fmt: skip


def digest(array: Any) -> str:
    """Return a hash of an array's dtype, shape and bits."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    found = np.ascontiguousarray(jax.device_get(array))
    return hashlib.sha256(f"{found.dtype}{found.shape}".encode() + found.tobytes()).hexdigest()


def leaves_of(state: zj.TrainState) -> dict[str, str]:
    """Return the hash of every leaf of a state, except leaves on disk."""
    fields = ("step", "skipped", "key", "params", "master", "opt_state", "loss_scale", "pending")
    tree = {name: getattr(state, name) for name in fields}
    flat = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, OnDisk)
    )[0]
    return {
        jax.tree_util.keystr(path): digest(leaf)
        for path, leaf in flat
        if not isinstance(leaf, OnDisk)
    }


def train(case: Case, swap_dir: str) -> dict[str, Any]:
    """Train a program and return its numbers; its state on disk is stored in `swap_dir`."""
    fields: dict[str, Any] = {"stage": 3, **case.fields} | (
        {"swap_dir": swap_dir} if case.on_disk else {}
    )
    config, model, tx = zj.ZeroConfig(**fields), case.model(), optimizer()
    *data, last = batches(TOY, STEPS + 1, config.precision == "fp16")
    with (
        zj.build_train_step(model, tx, config, zj.make_mesh(**case.axes)) as program,
        tempfile.TemporaryDirectory() as saved,
    ):
        state, metrics = program.init(jax.random.key(0)), []
        for batch in data:
            state, told = program.step(state, batch)
            metrics.append(
                {
                    name: float(value).hex()
                    for name, value in told.items()
                    if not name.startswith("swap_")
                }
            )
        trees = program.iter_params(state)
        params = {
            f"{name}{jax.tree_util.keystr(path)}": digest(leaf)
            for name, tree in trees
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        }
        found = {
            "metrics": metrics,
            "eval": float(program.eval(state, last)).hex(),
            "params": params,
            "state": leaves_of(state),
            **plan_of(program, last),
        }
        if not config.delayed_update:  # such a state restores only into a delayed-update program
            with zj.Checkpointer(saved) as ckpt:
                ckpt.save(program, state)
                found["restored"] = restored(ckpt, model, tx, config)
    return found


def plan_of(program: zj.Program, batch: Any) -> dict[str, Any]:
    """Return a program's facts before it runs: shardings, schedule and bytes."""
    shardings = jax.tree_util.tree_flatten_with_path(program.shardings)[0]
    return {
        "shardings": {
            jax.tree_util.keystr(path): f"{s.spec} {s.memory_kind}" for path, s in shardings
        },
        "replicated": [
            f"{leaf.name} {leaf.num_bytes} B: {leaf.why}" for leaf in program.replicated
        ],
        "gathered early": list(program.gathered_early),
        "schedule": hashlib.sha256(str(program.schedule).encode()).hexdigest(),
        "memory": str(program.memory(batch)).splitlines(),
    }


def restored(ckpt: Any, model: Any, tx: Any, config: Any) -> dict[str, str]:
    """Return the hashes of a saved state, restored into one device's memory."""
    plain = zj.ZeroConfig(stage=0, precision=config.precision, moments=config.moments)
    with zj.build_train_step(
        model, tx, plain, zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    ) as program:
        return leaves_of(ckpt.restore(program))


# --- compiled programs ----------------------------------------------------------------------------


COMPILED: dict[str, Case] = {
    "stage 2, scan": Case(layered, HYBRID, {"stage": 2, "clip_norm": 1.0}),
    "stage 3, scan": Case(layered, FSDP, {"num_microbatches": 2, "activations": "remat"}),
    "stage 3, gather on use": Case(unrolled, FSDP, {"clip_norm": 1.0}),
    "host, all, gather ahead": Case(
        layered, FSDP, {**on(HOST, *STATES, "activations"), "gather_ahead": True}
    ),
    "host, in backward, tensor": Case(
        split_layers, TENSOR, {**on(HOST, "params", "opt_state"), "update": "in_backward"}
    ),
    "host, update there": Case(
        layered, FSDP, {**on(HOST, *STATES, "activations"), "update_on": "host"}
    ),
    "nvme, all": Case(layered, FSDP, {**on(DISK, *STATES, "activations"), "prefetch_distance": 2}),
    "nvme, update on the host": Case(
        layered, FSDP, {**on(DISK, *STATES), "update_on": "host", "activations": "remat"}
    ),
    "tiles, host, in backward": Case(
        tiled, FSDP, {**on(HOST, "params", "opt_state"), "update": "in_backward"}
    ),
    "tiles, NNX": Case(flax_layered, FSDP, {}),
}


def reader(name: str) -> Any:
    """Return the HLO-reading function with this name, from any module that has had it."""
    for module in (
        "zerojax.hlo",
        "zerojax.hlo_host",
        "zerojax.hlo.host_copies",
        "zerojax.hlo.collectives",
    ):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if callable(found):
            return found
    raise ImportError(f"nothing in zerojax.hlo is named {name}")


def compile_case(case: Case) -> dict[str, Any]:
    """Compile a program for 8 H200s, without having any, and return its facts."""
    fields: dict[str, Any] = {
        "stage": 3,
        "precision": "bf16",
        "swap_dir": "not there" if case.on_disk else None,
    }
    config = zj.ZeroConfig(**fields | case.fields)
    mesh = aot.gpu_mesh("h200", gpus_per_host=DEVICES, **case.axes)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batches(LARGE, 1)[0])
    program = zj.build_train_step(case.model(LARGE), optimizer(), config, mesh)
    compiled: Any = program.lower(batch).compile()
    text, stats = compiled.as_text(), compiled.memory_analysis()
    moves = [
        *reader("host_slices")(text, unknown_trips=1),
        *reader("host_copies")(text, unknown_trips=1),
    ]
    link = collections.Counter(
        f"{m.op} {m.direction} {m.num_bytes} B x {m.times} {getattr(m, 'index', '')}" for m in moves
    )
    found = collections.Counter(
        f"{c.op} {c.dtype} {c.num_bytes} B x {c.times}"
        for c in reader("collectives")(text, unknown_trips=1)
    )
    names = [name for name in dir(stats) if name.endswith("_size_in_bytes") and "code" not in name]
    return {
        "collectives": dict(sorted(found.items())),
        "bytes": {name.removesuffix("_size_in_bytes"): getattr(stats, name) for name in names},
        "gathered": reader("peak_gathered_bytes")(text),
        "host link": dict(sorted(link.items())),
        **plan_of(program, batch),
        "text": hashlib.sha256(nameless(text).encode()).hexdigest(),
    }


def nameless(text: str) -> str:
    """Return HLO text without source locations, its names replaced by numbers in order."""
    lines = [line for line in text.splitlines() if re.match(r"\s|%|ENTRY|\}|HloModule", line)]
    text = "\n".join(
        line if line.startswith(" ") else re.sub(r"[\w.\-]+: ", "", line) for line in lines
    )
    text = re.sub(r"^HloModule [\w.\-]+", "HloModule", text)
    text = re.sub(r",? ?(metadata|frontend_attributes)=\{[^{}]*(\{[^{}]*\}[^{}]*)*\}", "", text)
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.\-]+", lambda m: numbers.setdefault(m.group(), f"%{len(numbers)}"), text)
