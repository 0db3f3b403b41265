"""Compute the bytes of records, and a step's work on leaves, for `host_offload.schedule`."""

from collections.abc import Container, Mapping, Sequence

from jax.sharding import Mesh

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
from zerojax.sharding import STAGES, local_elements, num_zero_shards, stored_spec
from zerojax.state.leaves import Leaf
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
    stage = STAGES[layout.config.stage]
    on_device = layout.config.params == "device"

    def count(leaf_ids: Sequence[int], sharded: bool, itemsize: int | None = None) -> int:
        leaves = [layout.all_leaves[i] for i in leaf_ids]
        return sum(_leaf_bytes(leaf, sharded, records.mesh, itemsize) for leaf in leaves)

    gathered = count(leaf_ids, False)
    gathered_frozen = count(frozen, False)
    # Encoded weights are unsharded twice: as gathered, and decoded.
    for i in frozen:
        decoded = layout.all_leaves[i].decodes
        if decoded is not None:
            gathered_frozen += _leaf_bytes(decoded, False, records.mesh)

    grads = 0
    derivative = count(leaf_ids, False, 4) if layout.reduces_in_float32 else gathered
    for i in leaf_ids:
        grads += count([i], stage.opt_state, layout.grad_dtype(i).itemsize)
        # A gradient that is stored in another dtype is in memory twice.
        if layout.summed_dtype(i) != layout.grad_dtype(i):
            derivative += count([i], stage.opt_state, layout.summed_dtype(i).itemsize)
    sizes = {
        "params": count(leaf_ids, stage.params),
        "gathered": gathered + gathered_frozen if is_gathered(records) else 0,
        "derivative": derivative,
        "grads": grads,
        "opt_state": _opt_state_bytes(records, leaf_ids),
        "handed": grads,
        "weights": 0,
        "made": 0,
    }
    if on_device or layout.config.update == "in_forward":
        sizes["made"] = count(leaf_ids, stage.opt_state)
    if on_device and not layout.has_master:
        sizes["weights"] = count(leaf_ids, stage.opt_state, 4)
    if layout.frozen:
        sizes["frozen"] = count(frozen, stage.params)
    grad_records = [] if grads_on_disk is None else [grads_on_disk]
    return sizes | _on_disk(records, leaf_ids, frozen, grad_records)


def _leaf_bytes(leaf: Leaf, sharded: bool, mesh: Mesh, itemsize: int | None = None) -> int:
    """Return the bytes per device of one record of a leaf.

    Args:
      leaf: the leaf.
      sharded: whether the record is split over the ZeRO axis.
      mesh: the device mesh.
      itemsize: bytes of an element; None for the leaf's dtype.
    """
    spec = stored_spec(leaf.spec, sharded)[leaf.lead :]
    return local_elements(leaf.record_shape, spec, mesh) * (itemsize or leaf.dtype.itemsize)


def _opt_state_bytes(records: StateRecords, leaf_ids: Sequence[int]) -> int:
    """Return the bytes per device of a record's masters and optimizer state, which move together.

    The state counts only if the optimizer runs by record.
    """
    layout = records.layout
    num_bytes = 0
    if layout.has_master:
        sharded = STAGES[layout.config.stage].opt_state
        for i in leaf_ids:
            num_bytes += _leaf_bytes(layout.leaves[i], sharded, records.mesh, 4)
    if layout.updates_by_record:
        opt_map = layout.opt_map
        for j in opt_map.list_state_leaves(leaf_ids):
            state_leaf = opt_map.leaves[j]
            # The shape of one record: a state leaf has the leading dims of the parameter that it
            # mirrors.
            shape = state_leaf.shape[layout.leaves[opt_map.owner(j)].lead :]
            elements = local_elements(shape, records.opt_record(j).spec, records.mesh)
            num_bytes += elements * state_leaf.dtype.itemsize
    return num_bytes


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
    if layout.encodings:
        return True
    fetched = any(record.is_away for record in (*records.params, *records.frozen))
    return STAGES[layout.config.stage].params and (num_zero_shards(layout.mesh) > 1 or fetched)


def stored_bytes(records: StateRecords, leaf_ids: Sequence[int]) -> int:
    """Return the bytes per device that an update of one record stores off the device.

    Args:
      records: how the state is stored.
      leaf_ids: indices of the trainable leaves.
    """
    sizes = record_bytes(records, leaf_ids)
    num_bytes = sizes["opt_state"]
    if any(records.params[i].is_away for i in leaf_ids):
        num_bytes += sizes["params"]
    return num_bytes


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
        away = [spec for spec in specs if spec.is_away]
        if not away:
            return "device"
        return away[0].tier if away[0].disk_records is None else "nvme"

    layout = records.layout
    leaves = list[UnstackedLeaf]()
    for i in (*layout.unstacked, *layout.frozen_unstacked):
        leaf = layout.all_leaves[i]
        weight = records.weight(i)
        size = local_elements(leaf.shape, weight.spec, records.mesh) * leaf.dtype.itemsize
        if leaf.frozen:
            name = str(i)
            if weight.disk_records is not None:
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
    in_forward = config.update == "in_forward"
    return HostUpdate(
        stashes=config.update != "in_backward"
        and (config.grads != "device" or config.delayed_update or in_forward),
        is_delayed=config.delayed_update,
        takes_weights=on_device and not has_master,
        gives_params=on_device or in_forward,
        in_forward=in_forward,
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
