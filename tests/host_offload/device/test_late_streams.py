"""Steps of an engine on a GPU that is late.

Each wait between streams, disk and buffers is needed, and none blocks the host.
"""

import time
from concurrent.futures import Future

import numpy as np
import pytest
from test_copies import FORMAT, Gpu, empty

from host_offload.disk.store import Store
from host_offload.engine.engine import Engine
from host_offload.schedule.moves import Move

LAYERS, ENDS, STEPS = 4, 3, 3
WAITS = {
    # each wait, and the stream that must be late to show that it is missing
    "the copy up for the slot to be read": "program",
    "the program for the copy up": "copies",
    "the program for the slot to be copied down": "copies",
    "the copy down for the slot to be filled": "program",
    "a buffer for its copy up": "copies",
    "a buffer for its copy on the program's stream": "program",
    "the disk for the copy down": "copies",
    "the disk for the copy on the program's stream": "program",
}


class Memory:
    """A disk whose transfers end immediately."""

    def __init__(self):
        self.records = {}

    def read(self, store, layer, buffer):
        return self._done(buffer, self.records[store.kind, layer])

    def write(self, store, layer, buffer):
        target = self.records.setdefault((store.kind, layer), np.zeros_like(buffer))
        return self._done(target, buffer)

    def _done(self, target, source):
        np.copyto(target, source)
        done = Future()
        done.set_result(0.0)
        return done

    def close(self):
        pass


def without(gpu, name, monkeypatch):
    """Remove a wait."""
    copies, wait = gpu.copies, gpu.driver.wait
    done = Future()
    done.set_result(None)

    def never(stream, event):
        slot_up, slot_down = copies._up["params", 0], copies._down["params", 0]
        roles = {
            (gpu.up, slot_up.empty): "the copy up for the slot to be read",
            (gpu.stream, slot_up.full): "the program for the copy up",
            (gpu.stream, slot_down.empty): "the program for the slot to be copied down",
            (gpu.down, slot_down.full): "the copy down for the slot to be filled",
        }
        if roles[stream, event] != name:
            wait(stream, event)

    def at_once(verb, role):
        call = getattr(copies, verb)

        def run(context, kind, rank, views, buffers):
            args = (kind, rank, views, buffers) if verb == "load" else (kind, rank, buffers, views)
            result = call(context, *args)
            return done if (kind == "params") == ("stream" not in role) else result

        return lambda context, kind, rank, a, b: run(
            context, kind, rank, *((a, b) if verb == "load" else (b, a))
        )

    monkeypatch.setattr(gpu.driver, "wait", never)
    if name and name.startswith("a buffer"):
        monkeypatch.setattr(copies, "load", at_once("load", name))
    if name and name.startswith("the disk"):
        monkeypatch.setattr(copies, "save", at_once("save", name))


LATER = (0.004, 0.04, 0.2)
"""Seconds by which operations of the late stream are late.

The longer ones are for busy machines, on which the other streams may be as late as the shortest.
"""


def replay(folder, late, monkeypatch, name=None, seconds=LATER[0]):
    """Run steps that add 1 to every record.

    Returns whether the disk is correct, and the waits of a step.
    """
    gpu, disk = Gpu(delay=0), Memory()
    without(gpu, name, monkeypatch)
    kinds = ["params", *(f"end.{i}" for i in range(ENDS))]
    layers = {kind: LAYERS if kind == "params" else 1 for kind in kinds}
    moves = [
        Move(kind, layer, writes)
        for kind in kinds
        for layer in range(layers[kind])
        for writes in (False, True)
    ]
    engine = Engine(disk, 1, pin="none", copies=gpu.copies)
    for n, kind in enumerate(kinds):
        shared = 0 if kind == "params" else FORMAT.padded_bytes
        slots = kind == "params"
        engine.add(
            kind,
            0,
            Store(str(folder), kind, 0, layers[kind], FORMAT),
            up=slots,
            down=slots,
            shared_bytes=shared,
        )
        for layer in range(layers[kind]):
            buffer, views = empty()
            for view in views:
                view[...] = 10 * n + layer
            disk.records[kind, layer] = buffer
    gpu.cuda.late = dict.fromkeys(
        [gpu.stream] if late == "program" else [gpu.up, gpu.down], seconds
    )
    if late == "program":
        gpu.cuda._queue(gpu.stream, lambda: time.sleep(5 * seconds))
    for _ in range(STEPS):
        engine.begin(moves)
        for kind in kinds:
            for layer in range(layers[kind]):
                values = gpu.values(-1)
                engine.fetch(
                    kind,
                    0,
                    layer,
                    lambda v, k=kind, b=values: gpu.copies.load(gpu.context, k, 0, v, b),
                )

                def add(values=values):
                    for buffer in values:
                        buffer.array += np.ones((), buffer.array.dtype)

                gpu.cuda._queue(gpu.stream, add)
                engine.store(
                    kind,
                    0,
                    layer,
                    lambda v, k=kind, b=values: gpu.copies.save(gpu.context, k, 0, b, v),
                )
                gpu.cuda._queue(
                    gpu.stream, lambda b=values: [buffer.array.fill(99) for buffer in b]
                )
    waited = list(gpu.cuda.finished)
    for stream in (
        gpu.stream,
        gpu.up,
        gpu.down,
    ):  # even if a wait is missing, the memory exists until it is no longer used
        gpu.driver.finish_stream(stream)
    engine.flush()
    engine.close()
    gpu.driver.destroy_stream(gpu.stream)
    leaves = {
        key: [leaf.astype(np.float32) for leaf in FORMAT.views(buffer)]
        for key, buffer in disk.records.items()
    }
    first = {
        key: {float(leaf.flat[i]) for leaf in of_record for i in (0, -1)}
        for key, of_record in leaves.items()
    }
    expected = {
        (kind, layer): {10.0 * n + layer + STEPS}
        for n, kind in enumerate(kinds)
        for layer in range(layers[kind])
    }
    return first == expected, waited


@pytest.mark.parametrize("late", ["program", "copies"])
def test_records_are_right_whichever_stream_is_late_and_no_stream_is_waited_for(
    late, tmp_path, monkeypatch
):
    assert replay(tmp_path, late, monkeypatch) == (True, [])


@pytest.mark.parametrize("name", WAITS)
def test_without_a_wait_records_are_wrong(name, tmp_path, monkeypatch):
    def is_right(seconds):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        with monkeypatch.context() as patched:
            return replay(folder, WAITS[name], patched, name, seconds)[0]

    assert not all(map(is_right, LATER))
