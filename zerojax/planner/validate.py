"""A plan beside its compiled program: the step is compiled for the plan's mesh, on devices that
need not be there.

Compiling tells what no closed form does: how XLA packs what a layer has at once. It takes a minute
  for a large model, and
allocates nothing.
"""

import math
from typing import Any

from jax.sharding import Mesh

from zerojax.aot import CHIPS
from zerojax.costs import Sizes, buildable_of_sizes
from zerojax.hlo import collectives
from zerojax.machines import Machine
from zerojax.models import LayeredModel, Model
from zerojax.planner.plans import Plan, Validated
from zerojax.program import Program, assemble


def validated(
    plan: Plan, model: Model | LayeredModel | Sizes, tx: Any, mesh: Mesh | None, batch: Any
) -> Validated:
    """Return the bytes of a plan's compiled step on one device, beside those of the plan.

    Args:
      plan: whose step is compiled.
      model: that was planned; of sizes `zerojax.costs.sized_model` stands for it, with Adam.
      tx: of a model.
      mesh: likewise.
      batch: likewise.

    Raises:
      ValueError: nothing compiles for the machine's GPUs here, or the sizes have no vocabulary.
    """
    if isinstance(model, Sizes):
        check_chip(plan.machine)
        of_sizes = buildable_of_sizes(
            model, plan.machine, plan.grid, plan.config.precision, plan.tiles
        )
        model, tx, mesh, batch = of_sizes
    assert mesh is not None
    parts = assemble(model, tx, plan.config, mesh)
    program = Program(
        model, parts.tx, parts.records, parts.step, parts.gathered_early, parts.sequence
    )
    compiled = program.lower(batch).compile()
    stats: Any = compiled.memory_analysis()
    device = (
        stats.argument_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )
    # Beside the program, and so unknown to it: records of disk and host's update on their way, on a
    # GPU.
    device += program.memory(batch).tiers["device"].get("slots", 0)
    # What the program does not take as arguments: callbacks and the disk's engine have it.
    host = sum(
        n
        for kind, n in plan.bytes["pinned_host"].items()
        if kind not in ("buffers", "stashed", "made")
    )
    if (
        mesh.devices.flat[0].platform == "cpu"
    ):  # whose programs do not tell host memory from a device's
        device -= host
    return Validated(
        device_bytes=device,
        planned_bytes=plan.peak_bytes,
        host_bytes=getattr(stats, "host_argument_size_in_bytes", 0),
        planned_host_bytes=host,
        sent=sent_by(compiled.as_text() or "", mesh),
        planned_sent={name: n for name, n in plan.collectives.items() if name != "tensor"},
    )


def sent_by(text: str, mesh: Mesh) -> dict[str, float]:
    """Return the bytes that a device sends over `data` and `fsdp` in a step of a compiled program,
    by collective, as a ring.

    Args:
      text: `compiled.as_text()`.
      mesh: that it was compiled for.
    """
    sent: dict[str, float] = {}
    for each in collectives(text, 1, mesh=mesh):
        axes = (each.axes or "").split("+")
        if not set(axes) <= {"data", "fsdp"}:
            continue
        n, name = math.prod(mesh.shape[axis] for axis in axes), each.op.replace("-", "_")
        rounds = 2 if name == "all_reduce" else 1
        sent[name] = sent.get(name, 0.0) + rounds * each.num_bytes * (n - 1) / n * each.times
    return sent


def check_chip(machine: Machine) -> None:
    """Raise ValueError for a machine whose GPUs no program can be compiled for."""
    if machine.name not in CHIPS:
        raise ValueError(
            f"no program can be compiled for {machine.name!r} here: known chips are {', '.join(CHIPS)}"
        )
