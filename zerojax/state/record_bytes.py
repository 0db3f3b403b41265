"""Compute the bytes of records, and a step's work on leaves, for `host_offload.schedule`."""

from collections.abc import Callable, Container, Mapping, Sequence

from host_offload.schedule import (
    EVERY_LEAF,
    ON_DISK,
    HostUpdate,
    Loop,
    Op,
    Phase,
    Record,
    StepPlan,
    UnstackedLeaf,
    build_unstacked,
)
from zerojax.config import ZeroConfig
from zerojax.sharding import FSDP, STAGES, LeafSpec, Spec, local_elements, stored_spec
from zerojax.state.records import RecordSpec
from zerojax.state.state_records import StateRecords


def record_bytes(
    records: StateRecords,
    leaf_ids: Sequence[int],
    frozen: Sequence[int] = (),
    grads_on_disk: RecordSpec | None = None,
) -> dict[str, int]:
    """Return the bytes per device of one layer's records, for `host_offload.build_schedule`.

    Activations are not counted: their shapes are known only with a batch.

    Args:
      records: how the state is stored.
      leaf_ids: indices of the trainable leaves of the records.
      frozen: indices of the frozen leaves of the records.
      grads_on_disk: how one of the gradients is stored, if it is on disk.

    Returns:
      Bytes per device by name, such as "params", "opt_state" and "params_on_disk".
    """
    layout = records.layout
    mesh = records.mesh
    stage = STAGES[records.layout.config.stage]
    on_device = layout.config.params == "device"

    def num_bytes(
        leaf_ids: Sequence[int],
        select_spec: Callable[[LeafSpec], Spec],
        itemsize: int | None = None,
    ) -> int:
        leaves = [layout.all_leaves[i] for i in leaf_ids]
        elements = [
            local_elements(leaf.record_shape, select_spec(leaf.spec)[leaf.lead :], mesh)
            for leaf in leaves
        ]
        return sum(
            n * (itemsize or leaf.dtype.itemsize) for n, leaf in zip(elements, leaves, strict=True)
        )

    # Masters are float32, and are stored in one record with the optimizer state.
    if layout.has_master:
        opt_state = num_bytes(leaf_ids, lambda s: stored_spec(s, stage.opt_state), 4)
    else:
        opt_state = 0
    if layout.updates_by_record:
        opt_map = layout.opt_map
        for j in opt_map.list_state_leaves(leaf_ids):
            # The shape of one record: a state leaf has the leading dims of the parameter that it
            # mirrors.
            shape = opt_map.leaves[j].shape[layout.leaves[opt_map.owner(j)].lead :]
            opt_state += (
                local_elements(shape, records.opt_record(j).spec, mesh)
                * opt_map.leaves[j].dtype.itemsize
            )
    whole, whole_frozen = (num_bytes(some, lambda s: s.base) for some in (leaf_ids, frozen))
    whole_grads = num_bytes(leaf_ids, lambda s: s.base, 4) if layout.reduces_in_float32 else whole
    # Encoded weights are unsharded twice: as gathered, and decoded.
    for leaf in (layout.all_leaves[i].decodes for i in frozen):
        if leaf is not None:
            elements = local_elements(leaf.record_shape, leaf.spec.base[leaf.lead :], mesh)
            whole_frozen += elements * leaf.dtype.itemsize
    shards, frozen_shards = (
        num_bytes(some, lambda s: stored_spec(s, stage.params)) for some in (leaf_ids, frozen)
    )
    of_state = lambda s: stored_spec(s, stage.opt_state)  # noqa: E731
    grads = sum(num_bytes([i], of_state, layout.grad_dtype(i).itemsize) for i in leaf_ids)
    sizes = {
        "params": shards,
        "gathered": whole + whole_frozen if is_gathered(records) else 0,
        "derivative": whole_grads,
        "grads": grads,
        "opt_state": opt_state,
        "handed": grads,
        "weights": num_bytes(leaf_ids, of_state, 4) if on_device and not layout.has_master else 0,
        "made": num_bytes(leaf_ids, of_state) if on_device else 0,
    }
    sizes |= {"frozen": frozen_shards} if layout.frozen else {}
    return sizes | _on_disk(
        records, leaf_ids, frozen, [] if grads_on_disk is None else [grads_on_disk]
    )


def _on_disk(
    records: StateRecords,
    leaf_ids: Sequence[int],
    frozen: Sequence[int],
    grads: Sequence[RecordSpec],
) -> dict[str, int]:
    """Return the bytes of the records' files on disk, by "<kind>_on_disk", without absent kinds."""
    leaves_by_kind = {
        "params": [records.params[i] for i in leaf_ids],
        "frozen": [records.weight(i) for i in frozen],
        "opt_state": records.opt_records(leaf_ids),
        "grads": grads,
    }
    sizes = dict[str, int]()
    for kind, leaves in leaves_by_kind.items():
        # All leaves of a record are in one file.
        for leaf in leaves[:1]:
            if leaf.disk_records is not None:
                sizes[kind + ON_DISK] = leaf.disk_records.num_bytes
    return sizes


def is_gathered(records: StateRecords) -> bool:
    """Return whether layers are held unsharded in addition to their shards.

    They are if they are gathered, fetched or decoded.
    """
    layout = records.layout
    fetched = any(record.is_away for record in (*records.params, *records.frozen))
    return bool(layout.encodings) or (
        STAGES[layout.config.stage].params and (layout.mesh.shape[FSDP] > 1 or fetched)
    )


def stored_bytes(records: StateRecords, leaf_ids: Sequence[int]) -> int:
    """Return the bytes per device that an update of one record stores off the device.

    Args:
      records: how the state is stored.
      leaf_ids: indices of the trainable leaves.
    """
    sizes = record_bytes(records, leaf_ids)
    return sizes["opt_state"] + (
        sizes["params"] if any(records.params[i].is_away for i in leaf_ids) else 0
    )


def loaded_bytes(records: StateRecords, leaf_ids: Sequence[int]) -> int:
    """Return the bytes per device that an update of one record loads.

    Parameters are loaded only if they are their own masters.

    Args:
      records: how the state is stored.
      leaf_ids: indices of the trainable leaves.
    """
    if records.layout.has_master:
        return record_bytes(records, leaf_ids)["opt_state"]
    return stored_bytes(records, leaf_ids)


def unstacked_leaves(
    records: StateRecords, beside: Container[int], pieces: Mapping[int, int]
) -> list[UnstackedLeaf]:
    """Return the unstacked leaves, as `host_offload.schedule.build_unstacked` takes them.

    Args:
      records: how the state is stored.
      beside: indices of trainable leaves whose update is overlapped with the layers.
      pieces: number of pieces in which the device updates each other leaf, by leaf index; 1 for a
        missing leaf.
    """

    def find_tier(specs: Sequence[RecordSpec]) -> str:
        return next(
            (r.tier if r.disk_records is None else "nvme" for r in specs if r.is_away), "device"
        )

    layout = records.layout
    leaves = list[UnstackedLeaf]()
    for i in (*layout.unstacked, *layout.frozen_unstacked):
        leaf = layout.all_leaves[i]
        weight = records.weight(i)
        size = local_elements(leaf.shape, weight.spec, records.mesh) * leaf.dtype.itemsize
        if leaf.frozen:
            if weight.disk_records is None:
                name = str(i)
            else:
                name = weight.disk_records.kind.partition(".")[2]
            sizes = {"frozen": size} | _on_disk(records, (), (i,), ())
            leaves.append(UnstackedLeaf(name, {"frozen": find_tier([weight])}, sizes, frozen=True))
            continue
        tiers = {"params": find_tier([weight]), "opt_state": find_tier(records.opt_records((i,)))}
        sizes = record_bytes(records, (i,)) | {"params": size}
        leaves.append(
            UnstackedLeaf(str(i), tiers, sizes, num_pieces=pieces.get(i, 1), is_beside=i in beside)
        )
    return leaves


def gathered_unstacked(records: StateRecords) -> dict[str, int]:
    """Return the bytes per device of the gathered parameters of the embedding and the head.

    They are 0 if the parameters are not gathered.
    """
    layout = records.layout
    sizes = {"embed": 0, "head": 0}
    for unit in sizes:
        trained = [i for i in layout.unstacked if layout.all_leaves[i].path[0].key == unit]
        frozen = [i for i in layout.frozen_unstacked if layout.all_leaves[i].path[0].key == unit]
        sizes[unit] = record_bytes(records, trained, frozen)["gathered"]
    return sizes


def host_update(config: ZeroConfig, has_master: bool) -> HostUpdate | None:
    """Return how callbacks update records on the host, or None if the device updates them.

    Args:
      config: configuration of the program.
      has_master: whether parameters have float32 masters.
    """
    if config.update_on != "host":
        return None
    on_device = config.params == "device"
    return HostUpdate(
        stashes=config.update != "in_backward"
        and (config.grads != "device" or config.delayed_update),
        is_delayed=config.delayed_update,
        takes_weights=on_device and not has_master,
        gives_params=on_device,
    )


def steps_of_leaves(records: StateRecords, pieces: Mapping[int, int] | None) -> StepPlan:
    """Return the unstacked part of a resident step: its update, and the embedding and head.

    Args:
      records: how the state is stored.
      pieces: number of pieces in which the device updates each leaf, by leaf; 1 where a leaf is
        missing. None: the whole tree is updated at once, on the device.
    """
    layout = records.layout
    host = host_update(layout.config, layout.has_master)
    names = {str(i): leaf.name for i, leaf in enumerate(layout.all_leaves)}
    phases = build_unstacked(unstacked_leaves(records, (), pieces or {}), layout.has_master, host)
    if pieces is None:
        tree = Op("update", Record("opt_state", EVERY_LEAF), 0, "compute")
        phases["unstacked"] = Phase(name="unstacked", loops=(Loop(0, 1, 1, (tree,)),))
    if layout.num_layers is None:
        # A plain Model has neither embedding nor head.
        phases = {"unstacked": phases["unstacked"]}
    return StepPlan({}, phases, names=names, num_microbatches=layout.config.num_microbatches)
