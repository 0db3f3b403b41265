"""The records of a step: bytes of each, and all operations on them.

The bytes of a model's state follow `zerojax.formulas.memory`: b bytes per parameter in kind k,
sharded over N devices if its stage says so. A record is one layer, or embedding and head together;
the operations on it are those of `zerojax.streamed.run_schedule`, which the step itself uses.
"""

import dataclasses
import math
from collections.abc import Sequence

from host_offload.schedule import (
    LATE_UNSTACKED,
    UNSTACKED_PIECES,
    Schedule,
    StepPlan,
    UnstackedLeaf,
    UnstackedMove,
    build_unstacked,
)
from zerojax.config import (
    ZeroConfig,
    frozen_tier,
    reduces_once,
    stored_grads_dtype,
    streams,
    sums_in_float32,
    updates_by_parts,
)
from zerojax.costs.layer_runs import LayerRun
from zerojax.costs.workload import Grid, StackWork, Workload
from zerojax.formulas import state_bytes
from zerojax.optim import LEAST_BYTES, MOST_PIECES
from zerojax.precision import PRECISIONS
from zerojax.sharding import STAGES
from zerojax.state import host_update
from zerojax.streamed import RunFacts, run_schedule

_RESIDENT = {
    "params": "device",
    "grads": "device",
    "opt_state": "device",
    "update_on": "device",
    "prefetch_distance": 0,
    "gather_ahead": False,
    "opt_state_device_fraction": 0.0,
    "delayed_update": False,
    "grads_dtype": None,
}
"""Config fields for the schedule of a step whose layers stay on the device."""


class StepRecords:
    """Bytes of a config's records on one device, and the operations of its step.

    Attributes:
      workload: workload of the model.
      config: config of the step.
      grid: sizes of the mesh axes.
      shares_cores: whether the devices are threads of a CPU.
      sharded: which kinds of state the config's stage shards.
      is_streamed: whether the step streams its layers.
      repeats: number of microbatches that a resident step runs one after another; 1 if streamed.
      per_param: bytes per parameter, by kind.
      opt_state_bytes: bytes per parameter in a record of optimizer state, including the master.
      has_master: whether parameters have float32 masters.
      summed_itemsize: bytes per element of a gradient before it is stored.
      grads_in_float32: whether gradients are reduced in float32.
      num_reductions: number of times that gradients are reduced per step.
      updates_on_host: whether the optimizer runs on the host.
      updates_in_backward: whether layers are updated during backward.
      updates_in_forward: whether layers are updated in the next step's forward.
      updates_by_record: whether layers are updated one at a time.
      loads_opt_state: whether optimizer state is loaded to the device and stored again.
    """

    def __init__(
        self, workload: Workload, config: ZeroConfig, grid: Grid, shares_cores: bool
    ) -> None:
        """Derive the sizes of a config's records, for a workload on one device of the grid."""
        self.workload = workload
        self.config = config
        self.grid = grid
        self.shares_cores = shares_cores
        self.sharded = STAGES[config.stage]
        self.is_streamed = workload.is_layered and streams(config)
        self.repeats = 1 if self.is_streamed else config.num_microbatches

        self.per_param = state_bytes(
            config.precision, moments=8, grads_dtype=stored_grads_dtype(config)
        )
        moments = workload.moment_bytes * (0.5 if config.moments == "bfloat16" else 1.0)
        self.opt_state_bytes = self.per_param.master + moments
        self.has_master = PRECISIONS[config.precision].has_master

        self.summed_itemsize = 4 if sums_in_float32(config) else self.per_param.params
        is_reduced_once = reduces_once(config)
        is_float32 = sums_in_float32(config) and config.reduce_dtype == "float32"
        self.grads_in_float32 = is_float32 or is_reduced_once
        self.num_reductions = 1 if is_reduced_once else config.num_microbatches

        self.updates_on_host = config.update_on == "host"
        self.updates_in_backward = config.update == "in_backward"
        self.updates_in_forward = config.update == "in_forward"
        self.updates_by_record = updates_by_parts(config)
        self.loads_opt_state = config.opt_state != "device" and not self.updates_on_host

    @property
    def reduced_itemsize(self) -> int:
        """Bytes per element of the gradients that are reduced."""
        return 4 if self.grads_in_float32 else self.per_param.params

    @property
    def is_gathered(self) -> bool:
        """Whether layers are gathered into buffers of their own, next to their shards."""
        is_split = self.sharded.params and self.grid.fsdp > 1
        return is_split or self.config.params != "device"

    @property
    def uses_copy_engines(self) -> bool:
        """Whether copy engines move both directions of the link at the same time."""
        return not self.shares_cores

    @property
    def updated_unstacked(self) -> int:
        """Parameters that are updated outside the layers: all parameters of a plain Model."""
        workload = self.workload
        return workload.unstacked_elements if workload.is_layered else workload.elements

    def share(self, is_sharded: bool) -> float:
        """Return the fraction of a kind that one device stores."""
        return 1 / self.grid.fsdp if is_sharded else 1.0

    def sizes(self, elements: float, frozen: float = 0.0) -> dict[str, int]:
        """Return the bytes of a record by kind, as `host_offload.schedule.build_schedule` takes it.

        Args:
          elements: number of trainable parameters in the record.
          frozen: bytes of its frozen parameters.
        """
        per_param = self.per_param
        updated = elements * self.share(self.sharded.opt_state)
        params_on_device = self.config.params == "device"
        in_forward = self.config.update == "in_forward"
        sizes = {
            "params": elements * per_param.params * self.share(self.sharded.params),
            "gathered": elements * per_param.params + frozen if self.is_gathered else 0,
            "derivative": elements * self.reduced_itemsize,
            "grads": updated * per_param.grads,
            "opt_state": updated * self.opt_state_bytes,
            "frozen": frozen * self.share(self.sharded.params),
            "handed": updated * per_param.grads,
            "weights": 4 * updated if params_on_device and not self.has_master else 0,
            "made": updated * per_param.params if params_on_device or in_forward else 0,
        }
        return {kind: int(num_bytes) for kind, num_bytes in sizes.items()}

    def grads_shard_bytes(self, elements: float) -> int:
        """Return the bytes of the stored gradients of some parameters."""
        return int(elements * self.per_param.grads * self.share(self.sharded.opt_state))

    def num_device_layers(self, stack: StackWork) -> int:
        """Return the number of a stack's layers whose optimizer state stays on the device.

        The fraction of layers is rounded down.
        """
        return int(round(self.config.opt_state_device_fraction * stack.num_layers, 9))

    # --- operations -------------------------------------------------------------------------------

    def list_operations(self, runs: Sequence[LayerRun], tiles: int = 1) -> StepPlan:
        """Return all operations of the step.

        Args:
          runs: runs of layers, first layer first.
          tiles: number of tiles in which the layers' MLPs run.
        """
        leaf = self._unstacked_leaf()
        # The last run of backward, or of the update, may update the unstacked leaves as well.
        last = 0 if self.updates_in_backward else len(runs) - 1
        schedules = dict[str, Schedule]()
        for n, run in enumerate(runs):
            overlapped = list[UnstackedMove]()
            if n == last and leaf.tiers["opt_state"] != "device":
                overlapped.append(self._overlapped_move(leaf, run.stack.elements))
            name = str(n) if len(runs) > 1 else ""
            schedules[name] = self._schedule(run, tiles, overlapped)

        last_schedule = list(schedules.values())[last]
        stores_late = any(phase.stores_late for phase in last_schedule.phases)
        leaves = [leaf._replace(is_beside=stores_late), *self._frozen_leaves()]
        host = host_update(self.config, self.has_master)
        return StepPlan(schedules, build_unstacked(leaves, self.has_master, host))

    def _schedule(self, run: LayerRun, tiles: int, overlapped: Sequence[UnstackedMove]) -> Schedule:
        """Return the schedule of a run of layers.

        Args:
          run: run of layers.
          tiles: number of tiles in which the layers' MLPs run.
          overlapped: moves of unstacked leaves that are updated during the run.
        """
        stack = run.stack
        config = self.config
        num_device_layers = 0
        activations = "device"
        frozen = "device"
        if self.is_streamed:
            num_device_layers = max(0, self.num_device_layers(stack) - run.first)
            activations = run.saved.tier if run.saved.away_bytes else "device"
            frozen = frozen_tier(config) if stack.frozen_bytes else "device"
        else:
            config = dataclasses.replace(config, **_RESIDENT)
        facts = RunFacts(
            num_layers=run.num_layers,
            device_layers=min(num_device_layers, run.num_layers),
            activations=activations,
            frozen=frozen,
            num_tiles={"mlp": tiles} if tiles > 1 else {},
            num_arrays=self.has_master + 2 * bool(self.workload.moment_bytes),
            has_master=self.has_master,
            both_ways=self.uses_copy_engines,
            is_split=self.grid.fsdp > 1,
        )
        untiled = stack.elements - (stack.tiled if tiles > 1 else 0)
        sizes = self.sizes(untiled, stack.frozen_bytes) | {"activations": run.saved.away_bytes}
        tile_sizes = self.sizes(stack.tiled / tiles)
        return run_schedule(config, facts, sizes, tile_bytes=[tile_sizes], unstacked=overlapped)

    def _unstacked_leaf(self) -> UnstackedLeaf:
        """Return embedding and head as one leaf; for a plain Model, the full model as one leaf."""
        config = self.config
        is_away = self.updates_on_host or self.loads_opt_state
        tiers = {"params": config.params, "opt_state": config.opt_state if is_away else "device"}
        params = self.sizes(self.workload.unstacked_elements)["params"]
        sizes = self.sizes(self.updated_unstacked) | {"params": params}

        # If copy engines move it, its smallest array is cut into pieces of at least `LEAST_BYTES`.
        is_cut = (
            self.uses_copy_engines
            and config.opt_state == "pinned_host"
            and not self.updates_on_host
            and self.workload.is_layered
        )
        num_pieces = 1
        if is_cut:
            array_bytes = sizes["opt_state"] * 4 // max(1, int(self.opt_state_bytes))
            num_pieces = max(1, min(MOST_PIECES, array_bytes // LEAST_BYTES))
        return UnstackedLeaf("unstacked", tiers, sizes, num_pieces=num_pieces)

    def _frozen_leaves(self) -> list[UnstackedLeaf]:
        """Return the frozen part of embedding and head as a leaf, or nothing."""
        size = self.workload.unstacked_frozen_bytes * self.share(self.sharded.params)
        if not size:
            return []
        tiers = {"frozen": frozen_tier(self.config)}
        return [UnstackedLeaf("frozen", tiers, {"frozen": int(size)}, frozen=True)]

    def _overlapped_move(self, leaf: UnstackedLeaf, layer_elements: float) -> UnstackedMove:
        """Return the move of embedding and head while records of layers are stored late.

        They are cut into pieces if they are larger than a layer.
        """
        params_away = leaf.tiers["params"] != "device"
        opt_state = leaf.sizes["opt_state"]
        stored = opt_state
        loaded = opt_state
        if params_away:
            stored += leaf.sizes["params"]
        if params_away and not self.has_master:
            loaded += leaf.sizes["params"]
        layer_opt_state = self.sizes(layer_elements)["opt_state"]
        count = min(MOST_PIECES, math.ceil(opt_state / max(1, layer_opt_state)))
        if count <= 1:
            return UnstackedMove(LATE_UNSTACKED, (stored,), (), (loaded,))
        return UnstackedMove(UNSTACKED_PIECES, (stored // count,), (count,), (loaded // count,))
