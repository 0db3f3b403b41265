"""Count the Python calls, by function, of a warm step with all states on disk.

The states are parameters, gradients and optimizer state. Counted are the calls of zerojax and
host_offload in the program's callbacks, for which a GPU waits, and in the threads that move
records. Between two callbacks Python does not know XLA's threads, so each callback sets the profile
function itself: `buffer_callback` is wrapped, which must happen before zerojax is imported. The
interleaving of the threads changes the count by two percent.
"""

import collections
import functools
import importlib
import os
import pathlib
import re
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import buffer_callback

PACKAGES = ("zerojax", "host_offload")
WARM, STEPS = 4, 15
Call = tuple[bool, str, str]
"""Whether a callback or a transfer made the call, the file, and the function."""
Counts = collections.Counter[Call]


class Calls:
    """Counter of Python calls in all threads, active while `counts` is set."""

    def __init__(self) -> None:
        """Set the profile function for new threads, and wrap `buffer_callback`."""
        self.counts: Counts | None = None
        beside = functools.partial(self._count, True)
        threading.setprofile(beside)  # applies to every thread that Python starts
        make = buffer_callback.buffer_callback

        def counted(callback: Callable[..., Any], *args: Any, **options: Any) -> Any:
            # Runs in a thread of XLA or, on one device, in the step's own thread.
            def run(*given: Any, site: Any = None) -> Any:
                del site
                before = sys.getprofile()
                sys.setprofile(beside)
                try:
                    return callback(*given)
                finally:
                    sys.setprofile(before)

            # `host_offload.calls.find_site` looks for the site here.
            known = functools.partial(run, site=getattr(callback, "keywords", {}).get("site"))
            return make(known, *args, **options)

        buffer_callback.buffer_callback = counted

    def _count(self, is_beside: bool, frame: Any, event: str, argument: Any) -> None:
        del argument
        if self.counts is not None and event == "call":
            self.counts[is_beside, frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def of(self, call: Callable[[], Any]) -> tuple[Any, Counts]:
        """Return the result of `call`, and the Python calls in all threads during it."""
        counts: Counts = collections.Counter()
        self.counts, before = counts, sys.getprofile()
        sys.setprofile(functools.partial(self._count, False))
        try:
            return call(), counts
        finally:
            sys.setprofile(before)
            self.counts = None


def count_calls() -> dict[str, Any]:
    """Return the calls of a warm step of 3 layers on one device.

    Several steps are counted, and the step with the median number of calls is returned. "record
    formats" counts the calls that recompute the sizes and offsets of records.
    """
    calls = Calls()
    import same_toys  # and zerojax

    import zerojax as zj

    random, counted = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as folder:
        config = zj.ZeroConfig(
            stage=3, params="nvme", grads="nvme", opt_state="nvme", swap_dir=folder
        )
        mesh = zj.make_mesh(devices=jax.devices()[:1])
        with zj.build_train_step(same_toys.matrices(), optax.adamw(1e-3), config, mesh) as program:
            state = program.init(jax.random.key(0))
            for i in range(WARM + STEPS):
                batch = program.shard_batch({"x": random.standard_normal((8, 8), dtype=np.float32)})
                (state, _), found = calls.of(functools.partial(program.step, state, batch))
                counted += [found] if i >= WARM else []
    ordered = sorted((ours(counts, True) for counts in counted), key=lambda found: found.total())
    middle = ordered[len(ordered) // 2]
    sizes = re.compile(r"record_format\.py .*(offsets|num_bytes|padded_bytes|_round_up)$")
    return {
        "calls": middle.total(),
        "range": [ordered[0].total(), ordered[-1].total()],
        "record formats": sum(n for name, n in middle.items() if sizes.search(name)),
        "of the caller": statistics.median_low(ours(counts, False).total() for counts in counted),
        "of all code": statistics.median_low(counts.total() for counts in counted),
        "by function": dict(middle.most_common()),
    }


def ours(counts: Counts, beside: bool) -> collections.Counter[str]:
    """Return the calls of the packages' functions, by file and function.

    Args:
      counts: calls of all functions.
      beside: whether to count calls in callbacks and transfers, or calls of the step's caller.
    """
    found: collections.Counter[str] = collections.Counter()
    for name in PACKAGES:
        root = str(pathlib.Path(importlib.import_module(name).__file__ or "").parent) + os.sep
        for (is_beside, file, function), count in counts.items():
            if is_beside == beside and file.startswith(root):
                found[f"{name}/{file.removeprefix(root)} {function}"] = count
    return found
