"""Records read ahead and written behind are the records that were stored, whatever is slow, early, full or broken."""

import errno
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from host_offload.direct_io import DirectIo, IoSettings
from host_offload.engine import Engine
from host_offload.read_ahead import Move
from host_offload.store import LeafFormat, RecordFormat, Store, SwapFolder
from host_offload.swap_error import SwapError

FORMAT = RecordFormat((LeafFormat("w", (3, 5), "float32"), LeafFormat("b", (7,), "bfloat16")))
RANK, LAYERS = 2, 5


class HeldIo:
    """A disk in memory whose transfers end when the test says so, or at once."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], np.ndarray] = {}
        self.held: list[tuple[str, int, Future, object]] | None = None
        self.reads: list[int] = []

    def read(self, store, layer, buffer):
        self.reads.append(layer)
        return self._do("read", store, layer, lambda: np.copyto(buffer, self.records[store.kind, layer]))

    def write(self, store, layer, buffer):
        return self._do("write", store, layer, lambda: self.records.update({(store.kind, layer): buffer.copy()}))

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
        """Let the transfers that wait, or those of one name, end."""
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


def test_a_read_waits_for_the_pending_write_of_its_record(folder):
    io = HeldIo()
    engine = engine_of(io, folder)
    put(engine, 1, 1)
    io.held = []
    put(engine, 1, 7)
    reader = threading.Thread(target=lambda: found.append(got(engine, 1)))
    found: list[float] = []
    reader.start()
    while io.held is not None and not found:  # what is let go at any moment, the value is the new one
        io.release()
    reader.join()
    assert found == [7]
    assert io.reads == [1]
    io.held = None
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
        if distance:  # the round after this one begins with the same records
            assert io.reads == [*range(LAYERS), *range(LAYERS)][: layer + 1 + distance]
    assert engine.take_stats().misses == (0 if distance else LAYERS)
    engine.close()


def test_what_was_read_ahead_is_forgotten_when_it_is_written(folder):
    io = HeldIo()
    engine = engine_of(io, folder, distance=2)
    for layer in range(LAYERS):
        put(engine, layer, 1)
    engine.flush()
    engine.begin([Move("params", layer) for layer in range(LAYERS)])
    assert io.reads == [0, 1]
    put(engine, 1, 9)  # no move says so
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
    for call in (lambda: put(engine, 2, 1), lambda: got(engine, 0), lambda: engine.begin(()), engine.check, engine.flush):
        with pytest.raises(SwapError, match="no space") as error:
            call()
        assert (error.value.layer, error.value.errno) == (1, errno.ENOSPC)
    assert engine.failed
    engine.reset()
    put(engine, 0, 3)
    assert got(engine, 0) == 3
    engine.close()


def test_many_threads_and_a_real_disk(folder):
    """Two kinds on three devices at once: every value is the last one stored, and nothing waits for ever."""
    kinds, ranks, rounds = ("params", "opt_state"), (0, 1, 2), 20
    engine = Engine(DirectIo(IoSettings(3, 4096)), 2, pin="none")
    for rank in ranks:
        for kind in kinds:
            engine.add(kind, rank, Store(folder.path, kind, rank, LAYERS, FORMAT))
    moves = [Move(k, layer, w) for layer in range(LAYERS) for w in (False, True) for k in kinds]
    errors = []

    def fill(value):
        return lambda views: [np.copyto(v, value) for v in views]

    def run(rank):
        try:
            for round_ in range(1, rounds):
                for kind, layer, writes in moves:
                    if writes:
                        engine.store(kind, rank, layer, fill(np.float32(round_ + layer)))
                        continue

                    def check(views, layer=layer, round_=round_):
                        assert all((v == np.float32(round_ + layer - 1)).all() for v in views)

                    engine.fetch(kind, rank, layer, check)
        except BaseException as error:
            errors.append(error)

    for rank in ranks:
        for kind in kinds:
            for layer in range(LAYERS):
                engine.store(kind, rank, layer, fill(np.float32(layer)))
    engine.begin(moves)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    engine.flush()
    stats = engine.take_stats()
    assert stats.bytes_written == len(ranks) * len(kinds) * LAYERS * rounds * FORMAT.padded_bytes
    engine.close()
