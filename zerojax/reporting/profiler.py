"""A profile of a few steps by `jax.profiler`, for TensorBoard or XProf."""

import logging
from collections.abc import Callable

import jax

FIRST = 2
"""Number of steps before the profiled ones; the first one compiles."""
logger = logging.getLogger("zerojax")


class Profiler:
    """Traces steps from the third one on."""

    def __init__(self, folder: str, num_steps: int) -> None:
        """Set up a profile.

        Args:
          folder: folder of the profile.
          num_steps: number of steps to trace; 0 for no profile.
        """
        self._folder = folder
        self._num_steps = num_steps
        self._is_running = False

    def step(self, count: int, flush: Callable[[], None], log: Callable[[str], None]) -> None:
        """Start or stop the trace, if the next step is the first one in it or after it.

        Args:
          count: number of steps started so far.
          flush: function that waits for these steps, so that a trace has complete steps.
          log: function that prints where the profile is.
        """
        if not self._num_steps:
            return
        if count == FIRST:
            flush()
            jax.profiler.start_trace(self._folder)
            self._is_running = True
        elif count == FIRST + self._num_steps:
            flush()
            self.stop(log)

    def stop(self, log: Callable[[str], None]) -> None:
        """Stop the trace if it runs, and print where it is."""
        if not self._is_running:
            return
        self._is_running = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # such as a full disk, as JAX or its profiler reports it
            logger.warning("the profile could not be written to %s: %s", self._folder, error)
            return
        log(
            f"a profile is in {self._folder}: tensorboard --logdir {self._folder}, with the "
            "package xprof"
        )
