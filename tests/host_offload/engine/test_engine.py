"""Records read ahead and written behind are the stored records, under any fault.

The disk may be slow, early, full or broken.
"""

import errno
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from host_offload.disk.direct_io import DirectIo
from host_offload.disk.errors import SwapError
from host_offload.disk.folder import SwapFolder
from host_offload.disk.record_format import LeafFormat, RecordFormat
from host_offload.disk.store import Store
from host_offload.disk.tuning import IoSettings
from host_offload.engine.engine import Engine
from host_offload.engine.transfers import Write
from host_offload.schedule.moves import Move

FORMAT = RecordFormat((LeafFormat("w", (3, 5), "float32"), LeafFormat("b", (7,), "bfloat16")))
RANK, LAYERS = 2, 5


class HeldIo:
    """A disk in memory whose transfers end immediately, or when the test says so."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], np.ndarray] = {}
        self.held: list[tuple[str, int, Future, object]] | None = None
        self.reads: list[int] = []

    def read(self, store, layer, buffer):
        self.reads.append(layer)
        return self._do(
            "read", store, layer, lambda: np.copyto(buffer, self.records[store.kind, layer])
        )

    def write(self, store, layer, buffer):
        return self._do(
            "write", store, layer, lambda: self.records.update({(store.kind, layer): buffer.copy()})
        )

    def _do(self, name, store, layer, work):
        del store
        done = Future()
        if self.held is None:
            self._end(done, work)
        else:
            self.held.append((name, layer, done, work))
        return done

    def _end(self, done, work):
        try:
            work()
            done.set_result(0.001)
        except Exception as error:
            done.set_exception(error)

    def release(self, name=None):
        """End the held transfers, or only those called `name`."""
        held, self.held = self.held or [], []
        for entry in held:
            if name in (None, entry[0]):
                self._end(entry[2], entry[3])
            else:
                self.held.append(entry)

    def close(self):
        self.closed = True


@pytest.fixture
def folder(tmp_path):
    with SwapFolder(str(tmp_path)) as folder:
        yield folder


def engine_of(io, folder, distance=1, kinds=("params",)):
    engine = Engine(io, distance, pin="none")
    for kind in kinds:
        engine.add(kind, RANK, Store(folder.path, kind, RANK, LAYERS, FORMAT))
    return engine


def put(engine, layer, value, kind="params"):
    def fill(views):
        views[0][...] = value
        views[1][...] = -value

    engine.store(kind, RANK, layer, fill)


def fill(value):
    def put(views):
        for view in views:
            view[...] = value

    return put


def got(engine, layer, kind="params"):
    seen = []
    engine.fetch(kind, RANK, layer, lambda views: seen.extend(v.astype(np.float32) for v in views))
    assert (seen[0] == seen[0][0, 0]).all()
    assert (seen[1] == -seen[0][0, 0]).all()
    return float(seen[0][0, 0])


def test_a_record_is_what_was_stored(folder):
    engine = engine_of(HeldIo(), folder)
    for layer in range(LAYERS):
        put(engine, layer, layer + 1)
    assert [got(engine, layer) for layer in (3, 0, 4, 1, 2)] == [4, 1, 5, 2, 3]
    stats = engine.take_stats()
    assert stats.bytes_read == stats.bytes_written == LAYERS * FORMAT.padded_bytes
    assert stats.misses == LAYERS
    assert engine.take_stats().bytes_read == 0
    engine.close()


def test_a_buffer_is_given_back_when_the_disk_has_done_with_it(folder, monkeypatch):
    """An interrupt in a callback must not free the buffer that the disk is still reading into."""
    io = HeldIo()
    engine = engine_of(io, folder)
    put(engine, 1, 7)
    engine.flush()
    io.held, (ring,) = (
        [],
        {
            id(r.buffers.reads): r.buffers.reads for r in engine._lanes[RANK].records.values()
        }.values(),
    )
    free, while_held = ring.free, []

    def interrupted(lane):
        threading.Timer(0.1, lambda: (while_held.append(ring.free), io.release())).start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_read_ahead", interrupted)
        with pytest.raises(KeyboardInterrupt):
            got(engine, 1)
    assert while_held == [free - 1]
    assert ring.free == free
    io.held = None
    assert got(engine, 1) == 7
    engine.close()


def test_a_buffer_that_waits_for_its_turn_is_given_back_after_an_interrupt(folder, monkeypatch):
    engine = engine_of(HeldIo(), folder)
    put(engine, 1, 7)
    engine.flush()
    (records,) = engine._lanes[RANK].records.values()
    free = records.buffers.writes.free

    def interrupted(blocking=True):
        if blocking:
            raise KeyboardInterrupt
        return False  # there is no turn yet

    with monkeypatch.context() as patch:
        patch.setattr(records.buffers.turns, "acquire", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put(engine, 1, 8)
    assert records.buffers.writes.free == free
    assert got(engine, 1) == 7
    engine.close()


def test_a_record_on_its_way_to_the_disk_is_read_from_that_buffer(folder):
    io = HeldIo()
    engine = engine_of(io, folder)
    put(engine, 1, 1)
    io.held = []
    put(engine, 1, 7)
    assert got(engine, 1) == 7
    put(engine, 1, 8)  # begins when the first write has ended
    assert got(engine, 1) == 8
    assert io.reads == []
    assert [name for name, *_ in io.held] == ["write"]
    stats = engine.take_stats()
    assert stats.bytes_copied == stats.bytes_read == 2 * FORMAT.padded_bytes
    io.release()
    io.release()
    io.held = None
    assert got(engine, 1) == 8
    assert io.reads == [1]
    engine.close()


def test_a_buffer_that_is_still_copied_out_of_is_not_filled_again(folder, monkeypatch):
    io, go, copy_to = HeldIo(), threading.Event(), Write.copy_to
    engine = engine_of(io, folder, distance=0)

    def slow(write, buffer):
        assert go.wait(20)
        return copy_to(write, buffer)

    monkeypatch.setattr(Write, "copy_to", slow)
    io.held = []
    put(engine, 1, 7)
    found: list[float] = []
    reader = threading.Thread(target=lambda: found.append(got(engine, 1)))
    reader.start()
    writes = engine._lanes[RANK].records["params"].buffers.writes
    deadline = time.monotonic() + 20
    while engine._transfers._queued != 2:
        assert time.monotonic() < deadline
    io.release()  # it is on disk, and its only buffer is not free
    io.held = None
    assert writes.free == 0
    go.set()
    reader.join(20)
    assert found == [7]
    put(engine, 2, 9)
    assert got(engine, 2) == 9
    engine.close()


def test_two_writes_of_a_record_end_in_order(folder):
    io = HeldIo()
    engine = engine_of(io, folder, distance=2)
    io.held = []
    put(engine, 0, 1)
    put(engine, 0, 2)
    assert [entry[:2] for entry in io.held] == [("write", 0)]
    io.release()
    io.release()
    io.held = None
    assert got(engine, 0) == 2
    engine.close()


def test_a_full_ring_waits_for_the_disk(folder):
    io = HeldIo()
    engine = engine_of(io, folder, distance=1)
    io.held = []
    put(engine, 0, 1)
    put(engine, 1, 1)
    stored = threading.Event()
    writer = threading.Thread(target=lambda: (put(engine, 2, 1), stored.set()))
    writer.start()
    assert not stored.wait(0.05)
    io.release()
    assert stored.wait(10)
    writer.join()
    io.release()
    assert engine.take_stats().stall_seconds["params"] > 0.04
    io.held = None
    engine.close()


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_reads_run_ahead_by_the_distance(folder, distance):
    io = HeldIo()
    engine = engine_of(io, folder, distance)
    for layer in range(LAYERS):
        put(engine, layer, layer)
    engine.flush()
    engine.take_stats()
    moves = [Move("params", layer) for layer in range(LAYERS)]
    engine.begin(moves)
    assert io.reads == list(range(distance))
    for layer in range(LAYERS):
        assert got(engine, layer) == layer
        if distance:  # the next round begins with the same records
            assert io.reads == [*range(LAYERS), *range(LAYERS)][: layer + 1 + distance]
    assert engine.take_stats().misses == (0 if distance else LAYERS)
    engine.close()


def test_a_record_that_another_thread_reads_ahead_before_it_is_claimed_is_read_once(
    folder, monkeypatch
):
    io = HeldIo()
    engine = engine_of(io, folder)
    for layer in range(LAYERS):
        put(engine, layer, layer)
    engine.flush()
    engine.begin([Move("params", layer) for layer in range(LAYERS)])
    (lane,), key, claim = engine._lanes.values(), ("params", 0), engine._wanting
    read = lane.reading.pop(
        key
    )  # as if another thread had begun it, after this one has looked for it

    def claim_late(lane, *args):
        monkeypatch.undo()
        lane.reading[key] = read
        return claim(lane, *args)

    monkeypatch.setattr(engine, "_wanting", claim_late)
    assert [got(engine, layer) for layer in range(LAYERS)] == list(range(LAYERS))
    assert io.reads[:LAYERS] == list(range(LAYERS))
    engine.close()


def test_what_was_read_ahead_is_forgotten_when_it_is_written(folder):
    io = HeldIo()
    engine = engine_of(io, folder, distance=2)
    for layer in range(LAYERS):
        put(engine, layer, 1)
    engine.flush()
    engine.begin([Move("params", layer) for layer in range(LAYERS)])
    assert io.reads == [0, 1]
    put(engine, 1, 9)  # no move announces this write
    assert [got(engine, layer) for layer in range(3)] == [1, 9, 1]
    engine.begin([Move("params", 4)])
    assert got(engine, 4) == 1
    engine.close()


def test_an_error_is_kept_and_nothing_runs_after_it(folder):
    io = HeldIo()
    engine = engine_of(io, folder, distance=2, kinds=("params", "grads"))
    put(engine, 0, 1)
    io.held = []
    put(engine, 1, 1)
    name, layer, done, _ = io.held.pop()
    done.set_exception(SwapError("no space", file="f", layer=layer, errno=errno.ENOSPC))
    assert name == "write"
    io.held = None
    for call in (
        lambda: put(engine, 2, 1),
        lambda: got(engine, 0),
        lambda: engine.begin(()),
        engine.check,
        engine.flush,
    ):
        with pytest.raises(
            SwapError,
            match=r"no space; the state on the disk is lost: restore a checkpoint, or .* init$",
        ) as error:
            call()
        assert (error.value.layer, error.value.errno) == (1, errno.ENOSPC)
    assert engine.failed
    engine.reset()
    put(engine, 0, 3)
    assert got(engine, 0) == 3
    engine.close()


def in_place(io, folder, distance=1, layers=LAYERS):
    engine = Engine(io, distance, pin="none")
    engine.add(
        "opt_state", RANK, Store(folder.path, "opt_state", RANK, layers, FORMAT), in_place=True
    )
    for layer in range(layers):
        put(engine, layer, layer, "opt_state")
    engine.flush()
    engine.take_stats()
    return engine


def add_one(engine, layer):
    with engine.borrow("opt_state", RANK, layer, "update") as views:
        views[0][...] += 1
        views[1][...] -= 1


UPDATES = [Move("opt_state", layer, writes) for layer in range(LAYERS) for writes in (False, True)]


@pytest.mark.parametrize("distance", [0, 1, 2, 6])
def test_records_updated_in_place_are_what_was_updated(folder, distance):
    engine = in_place(HeldIo(), folder, distance)
    assert engine.buffer_bytes == min(2 * (distance + 1), LAYERS) * FORMAT.padded_bytes
    for _ in range(3):
        engine.begin(UPDATES)
        for layer in range(LAYERS):
            add_one(engine, layer)
    engine.flush()
    stats = engine.take_stats()
    assert stats.misses == (0 if distance else 3 * LAYERS)
    assert stats.bytes_written == 3 * LAYERS * FORMAT.padded_bytes
    assert [got(engine, layer, "opt_state") for layer in range(LAYERS)] == [
        layer + 3 for layer in range(LAYERS)
    ]
    engine.close()


def test_a_borrowed_record_is_the_buffer_itself_and_is_written_from_it(folder):
    io, written = HeldIo(), []
    engine = in_place(io, folder)
    write, io.write = (
        io.write,
        lambda store, layer, buffer: (
            written.append(buffer.ctypes.data),
            write(store, layer, buffer),
        )[1],
    )
    with engine.borrow("opt_state", RANK, 3, "update") as views:
        address = views[0].ctypes.data
        assert (views[0] == 3).all()
    assert written == [address]
    with engine.borrow("opt_state", RANK, 3) as views:
        assert (views[0] == 3).all()
    assert written == [address]  # a record that was only read is not written
    engine.close()


def test_what_ends_by_an_error_is_not_written_and_gives_its_buffer_back(folder):
    engine = in_place(HeldIo(), folder, distance=0)
    for mode in ("read", "update", "write"):
        for _ in range(5):  # more often than there are buffers
            with (
                pytest.raises(ZeroDivisionError),
                engine.borrow("opt_state", RANK, 1, mode) as views,
            ):
                views[0][...] = 1 / 0
    assert engine.take_stats().bytes_written == 0
    assert got(engine, 1, "opt_state") == 1
    engine.close()


@pytest.mark.parametrize("layers", [1, 3, LAYERS])
def test_slow_writes_of_records_updated_in_place_leave_buffers_to_read_ahead(folder, layers):
    """As many writes may be in flight as a write ring would hold.

    The next write then waits for the disk, and no read does.
    """
    io = HeldIo()
    engine, ended = in_place(io, folder, distance=1, layers=layers), threading.Event()
    io.reads.clear()
    engine.begin([move for move in UPDATES if move.layer < layers])
    io.held = []

    def run():
        for layer in range(layers):
            add_one(engine, layer)
        ended.set()

    worker = threading.Thread(target=run)
    worker.start()
    for _ in range(20):  # reads end, writes do not
        ended.wait(0.01)
        io.release("read")
    written = [layer for name, layer, *_ in io.held if name == "write"]
    assert written == [0, 1][:layers]
    assert (
        io.reads == [0, 1, 2, 3][:layers]
    )  # layer 2 is in use or waits to be written, and layer 3 was read meanwhile
    assert ended.is_set() == (layers == 1)
    while not ended.wait(0.01):
        io.release()
    worker.join()
    while io.held:
        io.release()
    io.held = None
    engine.flush()
    assert [got(engine, layer, "opt_state") for layer in range(layers)] == [
        layer + 1 for layer in range(layers)
    ]
    engine.close()


def test_a_record_alone_in_its_ring_is_read_ahead_when_its_write_is_done(folder):
    io = HeldIo()
    engine = in_place(io, folder, distance=2, layers=1)
    moves = [Move("opt_state", 0), Move("opt_state", 0, True)]
    engine.begin(moves)
    io.held = []
    add_one(engine, 0)  # its only buffer is in flight to the disk
    engine.begin(moves)
    assert [name for name, *_ in io.held] == ["write"]
    io.release()
    assert [name for name, *_ in io.held] == ["read"]
    io.release()
    io.held = None
    assert got(engine, 0, "opt_state") == 1
    assert engine.take_stats().misses == 0
    engine.close()


def test_what_is_skipped_is_neither_read_nor_waited_for(folder):
    io = HeldIo()
    engine = in_place(io, folder, distance=1)
    io.reads.clear()
    engine.begin(UPDATES)
    for layer in range(3):
        engine.skip("opt_state", RANK, layer, "update")
    assert engine._lanes[RANK].window.position == 6
    assert io.reads == [0, 1, 2, 3]  # ahead, one at a time, and forgotten
    add_one(engine, 3)
    assert engine.take_stats().misses == 0
    assert [got(engine, layer, "opt_state") for layer in range(LAYERS)] == [0, 1, 2, 4, 4]
    engine.close()


@pytest.mark.parametrize("name", ["read", "write"])
def test_an_error_of_a_record_updated_in_place_is_kept(folder, name):
    io = HeldIo()
    engine = in_place(io, folder, distance=0)

    def fail(store, layer, buffer):
        done = Future()
        done.set_exception(SwapError("the disk failed", file="f", layer=layer, errno=errno.EIO))
        return done

    setattr(io, name, fail)
    if name == "read":
        with pytest.raises(SwapError, match="the disk failed"):
            add_one(engine, 2)
    else:
        add_one(engine, 2)  # handed over: the next call reports the error
        with pytest.raises(SwapError, match="the disk failed"):
            add_one(engine, 3)
        assert engine.failed
    records = engine._lanes[RANK].records["opt_state"]
    assert records.buffers.reads.free == records.buffers.reads.num_buffers
    engine.close()


def in_threads(ranks, run):
    """Call `run(rank)` for all ranks concurrently; no call hangs or raises."""
    errors = []

    def caught(rank):
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors


def test_many_threads_and_a_real_disk(folder):
    """Two kinds on three devices concurrently: every value is the last one stored.

    Nothing hangs.
    """
    kinds, ranks, rounds = ("params", "opt_state"), (0, 1, 2), 20
    engine = Engine(DirectIo(IoSettings(3, 4096)), 2, pin="none")
    for rank in ranks:
        for kind in kinds:
            engine.add(kind, rank, Store(folder.path, kind, rank, LAYERS, FORMAT))
            for layer in range(LAYERS):
                engine.store(kind, rank, layer, fill(layer))
    moves = [Move(k, layer, w) for layer in range(LAYERS) for w in (False, True) for k in kinds]

    def run(rank):
        for round_ in range(1, rounds):
            for kind, layer, writes in moves:
                if writes:
                    engine.store(kind, rank, layer, fill(round_ + layer))
                    continue

                def check(views, layer=layer, round_=round_):
                    assert all((v == np.float32(round_ + layer - 1)).all() for v in views)

                engine.fetch(kind, rank, layer, check)

    engine.begin(moves)
    in_threads(ranks, run)
    engine.flush()
    stats = engine.take_stats()
    assert stats.bytes_written == len(ranks) * len(kinds) * LAYERS * rounds * FORMAT.padded_bytes
    engine.close()


class SlowIo:
    """A disk that takes up to two milliseconds longer, so that transfers end in any order."""

    def __init__(self) -> None:
        self.disk, self.random = DirectIo(IoSettings(3, 4096)), np.random.default_rng(0)
        self.late = ThreadPoolExecutor(4)

    def read(self, store, layer, buffer):
        return self.late.submit(
            self._move, self.disk.read, store, layer, buffer, self.random.uniform(0, 0.002)
        )

    def write(self, store, layer, buffer):
        return self.late.submit(
            self._move, self.disk.write, store, layer, buffer, self.random.uniform(0, 0.002)
        )

    def _move(self, move, store, layer, buffer, seconds):
        time.sleep(seconds)
        return move(store, layer, buffer).result()

    def close(self):
        self.late.shutdown()
        self.disk.close()


@pytest.mark.by_default(
    "0-5-one_buffer_of_each_kind", "1-2-as_many_buffers_as_needed", "3-5-one_buffer_of_each_kind"
)
@pytest.mark.parametrize(
    "fewest", [False, True], ids=["as_many_buffers_as_needed", "one_buffer_of_each_kind"]
)
@pytest.mark.parametrize(
    ("distance", "layers"), [(0, 1), (0, LAYERS), (1, 2), (2, LAYERS), (3, 1), (3, 2), (3, LAYERS)]
)
def test_records_in_any_order_from_a_slow_disk(folder, monkeypatch, distance, layers, fewest):
    """Reads, updates and writes that the sequence of moves does not predict are late.

    They are never wrong and never hang.
    """
    if fewest:
        monkeypatch.setattr(
            "host_offload.engine.engine.num_buffers",
            lambda distance, num_layers, in_place: 1 if in_place else 2,
        )
    random, ranks, modes = (
        np.random.default_rng(0),
        (0, 1),
        {"params": ["read", "write"], "opt_state": ["read", "update", "write"]},
    )
    engine = Engine(SlowIo(), distance, pin="none")
    for rank in ranks:
        for kind in modes:
            engine.add(
                kind,
                rank,
                Store(folder.path, kind, rank, layers, FORMAT),
                in_place=kind == "opt_state",
            )
            for layer in range(layers):
                engine.store(kind, rank, layer, fill(0))
    moves = [
        Move(kind, layer, writes)
        for layer in range(layers)
        for writes in (False, True)
        for kind in modes
    ]
    calls = [
        (move.kind, move.layer, "write" if move.writes else "read") for move in moves
    ]  # as predicted
    for kind in random.choice(list(modes), 150):
        calls.append((str(kind), int(random.integers(layers)), str(random.choice(modes[kind]))))

    def run(rank):
        expected = dict.fromkeys(((kind, layer) for kind in modes for layer in range(layers)), 0)
        for number, (kind, layer, mode) in enumerate(calls):
            with engine.borrow(kind, rank, layer, mode) as views:
                assert mode == "write" or all((v == expected[kind, layer]).all() for v in views)
                if mode != "read":
                    expected[kind, layer] = (
                        expected[kind, layer] + 1 if mode == "update" else number % 64
                    )
                    for v in views:
                        v[...] = expected[kind, layer]

    engine.begin(moves)
    in_threads(ranks, run)
    engine.flush()
    engine.reset()
    rings = [
        ring
        for lane in engine._lanes.values()
        for records in lane.records.values()
        for ring in (records.buffers.reads, records.buffers.writes)
    ]
    deadline = time.monotonic() + 10  # a buffer is returned just after its write is done
    while any(ring.free < ring.num_buffers for ring in rings):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    engine.close()


SIZES = (5, 700, 1024, 3, 900, 2048, 1)
"""Numbers of elements in the records of kinds that share buffers."""


@pytest.mark.by_default("two_rings-1", "in_place-0", "in_place-3")
@pytest.mark.parametrize("distance", [0, 1, 3])
@pytest.mark.parametrize("in_place", [False, True], ids=["two_rings", "in_place"])
def test_kinds_of_one_record_share_buffers(folder, in_place, distance):
    """Two callers per device, records of many sizes, and a slow disk.

    In turn and in any order, nothing is wrong and nothing hangs.
    """
    engine, kinds = (
        Engine(SlowIo(), distance, pin="none"),
        [f"opt_state.{i}" for i in range(len(SIZES))],
    )
    formats = [
        RecordFormat((LeafFormat("m", (n,), "float32"), LeafFormat("v", (n,), "float32")))
        for n in SIZES
    ]
    largest = max(f.padded_bytes for f in formats)
    for rank in (0, 1):
        for kind, form in zip(kinds, formats, strict=True):
            engine.add(
                kind,
                rank,
                Store(folder.path, kind, rank, 1, form),
                in_place=in_place,
                shared_bytes=largest,
            )
            engine.store(kind, rank, 0, fill(0))
    assert engine.buffer_bytes == 2 * 2 * (distance + 1) * largest
    engine.begin([Move(kind, 0, writes) for kind in kinds for writes in (False, True)])

    def run(caller):
        rank, part = caller
        random, expected = np.random.default_rng(caller), dict.fromkeys(kinds[part::2], 0)
        for number in range(120):
            kind = (
                kinds[part::2][number % len(expected)]
                if number < 30
                else str(random.choice(list(expected)))
            )
            mode = "write" if not in_place else "update"
            with engine.borrow(kind, rank, 0, "read") as views:
                assert all((v == expected[kind]).all() for v in views)
            with engine.borrow(kind, rank, 0, mode) as views:
                expected[kind] = number % 64
                for v in views:
                    v[...] = expected[kind]

    in_threads([(rank, part) for rank in (0, 1) for part in (0, 1)], run)
    engine.flush()
    engine.remove(kinds[0])
    with engine.borrow(kinds[1], 0, 0, "read"):  # the other records keep their buffers
        assert engine.buffer_bytes == 2 * 2 * (distance + 1) * largest
    for kind in kinds[1:]:
        engine.remove(kind)
    assert engine.buffer_bytes == 0
    engine.close()
