"""Move records between disk and buffers while a jitted step runs: read ahead, written behind.

Callbacks of the program ask for records or hand them over (`host_offload.engine.ops`), one after
the other on each device:

    fetch(kind, rank, layer)     wait for the record's buffer and copy out of it; give the buffer
                                 back when the copy has ended, and start the next reads
    store(kind, rank, layer)     wait for an empty buffer, copy into it, start the write
    borrow(kind, rank, layer)    lend the buffer itself, for an update in host memory: read,
                                 updated in place, or filled

The number of buffers is fixed. Each kind on each device has `distance` buffers to read ahead, one
more for the record in use, and the same number to write; kinds with a single record can share
buffers (`host_offload.engine.buffer_sets`). Reads use one ring and writes another. Records that are
updated in place are written from the buffer into which they were read. They have one ring with the
buffers of both directions, and the number of writes in flight is limited as if a separate ring
served the writes.

Waits cannot form a cycle, however few buffers there are. A write waits only for the disk. A read
that was not started ahead waits only for the record in use: if the records read ahead hold all
buffers, the last of them gives its buffer back. A full ring causes a wait, which is counted
(`Stats.stall_seconds`), not an error.

    read of a record whose write is pending     copies from the buffer of that write
    write of a record that was read ahead       drops the data that was read
    write of a record whose write is pending    starts when that write is done

A callback must not raise, because another device may be waiting in a collective. So the first error
is stored, every later call immediately returns zeros, and `check` raises the error when the step
has ended. The records on disk are then not a valid state, and `failed` stays True until `reset`.
"""

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Literal

from host_offload.device import Copies, HostCopies, Ring, Views
from host_offload.disk import STATE_LOST, Store, SwapError, explain
from host_offload.engine.buffer_sets import BufferSet, DeviceRecords, num_buffers
from host_offload.engine.job_thread import JobThread
from host_offload.engine.lane import Key, Lane, Read, RecordBuffer
from host_offload.engine.stats import Event, Stats
from host_offload.engine.transfers import Io, Transfers, Write
from host_offload.schedule import Move, Window

Filled = Future[None] | None
"""Future that is done when a buffer holds the record to write; None if it already does."""
Freed = Future[None] | None
"""Future that is done when nothing reads a buffer any more; None if nothing reads it now."""
Mode = Literal["read", "update", "write"]
"""How a borrowed record is used: read, read and changed, or filled regardless of its contents."""
_WRITES = {"read": (False,), "update": (False, True), "write": (True,)}
"""Whether each move of a record writes it, by `Mode`."""


class Engine:
    """Moves the records of this process's devices.

    Attributes:
      io: reader and writer of records.
      distance: prefetch distance, in records of a kind.
      copies: copies between buffers and devices.
      pin: how to lock the pages of buffers, as for `Ring`.
    """

    def __init__(
        self,
        io: Io,
        distance: int,
        pin: Literal["lock", "cuda", "none"] = "lock",
        copies: Copies | None = None,
    ) -> None:
        """Create an engine without records. `io` and `copies` are closed with the engine.

        Args:
          io: reader and writer of records.
          distance: prefetch distance, in records of a kind.
          pin: how to lock the pages of buffers, as for `Ring`.
          copies: copies between buffers and devices; by default those for CPU devices.
        """
        self.io = io
        self.distance = distance
        self.copies = copies or HostCopies()
        self.pin: Literal["lock", "cuda", "none"] = pin
        self._lanes: dict[int, Lane] = {}
        self._transfers = Transfers(io, self.fail)
        self._lock = threading.Lock()  # protects the error
        self._error: SwapError | None = None
        self._window = Window((), 0)  # at the start of its moves
        self._numbers = itertools.count(1)  # numbers of transfers
        self._process = os.getpid()
        self._jobs = JobThread(has_thread=self.copies.lifts, fail=self.fail)

    # --- kinds of records -------------------------------------------------------------------------

    def add(
        self,
        kind: str,
        rank: int,
        store: Store,
        *,
        in_place: bool = False,
        up: bool = True,
        down: bool = True,
        shared_bytes: int = 0,
    ) -> None:
        """Add the records of a kind on a device, and allocate their buffers.

        Args:
          kind: name of the kind.
          rank: position of the device in the mesh.
          store: records on disk.
          in_place: whether records are updated in the buffers into which they are read.
          up: whether copies to the device run ahead of the program.
          down: whether copies from the device run behind the program.
          shared_bytes: if not 0, bytes per buffer of a set that the kind shares with all other
            kinds that were added to the device with this argument. A caller must not borrow two
            records of these kinds at the same time.
        """
        lane = self._lanes.setdefault(rank, Lane(rank))
        size = store.format.padded_bytes
        if not shared_bytes:
            count = num_buffers(self.distance, store.num_layers, in_place)
            buffers = BufferSet.make(count, size, self.distance, in_place, self.pin)
        elif lane.shared is not None:
            buffers = lane.shared
        else:
            count = 2 * (self.distance + 1)
            buffers = BufferSet.make(count, shared_bytes, self.distance, in_place, self.pin)
            lane.shared = buffers
        leaf_spans = [(start, leaf.num_bytes) for leaf, start in store.format.leaves_with_offsets()]
        self.copies.add(kind, rank, size, leaf_spans, up=up, down=down)
        with lane.lock:
            lane.records[kind] = DeviceRecords(store, buffers)
            if up and self.copies.lifts:
                lane.lifted.add(kind)

    def remove(self, kind: str) -> None:
        """Remove a kind from all devices, and free its buffers.

        No callback may use the kind's records any more.
        """
        self.settle()
        for lane in self._lanes.values():
            self._forget(lane, lambda key: key[0] == kind)
            lane.wait_for_writes()
            lane.wait_for_leaving()
            with lane.lock:
                records = lane.records.pop(kind, None)
                lane.lifted.discard(kind)
            if records is None:
                continue
            self.copies.remove(kind)
            # Shared buffers are freed with the last kind that uses them.
            buffers = records.buffers
            if all(remaining.buffers is not buffers for remaining in lane.records.values()):
                buffers.close()
                if lane.shared is buffers:
                    lane.shared = None

    def kinds(self) -> set[str]:
        """Return the names of the kinds that were added and not removed."""
        return {kind for lane in self._lanes.values() for kind in lane.records}

    def find_store(self, kind: str, rank: int) -> Store:
        """Return the records on disk of a kind on a device.

        Args:
          kind: name of the kind.
          rank: position of the device in the mesh.
        """
        return self._lanes[rank].records[kind].store

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers, summed over this process's devices."""
        buffers = {
            records.buffers for lane in self._lanes.values() for records in lane.records.values()
        }
        return sum(buffer_set.num_bytes for buffer_set in buffers)

    # --- around a program -------------------------------------------------------------------------

    def begin(self, moves: Sequence[Move]) -> None:
        """Start a program: expect its moves on every device, and start to read ahead.

        Args:
          moves: planned moves, in order, the same for every device.

        Raises:
          SwapError: an earlier step failed.
        """
        self.check()
        self.settle()
        if self._window.moves != tuple(moves):  # most programs run many times
            self._window = Window(moves, self.distance)
        for lane in self._lanes.values():
            window = self._window.restarted()
            # Keep the records that the previous program read ahead and this one needs soon.
            expected = {(move.kind, move.layer) for move in window.ahead(())}
            self._forget(lane, lambda key, expected=expected: key not in expected)
            with lane.lock:
                lane.window = window
            self._read_ahead(lane)

    def check(self) -> None:
        """Raise the first stored error, if there is one.

        Raises:
          SwapError: a record could not be moved, and the state is lost.
        """
        if (error := self._error) is not None:
            # A new exception each time: the stored one would grow its traceback with every raise.
            raise SwapError(
                f"{error}; {STATE_LOST}", file=error.file, layer=error.layer, errno=error.errno
            ) from error

    @property
    def failed(self) -> bool:
        """Whether an error has left the records without a valid state."""
        return self._error is not None

    def reset(self) -> None:
        """Forget the error and all records read ahead, before all records are written again."""
        for lane in self._lanes.values():
            self._drain(lane)
        with self._lock:
            self._error = None

    def has_all_buffers(self) -> bool:
        """Return whether every buffer was given back, at a time when none is in use."""
        return all(
            records.buffers.is_whole()
            for lane in self._lanes.values()
            for records in lane.records.values()
        )

    def flush(self) -> None:
        """Wait for all transfers in flight.

        Raises:
          SwapError: a write or an earlier move failed.
        """
        self.settle()
        for lane in self._lanes.values():
            lane.wait_for_writes()
            with lane.lock:
                pending = [read.done for read in lane.reading.values()]
            for done in pending:
                done.exception()
        self.check()

    def take_stats(self) -> Stats:
        """Return the statistics since the last call of this method."""
        return self._transfers.take_stats()

    def recent_events(self) -> list[Event]:
        """Return the transfers and waits since `take_stats`, without removing them."""
        return self._transfers.recent_events()

    def close(self) -> None:
        """Wait for all transfers, and release buffers and threads.

        In a forked child, which has no threads, this does nothing.
        """
        if os.getpid() != self._process:
            return
        for lane in self._lanes.values():
            self._drain(lane)
        for kind in self.kinds():
            self.remove(kind)
        self._lanes.clear()
        self._jobs.close()
        self.copies.close()
        self._transfers.close()

    # --- inside a program -------------------------------------------------------------------------

    def fetch(self, kind: str, rank: int, layer: int, use: Callable[[Views], Freed]) -> None:
        """Lend a record's leaves to `use` for reading.

        Args:
          kind: name of the kind.
          rank: position of the device in the mesh.
          layer: index of the record.
          use: function of the leaves. It may read them until it returns or, if it returns a
            future, until that future is done.

        Raises:
          SwapError: the record cannot be read, or an earlier move failed.
        """
        # On a GPU `use` only queues copies, and the next reads start after it, in `_after_fetch`.
        buffer = self._read(kind, rank, layer, brief=self._jobs.has_thread)
        lane = buffer.lane
        try:
            freed = use(buffer.views)
        except BaseException:
            # A buffer lost here would be missing in every later step.
            self._give_back(buffer)
            raise
        if freed is None:
            self._give_back(buffer)
            self._read_ahead(lane)
            return
        with lane.lock:
            lane.leaving.append(buffer.buffers.reads)
        self._jobs.submit(functools.partial(self._after_fetch, buffer, freed))

    def store(self, kind: str, rank: int, layer: int, fill: Callable[[Views], Filled]) -> None:
        """Write a record whose leaves `fill` fills.

        Args:
          kind: name of the kind.
          rank: position of the device in the mesh.
          layer: index of the record.
          fill: function that fills the leaves before it returns or, if it returns a future, before
            that future is done.

        Raises:
          SwapError: an earlier move failed.
        """
        buffer = self._take_empty(kind, rank, layer)
        try:
            filled = fill(buffer.views)
        except BaseException:
            buffer.buffers.writes.give(buffer.memory)
            raise
        self._write(buffer, filled)
        # If the record is not complete yet, the reads that it blocks cannot start yet either.
        if filled is None:
            self._read_ahead(buffer.lane)

    def borrow(
        self, kind: str, rank: int, layer: int, mode: Mode = "read"
    ) -> contextlib.AbstractContextManager[Views]:
        """Return a context that lends the leaves of a record, in the memory of its buffer.

        The write of an updated or filled record starts when the context ends. If the context ends
        by an error, nothing is written.

        Args:
          kind: name of the kind; mode "update" needs a kind added with `in_place`.
          rank: position of the device in the mesh.
          layer: index of the record.
          mode: how the record is used.

        Raises:
          SwapError: the record cannot be read, or an earlier move failed.
        """
        if mode == "write":
            return self._lend_empty(kind, rank, layer)
        return self._lend_read(kind, rank, layer, mode)

    @contextlib.contextmanager
    def _lend_empty(self, kind: str, rank: int, layer: int) -> Iterator[Views]:
        """Lend a buffer to fill, and start to write it when the context ends."""
        buffer = self._take_empty(kind, rank, layer)
        try:
            yield buffer.views
        except BaseException:
            buffer.buffers.writes.give(buffer.memory)
            raise
        self._write(buffer, None)
        self._read_ahead(buffer.lane)

    @contextlib.contextmanager
    def _lend_read(self, kind: str, rank: int, layer: int, mode: Mode) -> Iterator[Views]:
        """Lend a record that has been read; an updated record is written when the context ends."""
        buffers = self._lanes[rank].records[kind].buffers
        assert mode == "read" or buffers.reads is buffers.writes, (
            f"{kind} was not added to be updated in place"
        )
        buffer = self._read(kind, rank, layer)
        try:
            # A copy to the device may still read the buffer that the host is about to change.
            if (freed := self.copies.drop(kind, rank, buffer.memory)) is not None:
                freed.result()
            yield buffer.views
        except BaseException:
            self._give_back(buffer)
            raise
        if mode == "update":
            event = Event("write", kind, rank, layer, next(self._numbers))
            self._write(buffer._replace(event=event), None)
        else:
            self._give_back(buffer)
        self._read_ahead(buffer.lane)

    def skip(self, kind: str, rank: int, layer: int, mode: Mode = "read") -> None:
        """Skip the next moves of a record, because this step does not use it.

        Args:
          kind: name of the kind.
          rank: position of the device in the mesh.
          layer: index of the record.
          mode: how the record would have been used.

        Raises:
          SwapError: an earlier move failed.
        """
        self.check()
        lane = self._lanes[rank]
        if mode != "write":
            self._forget_record(lane, (kind, layer))
        with lane.lock:
            for writes in _WRITES[mode]:
                lane.window.advance(Move(kind, layer, writes))
        self._read_ahead(lane)

    def fail(self, error: BaseException, kind: str = "", layer: int | None = None) -> None:
        """Store an error for `check`, unless one is stored already.

        Args:
          error: the error; any error other than a SwapError is converted to one.
          kind: name of the record's kind, if known.
          layer: index of the record, if known.
        """
        swap_error = error
        if not isinstance(swap_error, SwapError):
            swap_error = explain(
                swap_error, doing=f"moving {kind or 'a record'}", file=None, layer=layer
            )
        with self._lock:
            # The first error is the cause; later errors are mostly its consequences.
            if self._error is None:
                self._error = swap_error

    # --- buffers with records ---------------------------------------------------------------------

    def _read(self, kind: str, rank: int, layer: int, brief: bool = False) -> RecordBuffer:
        """Return a buffer that holds a record.

        The next reads start before this returns if the record had to be waited for, or if its use
        is not `brief`.

        Raises:
          SwapError: the record cannot be read, or an earlier move failed.
        """
        self.check()
        lane = self._lanes[rank]
        read = self._pop_read(lane, kind, layer) or self._read_unexpected(lane, kind, layer)
        event = read.buffer.event
        try:
            if read.done.done():
                if not brief:
                    self._read_ahead_soon(lane)
                start = time.perf_counter()
                read.done.result()
                self._transfers.waited(event, start)
            else:
                self._read_ahead(lane)
                self._transfers.waiting(event, read.done.result)
        except BaseException:
            # An interrupt may arrive while the disk still fills the buffer.
            self._drop(read)
            raise
        return read.buffer

    def _pop_read(self, lane: Lane, kind: str, layer: int) -> Read | None:
        """Return the read of a record if it was started ahead."""
        with lane.lock:
            read = lane.reading.pop((kind, layer), None)
            if read is not None:
                # Under the same lock as the pop, or the window could request this record again in
                # between.
                lane.window.advance(Move(kind, layer))
            return read

    def _read_unexpected(self, lane: Lane, kind: str, layer: int) -> Read:
        """Start to read a record that was not read ahead; wait for a buffer if none is free."""
        records = lane.records[kind]
        with self._wanting(lane, (kind, layer), records.buffers.reads):
            # Another thread may have started to read this record ahead before the claim.
            read = self._pop_read(lane, kind, layer)
            if read is not None:
                return read
            # The claim must precede this, or reading ahead could take the freed buffer.
            self._give_way(lane, records.buffers)
            event = Event("read", kind, lane.rank, layer, next(self._numbers))
            taken = self._transfers.waiting(event, records.buffers.reads.take)
            buffer = RecordBuffer(lane, records, event, records.record_in(taken))
            with lane.lock:
                read = self._start_read(buffer)
                lane.window.advance(Move(kind, layer))
            self._transfers.count_miss()
            return read

    def _take_empty(self, kind: str, rank: int, layer: int) -> RecordBuffer:
        """Return a buffer to fill, with the event of its write.

        Raises:
          SwapError: an earlier move failed.
        """
        self.check()
        lane = self._lanes[rank]
        key = (kind, layer)
        records = lane.records[kind]
        buffers = records.buffers
        event = Event("write", kind, rank, layer, next(self._numbers))
        with lane.lock:
            # Fast path: a buffer is free, and no stale copy of this record was read ahead.
            start = time.perf_counter()
            if key not in lane.reading and (free := buffers.writes.take_free()) is not None:
                self._transfers.waited(event, start)
                return RecordBuffer(lane, records, event, records.record_in(free))
        with self._wanting(lane, key, buffers.writes):
            # If this record was read ahead, that copy is about to be stale, and its buffer may be
            # the missing one.
            self._forget_record(lane, key)
            if buffers.reads is buffers.writes:
                self._give_way(lane, buffers)
            taken = self._transfers.waiting(event, buffers.writes.take)
            return RecordBuffer(lane, records, event, records.record_in(taken))

    def _give_back(self, buffer: RecordBuffer) -> None:
        """Give back a read buffer once no copy to the device reads it any more."""
        lane = buffer.lane
        ring = buffer.buffers.reads
        # `drop` returns a future only for a lifted record that no callback took.
        freed = self.copies.drop(buffer.event.kind, lane.rank, buffer.memory)
        if freed is None:
            ring.give(buffer.memory)
            return
        with lane.lock:
            lane.leaving.append(ring)
        freed.add_done_callback(functools.partial(self._finish_leaving, buffer))

    def _finish_leaving(self, buffer: RecordBuffer, freed: "Future[None]") -> None:
        """Give back a leaving buffer; runs in a thread that must survive errors."""
        lane = buffer.lane
        kind = buffer.event.kind
        ring = buffer.buffers.reads
        try:
            if (error := freed.exception()) is not None:
                self.fail(error, kind)
            with lane.lock:
                lane.leaving.remove(ring)
                ring.give(buffer.memory)
                lane.left.notify_all()
            self._read_ahead(lane)
        except BaseException as error:
            self.fail(error, kind)

    @contextlib.contextmanager
    def _wanting(self, lane: Lane, key: Key, ring: Ring) -> Iterator[None]:
        """Claim a buffer of a ring for a record, so that reading ahead leaves one."""
        with lane.lock:
            lane.wanted.append(key)
            lane.claims.append(ring)
        try:
            yield
        finally:
            with lane.lock:
                lane.wanted.remove(key)
                lane.claims.remove(ring)

    # --- writes -----------------------------------------------------------------------------------

    def _write(self, buffer: RecordBuffer, filled: Filled) -> None:
        """Wait for a turn, and start to write a record as soon as `filled` is done."""
        lane = buffer.lane
        event = buffer.event
        key = (event.kind, event.layer)
        turns = buffer.buffers.turns
        # Before taking the lock, which the I/O threads need while this callback waits for a turn.
        try:
            start = time.perf_counter()
            if turns.acquire(blocking=False):
                self._transfers.waited(event, start)
            else:
                self._transfers.waiting(event, turns.acquire)
        except BaseException:  # an interrupt
            buffer.buffers.writes.give(buffer.memory)
            raise
        write = Write(buffer.memory, filled)
        # From here on this buffer holds the record's current contents; earlier reads are dropped.
        with lane.lock:
            stale = lane.reading.pop(key, None)
            previous = lane.writing.get(key)
            lane.writing[key] = write
            lane.window.advance(Move(*key, writes=True))
        begin = functools.partial(self._begin_write, buffer, write, previous)
        if filled is None:
            begin()
        else:
            self._jobs.submit(begin)
        if stale is not None:
            self._drop(stale)

    def _begin_write(self, buffer: RecordBuffer, write: Write, previous: Write | None) -> None:
        """Start a write when its buffer is filled and the record's previous write is done.

        Its buffer and its turn are given back when it is done.
        """
        lane = buffer.lane
        buffers = buffer.buffers
        key = (buffer.event.kind, buffer.event.layer)
        self._transfers.write(buffer.event, buffer.records.store, write, previous)

        def release(_: "Future[float]") -> None:
            buffers.turns.release()
            with lane.lock:
                # A later write of the same record may have replaced this one.
                if lane.writing.get(key) is write:
                    del lane.writing[key]
            # No new read can copy from this buffer, because it is no longer in `writing`. One
            # thread does the copies, so the copy queued last also ends last.
            if write.copies:
                write.copies[-1].add_done_callback(give_back)
            else:
                give_back()

        def give_back(_: "Future[float] | None" = None) -> None:
            buffers.writes.give(write.buffer)
            # A shared ring may have had no buffer for a read.
            if buffers.reads is buffers.writes:
                self._read_ahead(lane)

        write.done.add_done_callback(release)
        if write.filled is not None:
            # Reads that waited for this record can start once it is complete.
            write.filled.add_done_callback(lambda _: self._read_ahead_or_fail(lane))

    # --- reads ahead ------------------------------------------------------------------------------

    def _read_ahead(self, lane: Lane) -> None:
        """Start to read the next records, as far as buffers are free."""
        with lane.lock:
            for move in lane.window.ahead(lane.reading.keys()):
                kind = move.kind
                layer = move.layer
                records = lane.records.get(kind)
                # A callback is about to read or write this record itself.
                if records is None or (kind, layer) in lane.wanted:
                    continue
                # Each callback that waits for a buffer of this ring must find one.
                ring = records.buffers.reads
                if ring.free <= lane.claims.count(ring):
                    continue
                # None if another callback has just taken the last buffer.
                if (free := ring.take_free()) is not None:
                    number = next(self._numbers)
                    event = Event("read", kind, lane.rank, layer, number, ahead=True)
                    buffer = RecordBuffer(lane, records, event, records.record_in(free))
                    lane.reading[kind, layer] = self._start_read(buffer)
            self._lift(lane)

    def _read_ahead_soon(self, lane: Lane) -> None:
        """Read ahead; for a GPU's callback, in another thread."""
        if self._jobs.has_thread:
            self._jobs.submit(functools.partial(self._read_ahead_or_fail, lane))
        else:
            self._read_ahead(lane)

    def _read_ahead_or_fail(self, lane: Lane) -> None:
        """Read ahead in a thread that must survive errors: store them for `check`."""
        try:
            self._read_ahead(lane)
        except BaseException as error:
            self.fail(error)

    def _after_fetch(self, buffer: RecordBuffer, freed: "Future[None]") -> None:
        """Read ahead, and let the buffer be given back when `freed` is done."""
        self._read_ahead_or_fail(buffer.lane)
        freed.add_done_callback(functools.partial(self._finish_leaving, buffer))

    def _start_read(self, buffer: RecordBuffer) -> Read:
        lane = buffer.lane
        event = buffer.event
        pending = lane.writing.get((event.kind, event.layer))
        done = self._transfers.read(event, buffer.records.store, buffer.memory, pending)
        if event.kind in lane.lifted:
            done.add_done_callback(lambda _: self._lift(lane))
        return Read(buffer, done)

    def _lift(self, lane: Lane) -> None:
        """Start to copy the next record of each kind to the device, if it has been read."""
        if not lane.lifted:
            return
        try:
            with lane.lock:
                missing = set(lane.lifted)
                # In the order in which the reads were started.
                for (kind, _), read in lane.reading.items():
                    if kind in missing and read.done.done() and read.done.exception() is None:
                        self.copies.lift(kind, lane.rank, read.buffer.memory)
                    # Only the oldest record of a kind: a slot has room for one, and a later record
                    # would block it.
                    missing.discard(kind)
        except BaseException as error:  # a driver error, in an I/O thread
            self.fail(error)

    # --- dropped reads ----------------------------------------------------------------------------

    def _give_way(self, lane: Lane, buffers: BufferSet) -> None:
        """Drop the last record that was read ahead, if no buffer is free."""
        with lane.lock:
            ahead = [key for key, read in lane.reading.items() if read.buffer.buffers is buffers]
            # A leaving buffer is given back soon: waiting for it is cheaper than reading a dropped
            # record again.
            if buffers.reads.free or buffers.reads in lane.leaving or not ahead:
                return
            last = lane.reading.pop(ahead[-1])
        self._drop(last)

    def _forget(self, lane: Lane, predicate: Callable[[Key], bool]) -> None:
        """Drop the records read ahead that `predicate` selects."""
        # Without the lock: `_drop` waits for the disk, whose threads need it to end transfers.
        for read in lane.pop_reads(predicate):
            self._drop(read)

    def _forget_record(self, lane: Lane, key: Key) -> None:
        """Drop a record if it was read ahead."""
        with lane.lock:
            read = lane.reading.pop(key, None)
        if read is not None:
            self._drop(read)

    def _drop(self, read: Read) -> None:
        """Wait for a read that is not needed, ignore its error, and give back its buffer."""
        read.done.exception()  # waits
        self._give_back(read.buffer)

    # --- waits ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until the jobs that callbacks left to another thread have been started."""
        self._jobs.settle()

    def _drain(self, lane: Lane) -> None:
        """Clear the window of expected moves, and wait for all transfers."""
        self.settle()
        with lane.lock:
            lane.window = Window((), 0)
        self._forget(lane, lambda _: True)
        lane.wait_for_writes()
        lane.wait_for_leaving()
