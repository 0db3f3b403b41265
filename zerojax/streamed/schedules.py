"""The schedule of a streamed step: of each run of layers, which record moves at which tick, and which leaves move beside.

Leaves that are no stack of layers, the ends, are updated beside backward as far as their gradients are known. Those that the
head completes are updated before its first tick (`early_ends`), large ones in pieces, one in a tick (`head_pieces`). The others
are updated after its last tick, large ones likewise in pieces (`cut_ends`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from host_offload.schedule import Schedule, advise, build_schedule, build_tiled_schedule, stacked_schedule
from zerojax.activations import MODES
from zerojax.optim import Pieces, RecordUpdate
from zerojax.sharding import STAGES, LeafSpec, Spec, local_elements, stored_spec
from zerojax.state import LayerRun, Layout, StateRecords


def record_bytes(records: StateRecords, part: Sequence[int], frozen: Sequence[int] = ()) -> dict[str, int]:
    """Return the bytes of the records of some stacked leaves on each device, as `host_offload.build_schedule` takes them.

    `part` are those that are trained, `frozen` those that are not.

    "grads" is the record's whole gradient, which is there before it is reduced to its shards. Activations are not counted:
    their shapes are known once there is a batch.
    """
    layout, mesh, stage = records.layout, records.mesh, STAGES[records.layout.config.stage]

    def num_bytes(part: Sequence[int], spec_of: Callable[[LeafSpec], Spec], itemsize: int | None = None) -> int:
        leaves = [layout.all_leaves[i] for i in part]
        elements = [local_elements(leaf.record_shape, spec_of(leaf.spec)[leaf.lead :], mesh) for leaf in leaves]
        return sum(n * (itemsize or leaf.dtype.itemsize) for n, leaf in zip(elements, leaves, strict=True))

    # Masters are float32, and rest beside the optimizer state in one record.
    opt_state = num_bytes(part, lambda s: stored_spec(s, stage.opt_state), 4) if layout.has_master else 0
    if layout.updates_by_record:
        opt_map = layout.opt_map
        for j in opt_map.states_of(part):
            # The shape of one record: a state leaf has the leading dims of the parameter that it mirrors.
            shape = opt_map.leaves[j].shape[layout.leaves[opt_map.owner(j)].lead :]
            opt_state += local_elements(shape, records.opt_record(j).spec, mesh) * opt_map.leaves[j].dtype.itemsize
    whole, whole_frozen = (num_bytes(some, lambda s: s.base) for some in (part, frozen))
    whole_grads = num_bytes(part, lambda s: s.base, 4) if layout.reduces_in_float32 else whole
    # What rests encoded is whole twice: as it was gathered, and decoded.
    for leaf in (layout.all_leaves[i].decodes for i in frozen):
        if leaf is not None:
            elements = local_elements(leaf.record_shape, leaf.spec.base[leaf.lead :], mesh)
            whole_frozen += elements * leaf.dtype.itemsize
    shards, frozen_shards = (num_bytes(some, lambda s: stored_spec(s, stage.params)) for some in (part, frozen))
    sizes = {"params": shards, "gathered": whole + whole_frozen, "grads": whole_grads, "opt_state": opt_state}
    return sizes | ({"frozen": frozen_shards} if layout.frozen else {})


def plan_schedules(
    records: StateRecords, runs: Sequence[LayerRun], cut: Mapping[int, int], pieces: Mapping[int, Pieces]
) -> dict[str, Schedule]:
    """Return the schedule of the loops over each run of layers, by its name.

    Args:
      records: how the state rests.
      runs: of layers.
      cut: the leaves that are updated in pieces after the layers, and in how many.
      pieces: `head_pieces`.

    Raises:
      ValueError: they do not fit `device_budget_bytes`.
    """
    config = records.layout.config
    distance, ahead, budget = config.prefetch_distance, config.gather_ahead, config.device_budget_bytes

    def build(distance: int, ahead: bool) -> dict[str, Schedule]:
        return {run.name: _plan_schedule(records, runs, run, cut, pieces, distance, ahead) for run in runs}

    schedules = build(distance, ahead)
    peaks = {name: schedule.peak_bytes for name, schedule in schedules.items()}
    if budget is not None and max(peaks.values()) > budget:
        name = max(peaks, key=peaks.__getitem__)
        of_run = "" if len(runs) == 1 else f" of {name}" if runs[0].is_segment else f" of stack {name!r}"
        raise ValueError(
            f"device_budget_bytes={budget}: prefetch_distance={distance} with gather_ahead={ahead} puts {peaks[name]} bytes"
            f"{of_run} in flight on a device, {peaks[name] - budget} more; "
            + advise(lambda distance, ahead: stacked_schedule(build(distance, ahead)), distance, ahead, budget)
        )
    return schedules


def _plan_schedule(
    records: StateRecords,
    runs: Sequence[LayerRun],
    run: LayerRun,
    cut: Mapping[int, int],
    pieces: Mapping[int, Pieces],
    distance: int,
    ahead: bool,
) -> Schedule:
    """Return the schedule of the loops over one of the runs."""
    layout, stack, tiers = records.layout, run.stack, _tiers(records, run)
    config = layout.config
    options: dict[str, Any] = {
        "tiers": tiers,
        "update": config.update or "after_backward",
        # Without masters the device's update fetches the parameters; an update on the host reads them by itself.
        "master": layout.has_master or config.update_on == "host",
        "record_bytes": record_bytes(records, stack.blocks, stack.frozen_blocks),
        "first_layer": run.first,
    }
    if stack.groups:
        groups = {group.name: group.num_tiles for group in stack.groups}
        sizes = [record_bytes(records, group.leaves, group.frozen) for group in stack.groups]
        tiled = build_tiled_schedule(run.num_layers, distance, groups=groups, group_bytes=sizes, **options)
        return _with_host_update(tiled, layout)
    in_backward = config.update == "in_backward"
    # Backward begins with the last run, which stores what the head completed; it ends with the first one. An update ends with
    # the last one.
    is_last = run is runs[0 if in_backward else -1]
    early = early_ends(records, runs)
    others = [i for i in layout.ends if i not in (*early, *cut, *pieces)]
    of_piece = sum(_stored_bytes(records, (i,)) // some.count for i, some in pieces.items())
    ends = {
        **({"head": _stored_bytes(records, early)} if early and run is runs[-1] else {}),
        **({"head_pieces": of_piece} if pieces and run is runs[-1] else {}),
        **({"embed": _stored_bytes(records, others)} if others and is_last else {}),
        **({"pieces": max(_stored_bytes(records, (i,)) // n for i, n in cut.items())} if cut and is_last else {}),
    }
    schedule = build_schedule(
        run.num_layers,
        distance,
        gather_ahead=ahead,
        device_layers=min(stack.device_layers, run.stop),
        stores_late=_stores_late(records, run),
        ends=ends,
        num_head_pieces=next((some.count for some in pieces.values()), 0) if run is runs[-1] else 0,
        **options,
    )
    if config.delayed_update:  # layers are updated beside the step, and taken over in backward
        schedule = dataclasses.replace(schedule, phases=tuple(p for p in schedule.phases if p.name != "update"))
    return _with_host_update(schedule, layout)


def _with_host_update(schedule: Schedule, layout: Layout) -> Schedule:
    """Return a schedule that tells what callbacks of an update on the host move, which is no part of its arrays."""
    config = layout.config
    if config.update_on != "host":
        return schedule
    on_device = config.params == "device"
    up = ["new parameters up"] if on_device else []
    weights = ["float32 weights down"] if on_device and not layout.has_master else []
    if config.delayed_update or config.update == "in_backward":
        moves = {"backward": ["gradients down", *weights, *up]}
    elif config.grads == "device":
        moves = {"update": ["gradients down", *weights, *up]}
    else:
        moves = {"backward": ["gradients down"], "update": [*weights, *up]}
    told = {name: f"callbacks move {', '.join(some)}" for name, some in moves.items() if some}
    return dataclasses.replace(
        schedule, phases=tuple(dataclasses.replace(phase, in_words=told.get(phase.name, "")) for phase in schedule.phases)
    )


def _tiers(records: StateRecords, run: LayerRun) -> dict[str, str]:
    """Return where the records of a run rest, as its schedule takes it."""
    layout, stack, segment = records.layout, run.stack, run.segment
    config = layout.config
    # What a user's names keep in host memory is fetched with its layer, as a layer's input in host memory would be.
    # Where its input rests off the device anyway, that is the tier, by which bytes are counted.
    activations = "pinned_host" if segment.offloaded_names and segment.activations in MODES else segment.activations
    on_host = config.update_on == "host"  # then its callbacks read and write the state, and nothing of it is fetched
    tiers = {
        "params": config.params,
        "grads": "device" if on_host else config.grads,
        "opt_state": "device" if on_host else config.opt_state,
        "activations": "device" if activations in MODES else activations,
    }
    if layout.frozen:
        # A kind of which no layer has anything is fetched by nobody.
        tiers["frozen"] = layout.frozen_tier if any(stack.frozen_parts) else "device"
        for kind in ("params", "grads", "opt_state") if not any(stack.parts) else ():
            tiers[kind] = "device"
    return tiers


def early_ends(records: StateRecords, runs: Sequence[LayerRun]) -> tuple[int, ...]:
    """Return leaves that the head alone uses, as many as are together no larger than a layer's record.

    Their gradients are complete before backward of the layers. In its first tick no layer's record waits to be stored, where an
    update in backward stores late.
    """
    layout = records.layout
    if layout.config.update != "in_backward" or not _stores_late(records, runs[-1]):
        return ()
    most, early = _stored_bytes(records, layout.stacks[-1].blocks), list[int]()
    for i in _head_leaves(layout):
        if _stored_bytes(records, (*early, i)) <= most:
            early.append(i)
    return tuple(early)


def head_pieces(records: StateRecords, runs: Sequence[LayerRun], update: RecordUpdate | None) -> dict[int, Pieces]:
    """Return how leaves are cut that the head alone uses, and that are not among `early_ends`: all into equally many pieces.

    Each of the first ticks of backward updates one piece beside its layer, and the next one stores it. So there are at most as
    many as there are layers, and none is larger than a layer's record.
    """
    early = early_ends(records, runs)
    if update is None or records.layout.config.update != "in_backward" or not _stores_late(records, runs[-1]):
        return {}
    most, cut = _stored_bytes(records, runs[-1].stack.blocks), dict[int, Pieces]()
    for i in sorted(set(_head_leaves(records.layout)) - set(early), key=lambda i: -_stored_bytes(records, (i,))):
        pieces, others = update.pieces(i, runs[-1].num_layers), {some.count for some in cut.values()}
        if pieces is None or _stored_bytes(records, (i,)) > most * pieces.count:
            continue
        if others <= {pieces.count}:
            cut[i] = pieces
    return cut


def _head_leaves(layout: Layout) -> list[int]:
    """Return the trained leaves that the head alone uses."""
    tree = jax.tree.unflatten(jax.tree.structure(layout.abstract_params), range(len(layout.leaves)))
    return jax.tree.leaves(tree["head"])


def cut_ends(
    records: StateRecords, runs: Sequence[LayerRun], update: RecordUpdate | None, pieces: Mapping[int, Pieces]
) -> dict[int, int]:
    """Return in how many pieces leaves are updated that take longer to cross the link than a layer's record, by leaf.

    They are none of `head_pieces`, which `pieces` are.

    The last layer's record is stored before them, and the first piece is then loaded alone. Beside that record a leaf of its
    size is loaded as a whole. A larger one would let the link wait.
    """
    layout, in_backward = records.layout, records.layout.config.update == "in_backward"
    run = runs[0 if in_backward else -1]
    if update is None or layout.config.update_on == "host" or not _stores_late(records, run):
        return {}
    most, cut, early = _stored_bytes(records, run.stack.blocks), dict[int, int](), early_ends(records, runs)
    for i in (i for i in layout.ends if i not in (*early, *pieces)):
        some = update.pieces(i)
        if some is not None and _stored_bytes(records, (i,)) * (1 - 1 / some.count) > most:
            cut[i] = some.count
    return cut


def _stored_bytes(records: StateRecords, part: Sequence[int]) -> int:
    """Return the bytes that an update of some leaves stores off the device, of one record."""
    sizes = record_bytes(records, part)
    return sizes["opt_state"] + (sizes["params"] if any(records.params[i].is_away for i in part) else 0)


def _stores_late(records: StateRecords, run: LayerRun) -> bool:
    """Tell whether a run's record is stored a tick after it was updated, while the next one is loaded.

    Only copy engines move both directions at once. An array of a record is loaded while another one is stored, so that there
    must be two. Records on disk are moved by the engine, which has its own order. Parameters that are fetched in the tick that
    takes them are read before its products, and there is nothing to store them beside. An update would have to load parameters
    that are their own masters, too, where they rest off the device.
    """
    stack, tiers, config = run.stack, _tiers(records, run), records.layout.config
    num_arrays = len(records.opt_records(stack.blocks))
    if config.update == "in_backward":
        possible = config.prefetch_distance > 0 or tiers["params"] == "device"
    else:
        possible = config.update_on != "host" and (records.layout.has_master or tiers["params"] == "device")
    return (
        records.linear_slices
        and tiers["opt_state"] == "pinned_host"
        and "nvme" not in tiers.values()
        and possible
        and not stack.device_layers
        and not stack.groups
        and run.num_layers > 1
        and num_arrays > 1
    )
