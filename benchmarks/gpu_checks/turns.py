"""Time mixes in turn with the resident step, so that a slow minute affects both."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from contenders import WARMUP

from gpu_checks.jobs import Job, one_device


class Timed(NamedTuple):
    """Result of `Turns.time`.

    Attributes:
      seconds: seconds of each step of the mix.
      resident: seconds of the resident steps between them.
      metrics: metrics of each step of the mix.
      to_device: bytes loaded over the host link per step, by `program.memory`.
      to_host: bytes stored over the host link per step, by `program.memory`.
    """

    seconds: list[float]
    resident: list[float]
    metrics: list[Mapping[str, float]]
    to_device: int
    to_host: int


class Turns:
    """A resident program, compiled and warm, that takes turns with others; a context manager."""

    def __init__(self, job: Job) -> None:
        """Build a job's program on the first device and run its warm-up."""
        import jax

        self.mesh, self.key = one_device(), jax.random.key(0)
        self.program = job.build(self.mesh)
        self.batches = [self.program.shard_batch(b) for b in job.data()]
        self.state = self._start(self.program)

    def _start(self, program: Any) -> Any:
        state = program.init(self.key)
        for _ in range(WARMUP):
            state, _, _ = step(program, state, self.batches[0])
        return state

    def time(self, job: Job, rounds: int) -> Timed:
        """Run `rounds` steps of a job's program and of the resident program in turn."""
        times, base_times, told = [], [], []
        with job.build(self.mesh) as program:
            link = program.memory(self.batches[0]).host_link
            state = self._start(program)
            for i in range(rounds):
                batch = self.batches[i % len(self.batches)]
                self.state, seconds, _ = step(self.program, self.state, batch)
                base_times.append(seconds)
                state, seconds, metrics = step(program, state, batch)
                times.append(seconds)
                told.append(metrics)
            del state
        return Timed(times, base_times, told, link["to_device"], link["to_host"])

    def __enter__(self) -> "Turns":
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the resident program and free its state."""
        self.program.close()
        del self.state


def step(program: Any, state: Any, batch: Any) -> tuple[Any, float, dict[str, float]]:
    """Run one step and return the new state, its seconds and its metrics."""
    import jax

    start = time.perf_counter()
    state, metrics = jax.block_until_ready(program.step(state, batch))
    seconds = time.perf_counter() - start
    return state, seconds, {name: float(value) for name, value in metrics.items()}
