"""Compare planned bytes with the bytes of programs compiled for 1, 8 and 64 H200s, without a GPU.

    # 12 configs, two sizes; about a minute
    JAX_PLATFORMS=cpu python benchmarks/planned_memory.py
    JAX_PLATFORMS=cpu python benchmarks/planned_memory.py --only nvme
    # random sizes and configs, for 1 and 8 GPUs
    JAX_PLATFORMS=cpu python benchmarks/planned_memory.py --drawn 30
    # plans of the steps that an H200 has run
    JAX_PLATFORMS=cpu python benchmarks/planned_memory.py --measured

Each config is planned from numbers alone, with every field fixed, and its step is compiled. A
compiled program's device bytes are its arguments, temporaries and undonated results; its host bytes
are its arguments in pinned memory.
"""

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import numpy as np

import zerojax as zj
from zerojax.planner import plan, validated

H, N = "pinned_host", "nvme"
SMALL = {"layers": 8, "hidden": 2048, "heads": 16, "seq": 2048, "vocab": 32000}
LARGE = {"layers": 24, "hidden": 4096, "heads": 32, "seq": 2048, "vocab": 32000}
SEGMENTS = (
    zj.Segment(4, activations=H),
    zj.Segment(2, activations="remat"),
    zj.Segment(2, activations="save"),
)
ALL_ON_HOST = {"params": H, "grads": H, "opt_state": H, "activations": H}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A config at one size.

    Attributes:
      name: name of the config.
      sizes: sizes of the model.
      nodes: number of the machine's nodes.
      each: devices per node.
      batch: sequences per step.
      fields: fields of the config.
      tiles: number of tiles of the MLPs.
    """

    name: str
    sizes: dict[str, Any]
    nodes: int = 1
    each: int = 1
    batch: int
    fields: dict[str, Any]
    tiles: int = 1


CASES = (
    Case(name="resident", sizes=SMALL, batch=4, fields={"activations": "save"}),
    Case(name="opt_state on the host, remat", sizes=SMALL, batch=8,
         fields={"activations": "remat", "opt_state": H}),
    Case(name="segments, opt_state on the host", sizes=SMALL, batch=8,
         fields={"activations": SEGMENTS, "opt_state": H}),
    Case(name="all on the host", sizes=LARGE, batch=4, fields=ALL_ON_HOST),
    Case(name="all on nvme", sizes=LARGE, batch=4, fields=dict.fromkeys(ALL_ON_HOST, N)),
    Case(name="all on the host, 4 tiles", sizes=LARGE, batch=2, fields=ALL_ON_HOST, tiles=4),
    Case(name="stage 0, remat", sizes=SMALL, each=8, batch=8,
         fields={"stage": 0, "activations": "remat"}),
    Case(name="stage 2", sizes=SMALL, each=8, batch=8, fields={"stage": 2}),
    Case(name="stage 3, remat", sizes=LARGE, each=8, batch=16, fields={"activations": "remat"}),
    Case(name="opt_state on the host, in backward", sizes=LARGE, each=8, batch=16,
         fields={"opt_state": H, "update": "in_backward", "activations": "selective"}),
    Case(name="stage 1, remat", sizes=LARGE, nodes=8, each=8, batch=64,
         fields={"stage": 1, "activations": "remat"}),
    Case(name="all on the host, gather_ahead", sizes=LARGE, nodes=8, each=8, batch=64,
         fields=ALL_ON_HOST | {"gather_ahead": True}),
)  # fmt: skip
_LLAMA = {"hidden": 4096, "heads": 32, "seq": 2048, "vocab": 32000, "mlp": 11008, "gated": True}
_EIGHT = _LLAMA | {"layers": 8, "params": 1_881_214_976}
_ALL = _LLAMA | {"layers": 32, "params": 6_738_415_616}
_IN_BACKWARD = {"activations": "remat", "opt_state": H, "update": "in_backward"}
_ON_HOST = _IN_BACKWARD | {"update_on": "host"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A step that an H200 has run, from `benchmarks/results/gpu_check_h200_202611.md`.

    Attributes:
      case: config and sizes that were run.
      device_gib: peak device memory by the device's own count, in GiB, including `program.init`.
      seconds: seconds per step.
    """

    case: Case
    device_gib: float
    seconds: float


MEASURED = (
    Measured(
        case=Case(name="resident", sizes=_EIGHT, batch=8, fields={"activations": "remat"}),
        device_gib=31.78,
        seconds=0.413,
    ),
    Measured(
        case=Case(name="opt_state", sizes=_EIGHT, batch=8, fields=_IN_BACKWARD),
        device_gib=11.29,
        seconds=0.6919,
    ),
    Measured(
        case=Case(name="opt_state", sizes=_EIGHT, batch=16, fields=_IN_BACKWARD),
        device_gib=14.71,
        seconds=0.9423,
    ),
    Measured(
        case=Case(name="opt_state", sizes=_ALL, batch=8, fields=_IN_BACKWARD),
        device_gib=23.33,
        seconds=2.362,
    ),
    Measured(
        case=Case(name="opt_state", sizes=_ALL, batch=16, fields=_IN_BACKWARD),
        device_gib=29.76,
        seconds=3.257,
    ),
    Measured(
        case=Case(name="updated on the host", sizes=_EIGHT, batch=8, fields=_ON_HOST),
        device_gib=9.314,
        seconds=0.6878,
    ),
)
MEASURED_HOST_KERNEL = 122e9
"""Bytes per second of the host's kernel on that machine, with bfloat16 gradients and parameters."""
NAMES = ("stage", "params", "grads", "opt_state", "activations", "update", "update_on",
         "opt_state_device_fraction", "prefetch_distance", "gather_ahead", "num_microbatches",
         "moments")  # fmt: skip


def drawn(num: int, seed: int) -> list[Case]:
    """Return `num` cases of random sizes and fields.

    Some contradictory fields are adjusted; a case may still be one that cannot be planned.
    """
    rng, cases = np.random.default_rng(seed), list[Case]()

    def choice(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    while len(cases) < num:
        heads, each = choice(8, 16), choice(1, 8)
        sizes = {
            "layers": choice(4, 6, 8, 12),
            "hidden": 128 * heads,
            "heads": heads,
            "seq": choice(512, 1024, 2048),
        }
        sizes |= {"vocab": choice(4096, 16384, 32000), "gated": choice(False, True)}
        fields: dict[str, Any] = {
            "stage": choice(1, 2, 3, 3), "grads": choice("device", H, N),
            "opt_state": choice("device", H, N), "params": choice("device", "device", H, N),
            "activations": choice("save", "remat", "selective", H, N),
            "update": choice(None, "in_backward"), "prefetch_distance": choice(1, 2),
            "num_microbatches": choice(1, 1, 2),
            "gather_ahead": choice(False, False, True),
        }  # fmt: skip
        if fields["params"] != "device":
            fields["stage"] = 3
        if fields["update"] == "in_backward":
            fields["grads"] = "device"
        if fields["opt_state"] != "device" and rng.random() < 0.25:
            fields["update_on"] = "host"
        plain = {
            name: value for name, value in fields.items() if value != getattr(zj.ZeroConfig(), name)
        }
        name = ", ".join(f"{name}={value}" for name, value in plain.items()) or "the default"
        cases.append(
            Case(name=name, sizes=sizes, each=each, batch=each * choice(2, 4), fields=fields)
        )
    return cases


def planned(case: Case, host_kernel: float = 2e11) -> tuple[zj.Plan, zj.Sizes]:
    """Return the plan of a case, and its sizes.

    Args:
      case: case to plan.
      host_kernel: rate of an update on the host, in bytes per second.
    """
    machine = dataclasses.replace(
        zj.machine("h200", nodes=case.nodes, devices_per_node=case.each),
        host_bytes=2e12, host_kernel=host_kernel,
        disk_bytes=3e13, disk_read=6e9, disk_write=4e9, disk_both=7e9,
        network_between_nodes=4e10,
    )  # fmt: skip
    sizes, default = zj.Sizes(batch=case.batch, **case.sizes), zj.ZeroConfig()
    fixed = {name: getattr(default, name) for name in NAMES} | {"precision": "bf16"} | case.fields
    return plan(sizes, machine=machine, fixed=fixed, tiles=(case.tiles,)), sizes


def measured_table() -> str:
    """Return a table that compares plans with an H200's measurements."""
    rows = [
        "| states | layers | tokens | device GiB, planned | measured | off | s, planned "
        "| measured | off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for step in MEASURED:
        made, sizes = planned(step.case, MEASURED_HOST_KERNEL)
        device_gib = made.peak_bytes / 2**30
        cells = [
            step.case.name, f"{sizes.layers}", f"{sizes.tokens:,}",
            f"{device_gib:.2f}", f"{step.device_gib:.2f}",
            f"{device_gib / step.device_gib - 1:+.1%}",
            f"{made.seconds:.2f}", f"{step.seconds:.2f}",
            f"{made.seconds / step.seconds - 1:+.1%}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def of_kinds(sent: Mapping[str, float]) -> tuple[float, float]:
    """Return the bytes that are gathered and the bytes that are reduced.

    An all_reduce counts half for each, since XLA may build it from both.
    """
    both = sent.get("all_reduce", 0.0) / 2
    return sent.get("all_gather", 0.0) + both, sent.get("reduce_scatter", 0.0) + both


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--drawn",
        type=int,
        default=0,
        help="number of cases of random sizes and configs to plan instead",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random cases")
    parser.add_argument(
        "--measured",
        action="store_true",
        help="plan the steps that an H200 has run; compile nothing",
    )
    options = parser.parse_args()
    print(f"jax {importlib.metadata.version('jax')}\n")
    if options.measured:
        print(measured_table())
        return
    sent = "sent GB a device, planned: gathers, reductions | compiled |"
    print(
        "| config | layers x hidden, H200s | device GB, planned | compiled | off "
        f"| host GB, planned | compiled | {sent}"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    cases, far = drawn(options.drawn, options.seed) if options.drawn else CASES, list[float]()
    for case in (case for case in cases if options.only in case.name):
        try:
            made, sizes = planned(case)
        except ValueError as error:
            if not options.drawn:
                raise
            print(f"| {case.name} | not planned: {str(error)[:80]} |", flush=True)
            continue
        v = validated(made, sizes, None, None, None)
        where = f"{sizes.layers} x {sizes.hidden}, {case.nodes * case.each}"
        off = v.planned_bytes / v.device_bytes - 1
        far.append(abs(off))
        print(
            f"| {case.name} | {where} | {v.planned_bytes / 1e9:.3f} "
            f"| {v.device_bytes / 1e9:.3f} | {off:+.1%} "
            f"| {v.planned_host_bytes / 1e9:.3f} | {v.host_bytes / 1e9:.3f} "
            f"| {' '.join(f'{n / 1e9:.3f}' for n in of_kinds(v.planned_sent))} "
            f"| {' '.join(f'{n / 1e9:.3f}' for n in of_kinds(v.sent))} |",
            flush=True,
        )
    print(
        f"\n{sum(off <= 0.05 for off in far)} of {len(far)} within 5 %; "
        f"the farthest is {max(far, default=0.0):.1%} off"
    )


if __name__ == "__main__":
    main()
