"""Seconds of layers, embedding and head, and bytes of collectives, for a config on a machine."""

from zerojax.costs.lane_times import LayerWork, UnstackedWork
from zerojax.costs.layer_runs import LayerRun
from zerojax.costs.step_records import StepRecords
from zerojax.machines import Machine


class StepWork:
    """Seconds and collectives of a config's step on one device.

    Attributes:
      records: records of the step.
      machine: machine whose rates are used.
    """

    def __init__(self, records: StepRecords, machine: Machine) -> None:
        """Look up the rate of collectives.

        Raises:
          ValueError: the machine lacks this rate, and the step needs it.
        """
        self.records = records
        self.machine = machine
        self._network = self._network_rate()

    def _network_rate(self) -> float:
        """Return the bytes per second of a collective over `fsdp` and `data`.

        The rate is infinite if there is no such collective.
        """
        grid = self.records.grid
        if grid.batch_shards == 1 and grid.tensor == 1:
            return float("inf")
        return self._ring_rate(grid.devices)

    def _ring_rate(self, num_devices: int) -> float:
        """Return the bytes per second of a ring over neighbours, in one node if they fit."""
        fits_node = num_devices <= self.machine.devices_per_node
        return self.machine.need("network_in_node" if fits_node else "network_between_nodes")

    # --- seconds ----------------------------------------------------------------------------------

    def layer_work(self, run: LayerRun) -> LayerWork:
        """Return the seconds of one layer of a run."""
        records = self.records
        stack = run.stack
        elements = stack.elements
        updated = elements if records.workload.is_layered else 0  # a plain Model is unstacked
        sent = 0.0
        if records.grid.tensor > 1:
            rate = self._ring_rate(records.grid.tensor)
            sent = stack.sent.get(run.saved.mode, 0.0) / rate
        gather = 0.0
        if records.sharded.params:
            gather = self._gather(elements, stack.frozen_bytes)
        repeats = records.repeats
        return LayerWork(
            forward=(stack.forward + sent / 3) / repeats,
            backward=(run.saved.backward + 2 * sent / 3) / repeats,
            update=self._update(updated),
            gather=gather,
            reduce=self._reduce(elements) / repeats,
            regather=self._regather(elements),
            host=self._host_update(updated),
        )

    def unstacked_work(self) -> UnstackedWork:
        """Return the seconds of embedding and head; for a plain Model, its full update."""
        records = self.records
        workload = records.workload
        elements = workload.unstacked_elements
        repeats = records.repeats
        gather = 0.0
        if records.sharded.params:
            num_gathers = records.config.num_microbatches
            both = self._gather(elements, workload.unstacked_frozen_bytes)
            gather = both / 2 * num_gathers / repeats
        return UnstackedWork(
            embed=workload.embed / repeats,
            head=workload.head / repeats,
            embed_backward=workload.embed_backward / repeats,
            update=self._update(records.updated_unstacked),
            gather=gather,
            reduce=self._reduce(elements) / repeats,
            host=self._host_update(records.updated_unstacked),
        )

    def _gather(self, elements: float, frozen_bytes: float = 0.0) -> float:
        """Return the seconds of an all_gather of trainable parameters and frozen bytes."""
        n = self.records.grid.fsdp
        num_bytes = elements * self.records.per_param.params + frozen_bytes
        return num_bytes * (n - 1) / n / self._network

    def _regather(self, elements: float) -> float:
        """Return the seconds of the all_gather after an update.

        It is needed if parameters are unsharded and their update is sharded.
        """
        sharded = self.records.sharded
        return self._gather(elements) if sharded.opt_state and not sharded.params else 0.0

    def _reduce(self, elements: float) -> float:
        """Return the seconds of reducing gradients in one step."""
        return sum(self._reduced_bytes(elements).values()) / self._network

    def _update(self, elements: float) -> float:
        """Return the seconds in which the device updates `elements` parameters."""
        records = self.records
        if records.updates_on_host:
            return 0.0
        return elements * records.share(records.sharded.opt_state) * records.workload.update

    def _host_update(self, elements: float) -> float:
        """Return the seconds of the host update of `elements` parameters."""
        records = self.records
        if not records.updates_on_host:
            return 0.0
        per_param = records.per_param
        # The kernel reads and writes masters and moments, reads gradients, and writes parameters in
        # 16 bits. Without masters, it reads and writes the parameters.
        if records.has_master:
            touched = 2 * records.opt_state_bytes + per_param.grads + per_param.params
        else:
            touched = 2 * (records.opt_state_bytes + per_param.params) + per_param.grads
        updated = elements * records.share(records.sharded.opt_state)
        rate = self.machine.need("host_kernel") / self.machine.devices_per_node
        return updated * touched / rate

    # --- collectives ------------------------------------------------------------------------------

    def collectives(self) -> dict[str, float]:
        """Return the bytes that a device sends per step, by collective."""
        records = self.records
        workload = records.workload
        n = records.grid.fsdp
        sent = {"all_gather": self._gathered_bytes() * (n - 1) / n}
        sent |= self._reduced_bytes(workload.elements)
        sent["tensor"] = sum(
            stack.num_layers * stack.sent.get("save", 0.0) for stack in workload.stacks
        )
        return {name: num_bytes for name, num_bytes in sent.items() if num_bytes}

    def _gathered_bytes(self) -> float:
        """Return the bytes of all parameters that are gathered per step, over all gathers."""
        records = self.records
        workload = records.workload
        per_param = records.per_param
        if not records.sharded.params:
            return workload.elements * per_param.params if records.sharded.opt_state else 0.0
        layers = sum(
            stack.num_layers * (stack.elements * per_param.params + stack.frozen_bytes)
            for stack in workload.stacks
        )
        unstacked = workload.unstacked_elements * per_param.params + workload.unstacked_frozen_bytes
        # In forward and in backward; a streamed step gathers a layer once for all microbatches.
        return 2 * (layers * records.repeats + unstacked * records.config.num_microbatches)

    def _reduced_bytes(self, elements: float) -> dict[str, float]:
        """Return the bytes that a device sends to reduce `elements` gradients, by collective.

        They are those of all microbatches. Shards are scattered over `fsdp` and summed over `data`.
        """
        records = self.records
        n = records.grid.fsdp
        d = records.grid.data
        reduced = elements * records.reduced_itemsize * records.num_reductions
        if not records.sharded.opt_state:
            return {"all_reduce": 2 * reduced * (n * d - 1) / (n * d)}
        return {
            "reduce_scatter": reduced * (n - 1) / n,
            "all_reduce": 2 * reduced / n * (d - 1) / d,
        }
