"""One program's records on disk while it runs: the folder, the buffers and the threads behind a `DiskLayout`.

The folder and the threads come when the program is built (`claim`), files and buffers with its first state (`open`), those of
records that live inside a step with the first batch of a shape (`begin`).

With the optimizer on the host, what it updates goes disk -> buffer -> disk, in one buffer, and never to the device.

A fetch by the schedule's `distance` is one from buffers to the device; from disk to buffers the engine reads as many records
again ahead of that.

Each process has the records of its own devices, in a folder of its own. What fails in one is raised in all.
"""

import contextlib
import itertools
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from host_offload.device import available_bytes
from host_offload.disk import DirectIo, Snapshot, Store, SwapError, SwapFolder, TensorstoreIo, tune
from host_offload.engine import DiskRecords, Engine
from host_offload.schedule import Move
from host_offload.trace import Recorder, check_path
from zerojax.runtime.processes import AllProcesses
from zerojax.state import DiskLayout, OnDisk

logger = logging.getLogger("zerojax")


class SwapSession:
    """Runs programs whose records are on disk.

    Attributes:
      disk: the records that were declared.
    """

    def __init__(self, disk: DiskLayout) -> None:
        self.disk, self.config, self.mesh, self.swap = disk, disk.config, disk.mesh, disk.swap
        self._folder: SwapFolder | None = None
        self._made: dict[str, DiskRecords] = {}  # kinds that have files and buffers, on every device
        self._recorder = Recorder(self.config.prefetch_distance)
        self._together = AllProcesses(self.mesh)
        self._running: list[OnDisk] | None = None
        self._numbers = itertools.count(1)
        self._snapshots: list[Snapshot] = []

    @property
    def generation(self) -> int:
        """Number of the state that is on disk; 0 where there is none."""
        return self.swap.generation

    @property
    def engine(self) -> Engine:
        """The engine of a claimed disk.

        Raises:
          RuntimeError: the program was closed.
        """
        if self.swap.engine is None:
            raise RuntimeError("this program is closed, and what it had on disk is gone: make a state by init")
        return self.swap.engine

    def claim(self) -> None:
        """Take the swap folder, and find out how it is read best.

        Raises:
          ValueError: it is not there, or is no folder.
          RuntimeError: the machine has no memory for the buffers.
          SwapError: it cannot be written to, or another program uses it; or another process failed at this.
        """
        if self._folder is not None:
            return
        try:
            self._together.do(self._claim)
        except Exception:
            self.close()
            raise

    def _claim(self) -> None:
        self._check_memory([records for records in self.disk.kinds.values() if records.lifetime == "state"])
        copies, pin = self.swap.copies, "cuda" if self.mesh.devices.flat[0].platform != "cpu" else "lock"
        self._folder = SwapFolder(self.config.swap_dir or "", jax.process_index())
        settings = tune(self._folder.path)
        io = DirectIo(settings) if self.config.io == "direct" else TensorstoreIo(settings)
        self.swap.engine = Engine(io, self.config.prefetch_distance, pin, copies)

    def open(self) -> None:
        """Make files and buffers for what was declared; a second time it starts anew.

        Raises:
          SwapError: the disk is too small, or as `claim`.
        """
        self.claim()
        self._end_last()
        self.swap.generation = self._together.least(1 + secrets.randbelow(1 << 30))
        self._together.do(self._renew)
        logger.info(
            "nvme tier: %.2f GiB in %s, %.1f MiB of buffers", self.disk.num_bytes / 2**30, self.config.swap_dir,
            self.engine.buffer_bytes / 2**20,
        )  # fmt: skip

    def _wait_for_snapshots(self) -> None:
        for snapshot in self._snapshots:
            snapshot.wait()

    def _renew(self) -> None:
        assert self._folder is not None
        self._wait_for_snapshots()
        failed = self.engine.failed
        self.engine.reset()
        if failed or not os.path.isdir(self._folder.path):  # files may be missing
            for kind in self.engine.kinds():
                self.engine.remove(kind)
            self._made.clear()
            self._folder.renew()
        self._make([records for records in self.disk.kinds.values() if records.lifetime == "state"])

    def _make(self, wanted: Sequence[DiskRecords]) -> None:
        """Make files and buffers of kinds that have none, or those of another batch."""
        assert self._folder is not None
        missing = [records for records in wanted if not records.has_files_of(self._made.get(records.kind))]
        if not missing:  # of all steps but the first of a shape: how much memory is left need not be asked
            return
        for kind in (records.kind for records in missing):  # what another batch has, or an attempt that failed has left
            self._made.pop(kind, None)
            if kind in self.engine.kinds():
                self.engine.remove(kind)
            if os.path.isdir(path := os.path.join(self._folder.path, kind)):
                shutil.rmtree(path)
        self._check_memory(missing)
        for records in missing:
            metadata = {
                "specs": [str(s) for s in records.specs],
                "mesh": dict(self.mesh.shape),
                "shapes": [list(a.shape) for a in records.shapes],
            }
            for rank in self.disk.ranks():
                store = Store(self._folder.path, records.kind, rank, records.num_layers, records.format, metadata)
                store.preallocate()
                up, down = records.slots
                shared = self.disk.shared_bytes(records)
                self.engine.add(records.kind, rank, store, in_place=records.in_place, up=up, down=down, shared_bytes=shared)
            self._made[records.kind] = records

    def _check_memory(self, wanted: Sequence[DiskRecords]) -> None:
        """Raise RuntimeError where the machine has less memory left than the buffers of some kinds take."""
        ranks, available = len(self.disk.ranks()), available_bytes()
        if available is None or (needed := ranks * self.disk.buffer_bytes(wanted)) <= available:
            return
        largest = max(wanted, key=lambda r: self.disk.buffer_bytes([r]))
        largest_bytes = self.disk.buffer_bytes([largest])
        raise RuntimeError(
            f"the nvme tier's buffers take {needed} bytes ({needed / 2**30:.1f} GiB), {largest_bytes} bytes x "
            f"{ranks} devices of them for {largest.kind}, and the machine has {available} bytes "
            f"({available / 2**30:.1f} GiB) available: lower prefetch_distance={self.config.prefetch_distance}, use more "
            "devices, or make layers smaller"
        )

    # --- around programs ---------------------------------------------------------------------------------------------------

    def begin(self, held: Any, moves: Sequence[Move], scratch: Sequence[DiskRecords] = (), name: str = "step") -> None:
        """Prepare for a program: make the records that live inside it, and read ahead.

        Args:
          held: the state that it reads, or part of one.
          moves: of the program, in order.
          scratch: kinds that the program writes before it reads them.
          name: of the program in a trace.

        Raises:
          ValueError: the state is not the one on disk.
          RuntimeError: the machine has no memory for the buffers.
          SwapError: an earlier step failed, or the disk is too small; or another process failed at this.
        """
        self._together.do(lambda: self._begin(held, moves, scratch, name))

    def _begin(self, held: Any, moves: Sequence[Move], scratch: Sequence[DiskRecords], name: str) -> None:
        self._end_last()
        self.engine.check()
        leaves = jax.tree.leaves(held, is_leaf=lambda node: isinstance(node, OnDisk))
        on_disk = [leaf for leaf in leaves if isinstance(leaf, OnDisk)]
        self._check_numbers(on_disk)
        self._make(scratch)
        self._recorder.begin(name, moves, self.engine)
        self.engine.begin(moves)
        self._running = on_disk

    def _check_numbers(self, leaves: Sequence[OnDisk]) -> None:
        """Raise ValueError for leaves of a state that is not the one on disk."""
        numbers = jax.device_get([leaf.token.addressable_data(0) for leaf in leaves])
        if wrong := {int(number[0]) for number in numbers} - {self.swap.generation}:
            there = f"number {self.swap.generation}" if self.swap.generation else "none, since a step was left in the middle"
            raise ValueError(
                f"this state (number {min(wrong)}) is not the one on disk ({there}): a program has one state there, which its "
                "last init or step returned; this one was overwritten by a later init or step, or is of another program. Go "
                "on with that state, or make one by init"
            )

    def _end_last(self) -> None:
        """Wait for the last program, if an exception left it, so that its callbacks do not come in the next."""
        running, self._running = self._running, None
        if running is None:
            return
        with contextlib.suppress(Exception):
            jax.effects_barrier()
        if any(leaf.token.is_deleted() for leaf in running):  # donated: it was a step, and it ran
            self.swap.generation = 0

    def finish(self, is_step: bool = False) -> dict[str, float]:
        """Return what the program moved.

        Args:
          is_step: the program made the next state.

        Raises:
          SwapError: a record could not be moved, here or by another process; the state is lost.
          BaseException: as it was raised in a callback, if it is no Exception, such as KeyboardInterrupt; likewise.
        """
        self._running = None
        try:
            self._together.do(self.engine.check)
        except SwapError as error:
            self.engine.fail(error)  # of another process: here none was kept
            first = error.__cause__.__cause__ if error.__cause__ is not None else None
            if first is not None and not isinstance(first, Exception):
                raise first from error
            raise
        self.swap.generation += is_step
        stats = self.engine.take_stats()
        self._recorder.finish(stats)
        return {
            "swap_read_bytes": float(stats.bytes_read),
            "swap_write_bytes": float(stats.bytes_written),
            "swap_copied_bytes": float(stats.bytes_copied),
            "swap_read_seconds": stats.read_seconds,
            "swap_write_seconds": stats.write_seconds,
            "swap_stall_seconds": sum(stats.stall_seconds.values()),
            "swap_misses": float(stats.misses),
            "swap_most_queued": float(stats.most_queued),
        }

    @contextlib.contextmanager
    def snapshot(self, held: Any, wanted: Sequence[DiskRecords]) -> Iterator[tuple[Snapshot, list[tuple[DiskRecords, Store]]]]:
        """Lend the stores of some kinds at rest, and a snapshot to keep their records in; whoever takes it closes it.

        Args:
          held: the state, which must be the one on disk.
          wanted: kinds of which the state is part.

        Raises:
          ValueError: the state is not the one on disk.
          SwapError: an earlier step failed, or a write does.
        """
        self._end_last()
        leaves = jax.tree.leaves(held, is_leaf=lambda node: isinstance(node, OnDisk))
        self._check_numbers([leaf for leaf in leaves if isinstance(leaf, OnDisk)])
        self.engine.flush()
        assert self._folder is not None
        snapshot = Snapshot(os.path.join(self._folder.path, f"snapshot-{next(self._numbers)}"))
        self._snapshots = [*(one for one in self._snapshots if not one.is_closed), snapshot]
        try:
            yield (
                snapshot,
                [(records, self.engine.store_of(records.kind, rank)) for records in wanted for rank in self.disk.ranks()],
            )
        except BaseException:
            snapshot.close()
            raise

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Return a context whose runs are drawn into a file when it ends.

        Raises:
          ValueError: the file cannot be written; or, on entering, there is another trace.
        """
        check_path(path)
        first = self.mesh.devices.flat[0]
        metadata = {"io": self.config.io, "device": first.device_kind, "mesh": dict(self.mesh.shape)}
        return self._recorder.trace(path, lambda: self.swap.engine, metadata | {"process": jax.process_index()})

    def close(self) -> None:
        """Release threads and buffers, and remove the folder, once what is being saved from there was."""
        self._end_last()
        self._wait_for_snapshots()
        engine, self.swap.engine = self.swap.engine, None
        self._made.clear()
        if engine is not None:
            engine.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()
