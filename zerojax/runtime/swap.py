"""A program's records on disk while it runs: the folder, buffers and threads behind a `DiskLayout`.

The folder and the threads are created when the program is built (`claim`), and files and buffers
with its first state (`open`). Files and buffers of records that live inside a step are created with
the first batch of a shape (`begin`). The table shows which call is possible in which state, and the
state that it leads to:

    state      claim    open  begin    finish  snapshot  trace  close
    UNCLAIMED  CLAIMED  OPEN  -        -       -         same   CLOSED
    CLAIMED    same     OPEN  RUNNING  -       same      same   CLOSED
    OPEN       same     same  RUNNING  -       same      same   CLOSED
    RUNNING    same     OPEN  same     back    back      same   CLOSED
    LOST       same     OPEN  RUNNING  -       same      same   CLOSED
    CLOSED     CLAIMED  OPEN  -        -       -         same   same

"back" is the state in which the program began. A call that raises does not change the state, with
three exceptions. A claim that fails closes the session. An open that fails leaves it CLAIMED,
unless there was no room next to the last state, which then still exists. An error of the engine
makes the state LOST, whichever call finds it.

An exception may interrupt a program. Every call except claim, finish and trace ends that program
first. If it was a step, the state is LOST; if not, the session is back in the state where the
program began.

Only an OPEN session has a state on disk. In any other state a program or a snapshot may read the
leaves in memory, as an eval does if only optimizer states are on disk; leaves on disk are refused.

With the optimizer on the host, updated records move disk -> buffer -> disk, in one buffer, and
never to the device.

A fetch that the schedule makes `distance` ahead is a move from buffers to the device. The engine
reads as many records again from disk to buffers ahead of that.

Each process has the records of its own devices, in its own folder. A failure in one process is
raised in all.

Creating or removing folders, files and buffers is not interrupted, even by a second Ctrl-C: it
would be left half done. Waits for a program, a snapshot or other processes can be interrupted. In a
forked child, closing does nothing: the child has none of the threads, and the folder belongs to its
parent.

The errors that a user reads when the disk fails are in `host_offload/disk/errors.py`: operation,
file, layer and remedy. A session decides where an error is raised, and whether the state on disk is
lost with it.
"""

import contextlib
import dataclasses
import enum
import itertools
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from host_offload.device import available_bytes
from host_offload.disk import (
    DirectIo,
    RecordFile,
    Snapshot,
    Store,
    SwapError,
    SwapFolder,
    TensorstoreIo,
    explain,
    tune,
)
from host_offload.engine import DiskRecords, Engine
from host_offload.schedule import Move
from host_offload.trace import Recorder, Span, check_path
from zerojax.runtime.interrupts import interrupts_wait
from zerojax.runtime.processes import AllProcesses
from zerojax.state import DiskLayout, OnDisk
from zerojax.trees import Tree

logger = logging.getLogger("zerojax")


RecordKey = tuple[str, int, int]
"""A record on disk: its kind, the index of its device, and its layer."""


class SwapState(enum.Enum):
    """The state of a session."""

    UNCLAIMED = "there is no folder yet, as for a program that is only compiled"
    CLAIMED = "the folder is claimed and the threads run; no state is on disk"
    OPEN = "a state is on disk, and no program runs"
    RUNNING = "a program runs, or an exception interrupted it"
    LOST = "the records on disk are no longer a valid state"
    CLOSED = "folder, buffers and threads are released"


_UNCLAIMED, _CLAIMED, _OPEN, _RUNNING, _LOST, _CLOSED = SwapState

TRANSITIONS: Mapping[str, Mapping[SwapState, SwapState | None]] = {
    "claim": {
        _UNCLAIMED: _CLAIMED,
        _CLAIMED: _CLAIMED,
        _OPEN: _OPEN,
        _RUNNING: _RUNNING,
        _LOST: _LOST,
        _CLOSED: _CLAIMED,
    },
    "open": dict.fromkeys(SwapState, _OPEN),
    "begin": {_CLAIMED: _RUNNING, _OPEN: _RUNNING, _RUNNING: _RUNNING, _LOST: _RUNNING},
    "finish": {_RUNNING: None},
    "snapshot": {_CLAIMED: _CLAIMED, _OPEN: _OPEN, _RUNNING: None, _LOST: _LOST},
    "trace": {state: state for state in SwapState},
    "close": dict.fromkeys(SwapState, _CLOSED),
}
"""The state that each call leads to, by the states in which the call is possible.

None is the state in which the program began.
"""


@dataclasses.dataclass(frozen=True)
class _Run:
    """A program that began and has not finished.

    Attributes:
      leaves: leaves on disk that it reads from the state.
      began_in: state of the session before the program.
    """

    leaves: Sequence[OnDisk]
    began_in: SwapState

    @property
    def took_the_state(self) -> bool:
        """Whether it was a step and ran: no other program has the state donated to it."""
        return any(leaf.token.is_deleted() for leaf in self.leaves)


class SwapSession:
    """Run programs whose records are on disk.

    Attributes:
      disk: layout of the declared records.
    """

    def __init__(self, disk: DiskLayout) -> None:
        """Start without a folder; `disk` declares the records."""
        self.disk = disk
        self.config = disk.config
        self.mesh = disk.mesh
        self.swap = disk.swap
        self._state = SwapState.UNCLAIMED
        self._run: _Run | None = None
        self._folder: SwapFolder | None = None
        # kinds that have files and buffers on every device
        self._files_of: dict[str, DiskRecords] = {}
        self._recorder = Recorder(self.config.prefetch_distance)
        self._processes = AllProcesses(self.mesh)
        self._snapshot_numbers = itertools.count(1)
        self._snapshots: list[Snapshot] = []
        self._process = os.getpid()

    @property
    def state(self) -> SwapState:
        """State of the session after the calls so far."""
        return self._state

    @property
    def generation(self) -> int:
        """Number of the state on disk; 0 if there is none."""
        return self.swap.generation

    @property
    def engine(self) -> Engine:
        """The engine of a claimed disk.

        Raises:
          RuntimeError: the program is closed.
        """
        if self.swap.engine is None:
            raise RuntimeError(
                "this program is closed, and its state on disk was deleted: restore a checkpoint, "
                "or make a state with init"
            )
        return self.swap.engine

    def _advance(self, call: str) -> None:
        """Enter the state that the table lists for a call."""
        after = TRANSITIONS[call][self._state]
        if after is None:
            assert self._run is not None
            after = self._run.began_in
        self._state = after

    def claim(self) -> None:
        """Claim the swap folder, and measure how to read it best.

        Raises:
          ValueError: the folder does not exist, or is not a folder.
          RuntimeError: the machine has too little memory for the buffers.
          SwapError: the folder cannot be written to, or another program uses it; or another process
            failed here.
        """
        if self._state not in (SwapState.UNCLAIMED, SwapState.CLOSED):
            return
        try:
            self._processes.do(_unbroken(self._claim))
        except BaseException:
            self.close()
            raise
        self._advance("claim")

    def _claim(self) -> None:
        # First, since it needs no folder: if it raises, nothing has been touched.
        self._check_memory(
            [records for records in self.disk.kinds.values() if records.lifetime == "state"]
        )
        copies = self.swap.copies
        pin = "cuda" if self.mesh.devices.flat[0].platform != "cpu" else "lock"
        self._folder = SwapFolder(self.config.swap_dir or "", jax.process_index())
        settings = tune(self._folder.path)
        io = DirectIo(settings) if self.config.io == "direct" else TensorstoreIo(settings)
        self.swap.engine = Engine(io, self.config.prefetch_distance, pin, copies)

    def open(self, files: Mapping[RecordKey, RecordFile] | None = None) -> frozenset[RecordKey]:
        """Make files and buffers for the declared records; a second call starts over.

        Args:
          files: files that already contain records of the new state, such as a checkpoint's. They
            are linked if possible.

        Returns:
          The records that were linked, and so are already written.

        Raises:
          SwapError: the disk is too small, or the folder cannot be claimed. If a new state's
            records find no room next to records that checkpoints hold, the last state stays on
            disk.
        """
        files = files or {}
        self.claim()
        self._end_last()
        self._wait_for_snapshots()
        try:
            self._processes.do(_unbroken(lambda: self._make_room(files)))
        except BaseException:
            _unbroken(self._give_room_back)()
            raise
        # Drawn at random: otherwise a state of another program that made as many states would have
        # the same number. At most 2^30, so that the token's i32 has room to count as many steps.
        self.swap.generation = self._processes.least(1 + secrets.randbelow(1 << 30))
        # From here on the previous state on disk is lost, even if the next calls fail.
        self._state = SwapState.CLAIMED
        linked: set[RecordKey] = set()
        self._processes.do(_unbroken(lambda: linked.update(self._renew(files))))
        self._advance("open")
        logger.info(
            "nvme tier: %.2f GiB in %s, %.1f MiB of buffers",
            self.disk.num_bytes / 2**30,
            self.config.swap_dir,
            self.engine.buffer_bytes / 2**20,
        )
        return frozenset(linked)

    def _wait_for_snapshots(self) -> None:
        """Wait until the records that are being saved in the background have left the folder."""
        for snapshot in self._snapshots:
            snapshot.wait()

    def _stores(self) -> list[Store]:
        """Return the stores of a state that have files."""
        kinds = [records.kind for records in self._files_of.values() if records.lifetime == "state"]
        return [self.engine.find_store(kind, rank) for kind in kinds for rank in self.disk.ranks()]

    def _make_room(self, files: Mapping[RecordKey, RecordFile]) -> None:
        """Find room for a new state next to the last state's records in checkpoints.

        The last state stays as it is.
        """
        assert self._folder is not None
        # In this case the last state is already lost, and all files will be new.
        if self.engine.failed or not os.path.isdir(self._folder.path):
            return
        self._give_room_back()  # room from an interrupted attempt
        for store in self._stores():
            _offer(store, files)
            store.reserve_spares()

    def _give_room_back(self) -> None:
        """Give back the room for a state that is not made."""
        for store in self._stores():
            store.give_back()

    def _renew(self, files: Mapping[RecordKey, RecordFile]) -> set[RecordKey]:
        """Make the files for a new state ready, and return the records that were linked.

        The files of the last state are reused unless some may be missing.
        """
        assert self._folder is not None
        has_failed = self.engine.failed  # possibly in a write that ended after the last call
        self.engine.reset()
        # A buffer is missing if an interrupt arrived while it was lent, such as to a restore.
        if has_failed or not self.engine.has_all_buffers() or not os.path.isdir(self._folder.path):
            for kind in self.engine.kinds():
                self.engine.remove(kind)
            self._files_of.clear()
            self._folder.renew()
        # Records that live inside a step are made by `begin`: activations have their shapes from a
        # batch.
        kinds = [records for records in self.disk.kinds.values() if records.lifetime == "state"]
        self._make_files(kinds, files)
        linked = set[RecordKey]()
        for store in self._stores():
            linked.update((store.kind, store.rank, layer) for layer in store.adopt())
        return linked

    def _make_files(
        self, kinds: Sequence[DiskRecords], files: Mapping[RecordKey, RecordFile] | None = None
    ) -> None:
        """Make files and buffers for kinds that have none, or were made for another batch.

        Records in `files` need no room.
        """
        assert self._folder is not None
        missing = [
            records
            for records in kinds
            if not records.can_share_files(self._files_of.get(records.kind))
        ]
        if not missing:  # true except in a shape's first step; skips asking for available memory
            return
        # Remove files that were made for another batch or left by a failed attempt.
        for kind in (records.kind for records in missing):
            self._files_of.pop(kind, None)
            if kind in self.engine.kinds():
                self.engine.remove(kind)
            path = os.path.join(self._folder.path, kind)
            if os.path.isdir(path):
                try:
                    shutil.rmtree(path)
                except OSError as error:
                    raise explain(
                        error, doing=f"removing the records of {kind}", file=path
                    ) from error
        self._check_memory(missing)
        for records in missing:
            metadata = {
                "specs": [str(s) for s in records.specs],
                "mesh": dict(self.mesh.shape),
                "shapes": [list(a.shape) for a in records.shapes],
            }
            for rank in self.disk.ranks():
                store = Store(
                    self._folder.path,
                    records.kind,
                    rank,
                    records.num_layers,
                    records.format,
                    metadata,
                    written_once=records.written_once,
                )
                _offer(store, files or {})
                store.preallocate()
                up, down = records.slots
                shared = self.disk.shared_bytes(records)
                self.engine.add(
                    records.kind,
                    rank,
                    store,
                    in_place=records.in_place,
                    up=up,
                    down=down,
                    shared_bytes=shared,
                )
            self._files_of[records.kind] = records

    def _check_memory(self, kinds: Sequence[DiskRecords]) -> None:
        """Raise RuntimeError if the machine has too little memory for the buffers of some kinds."""
        ranks = len(self.disk.ranks())
        needed = ranks * self.disk.buffer_bytes(kinds)
        available = available_bytes()
        if available is None or needed <= available:
            return
        largest = max(kinds, key=lambda r: self.disk.buffer_bytes([r]))
        largest_bytes = self.disk.buffer_bytes([largest])
        raise RuntimeError(
            f"the nvme tier's buffers take {needed} bytes ({needed / 2**30:.1f} GiB), of these "
            f"{largest_bytes} bytes x {ranks} devices for {largest.kind}, but the machine has "
            f"{available} bytes ({available / 2**30:.1f} GiB) available: lower "
            f"prefetch_distance={self.config.prefetch_distance}, use more devices, or make layers "
            "smaller"
        )

    # --- around programs --------------------------------------------------------------------------

    def begin(
        self,
        reads: Any,
        moves: Sequence[Move],
        scratch: Sequence[DiskRecords] = (),
        name: str = "step",
    ) -> None:
        """Prepare for a program: make the records that live inside it, and read ahead.

        Args:
          reads: the state that it reads, or part of one.
          moves: records that it reads from disk and writes to disk, in order.
          scratch: kinds of records that it writes before it reads them.
          name: name of the program in a trace.

        Raises:
          ValueError: the state is not the one on disk.
          RuntimeError: the machine has too little memory for the buffers.
          SwapError: an earlier step failed, or the disk is too small; or another process failed
            here.
        """
        self._end_last()
        self._processes.do(_unbroken(lambda: self._begin(reads, moves, scratch, name)))

    def _begin(
        self, reads: Any, moves: Sequence[Move], scratch: Sequence[DiskRecords], name: str
    ) -> None:
        engine = self.engine
        with self._loss_is_noted():
            engine.check()
        leaves = _on_disk(reads)
        self._check_numbers(leaves)
        self._make_files(scratch)
        self._recorder.begin(name, moves, engine)
        self.swap.calls.begin()
        with self._loss_is_noted():  # checks for errors again
            engine.begin(moves)
        self._run = _Run(leaves, self._state)
        self._advance("begin")

    @contextlib.contextmanager
    def _loss_is_noted(self) -> Iterator[None]:
        """Mark the state as lost if the body raises the engine's error: a record was not moved."""
        try:
            yield
        except SwapError:
            self._state = SwapState.LOST
            raise

    def _check_numbers(self, leaves: Sequence[OnDisk]) -> None:
        """Raise ValueError for leaves of a state that is not the one on disk."""
        # All devices hold the same number, so only one is asked.
        numbers = jax.device_get([leaf.token.addressable_data(0) for leaf in leaves])
        wrong = {int(number[0]) for number in numbers} - {self.swap.generation}
        if wrong:
            on_disk = "none: this program has made no state, by init or by a restore"
            if self.swap.generation:
                on_disk = f"number {self.swap.generation}"
            elif self._state == SwapState.LOST:
                on_disk = "none, since a step was interrupted"
            raise ValueError(
                f"this state (number {min(wrong)}) is not the one on disk ({on_disk}): a program "
                "has only one state there, which its last init or step returned. This state was "
                "overwritten by a later init or step, or belongs to another program. Continue with "
                "the state on disk if there is one, restore a checkpoint, or make a state with init"
            )

    def _end_last(self) -> None:
        """Wait for the last program if an exception interrupted it.

        Otherwise its callbacks would run during the next program.
        """
        run = self._run
        self._run = None
        if run is None:
            return
        try:
            # its error was already raised when it was interrupted
            with contextlib.suppress(Exception):
                jax.effects_barrier()
        finally:  # even if the wait is interrupted, no run is left
            self._state = run.began_in
            if run.took_the_state:
                # No leaf on disk has the number 0, so every state is refused until the next `open`.
                self.swap.generation = 0
                self._state = SwapState.LOST

    def finish(self, is_step: bool = False) -> dict[str, float]:
        """Finish a program, and return metrics of the records that it moved.

        Args:
          is_step: whether the program made the next state.

        Returns:
          Bytes, seconds and counts by name, in floats.

        Raises:
          SwapError: a record could not be moved, here or in another process; the state is lost.
          BaseException: an exception of a callback that is no Exception, such as KeyboardInterrupt;
            the state is lost.
        """
        engine = self.engine
        assert self._run is not None, "no program has begun"
        self._advance("finish")
        self._run = None
        try:
            self.swap.calls.check()
        except Exception as error:  # not the disk's error, but the next call must know of it too
            engine.fail(error)
        try:
            with self._loss_is_noted():
                self._processes.do(engine.check)
        except SwapError as error:
            # Another process's error is unknown to this engine, and the next call must know of it.
            engine.fail(error)
            # The engine raises its own error from the error that it kept, which was made from what
            # a callback raised. An interrupt in a callback is the user's, not the disk's, so it is
            # raised unchanged.
            first = error.__cause__.__cause__ if error.__cause__ is not None else None
            if first is not None and not isinstance(first, Exception):
                raise first from error
            raise
        # The program has advanced the numbers in the state that it returned (`numbered_next`).
        self.swap.generation += is_step
        stats = engine.take_stats()
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
    def snapshot(
        self, state: Any, kinds: Sequence[DiskRecords]
    ) -> Iterator[tuple[Snapshot, list[tuple[DiskRecords, Store]]]]:
        """Lend the stores of some kinds while no program runs, with a snapshot for their records.

        The caller closes the snapshot.

        Args:
          state: state of a program, which must be the one on disk.
          kinds: kinds of records that the state consists of.

        Yields:
          The snapshot, and (records, store) for each kind and device.

        Raises:
          ValueError: the state is not the one on disk.
          SwapError: an earlier step failed, or a write fails.
        """
        self._end_last()
        self._check_numbers(_on_disk(state))
        with self._loss_is_noted():
            # A write that is still queued belongs to the lent records.
            self.engine.flush()
        assert self._folder is not None
        snapshot = Snapshot(
            os.path.join(self._folder.path, f"snapshot-{next(self._snapshot_numbers)}")
        )
        for earlier in self._snapshots:
            if earlier.is_closed and not earlier.is_removed:
                earlier.close()
        self._snapshots = [earlier for earlier in self._snapshots if not earlier.is_removed]
        self._snapshots.append(snapshot)
        stores = []
        try:
            for records, rank in itertools.product(kinds, self.disk.ranks()):
                stores.append((records, self.engine.find_store(records.kind, rank)))
            yield snapshot, stores
        except BaseException:
            snapshot.close()
            raise

    def trace(
        self, path: str | os.PathLike[str], predicted: Sequence[Span] = ()
    ) -> AbstractContextManager[None]:
        """Return a context whose runs are drawn into a file when it ends.

        Args:
          path: file to write.
          predicted: predicted (lane, label, start, stop), drawn next to each step.

        Raises:
          ValueError: the file cannot be written; or, on entering, another trace is active.
        """
        check_path(path)
        first = self.mesh.devices.flat[0]
        metadata = {
            "io": self.config.io,
            "device": first.device_kind,
            "mesh": dict(self.mesh.shape),
        }
        metadata |= {"process": jax.process_index()}
        return self._recorder.trace(path, lambda: self.swap.engine, metadata, predicted)

    def close(self) -> None:
        """Release threads and buffers, and remove the folder once nothing is being saved from it.

        In a forked child this does nothing.
        """
        if os.getpid() != self._process:
            return
        self._end_last()
        self._wait_for_snapshots()
        _unbroken(self._close)()

    def _close(self) -> None:
        self._advance("close")
        engine = self.swap.engine
        self.swap.engine = None
        self._files_of.clear()
        try:
            if engine is not None:
                # Its threads use the files, so they end before the folder is removed.
                engine.close()
        finally:
            # Even if the engine raises: a folder that stays locked would refuse the next claim.
            folder = self._folder
            self._folder = None
            if folder is not None:
                folder.close()


def _offer(store: Store, files: Mapping[RecordKey, RecordFile]) -> None:
    """Offer a store the files that contain its records."""
    for layer in range(store.num_layers):
        file = files.get((store.kind, store.rank, layer))
        if file is not None:
            store.offer(layer, file)


def _unbroken(work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` so that no signal interrupts it."""
    return interrupts_wait(all_wait=True)(work)


def _on_disk(tree: Tree) -> list[OnDisk]:
    """Return the leaves that are stored on disk."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, OnDisk))
    return [leaf for leaf in leaves if isinstance(leaf, OnDisk)]
