"""A plan next to its compiled program, compiled for the plan's mesh on devices that may be absent.

Compilation shows what closed forms cannot: how XLA packs a layer's temporary memory. It takes a
minute for a large model, and allocates nothing.
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
from zerojax.trees import Batch


def validated(
    plan: Plan, model: Model | LayeredModel | Sizes, tx: Any, mesh: Mesh | None, batch: Batch
) -> Validated:
    """Return the bytes per device of a plan's compiled step, next to the plan's own.

    Args:
      plan: plan whose step is compiled.
      model: model that was planned; for sizes, `zerojax.costs.sized_model` takes its place, with
        Adam.
      tx: optimizer of the model; ignored for sizes.
      mesh: mesh of the model; ignored for sizes.
      batch: batch of the model; ignored for sizes.

    Raises:
      ValueError: no program can be compiled here for the machine's GPUs, or the sizes have no
        vocabulary.
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
        model,
        parts.tx,
        parts.records,
        parts.step,
        parts.gathered_early,
        parts.sequence,
        parts.state_model,
    )
    compiled = program.lower(batch).compile()
    stats: Any = compiled.memory_analysis()
    device = (
        stats.argument_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )
    # On a GPU, records in flight for the disk and the host update are outside the program, and so
    # unknown to it.
    device += program.memory(batch).tiers["device"].get("slots", 0)
    # Callbacks and the disk engine hold these kinds, which are not arguments of the program.
    host = sum(
        n
        for kind, n in plan.bytes["pinned_host"].items()
        if kind not in ("buffers", "stashed", "made")
    )
    if (
        mesh.devices.flat[0].platform == "cpu"
    ):  # CPU programs do not distinguish host memory from device memory
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
    """Return the bytes that a device sends over `data` and `fsdp` per step, by collective.

    Collectives are assumed to be rings.

    Args:
      text: text of the compiled program, `compiled.as_text()`.
      mesh: mesh that it was compiled for.
    """
    sent: dict[str, float] = {}
    for each in collectives(text, 1, mesh=mesh):
        axes = (each.axes or "").split("+")
        if not set(axes) <= {"data", "fsdp"}:
            continue
        n = math.prod(mesh.shape[axis] for axis in axes)
        name = each.op.replace("-", "_")
        rounds = 2 if name == "all_reduce" else 1
        sent[name] = sent.get(name, 0.0) + rounds * each.num_bytes * (n - 1) / n * each.times
    return sent


def check_chip(machine: Machine) -> None:
    """Raise ValueError for a machine whose GPUs no program can be compiled for."""
    if machine.name not in CHIPS:
        raise ValueError(
            f"no program can be compiled here for {machine.name!r}: "
            f"known chips are {', '.join(CHIPS)}"
        )
