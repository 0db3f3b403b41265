"""The ZeRO stages as a table (arXiv:1910.02054, section 5).

    stage  opt_state  grads   params  state bytes per device  elements moved per step
    0      full       full    full    16P                     2P  (all_reduce)
    1      sharded    full    full    4P + 12P/N              2P  (reduce_scatter, all_gather)
    2      sharded    shard   full    2P + 14P/N              2P  (reduce_scatter, all_gather)
    3      sharded    shard   shard   16P/N                   3P  (2 all_gather, reduce_scatter)

The builder reads a row; no other code asks for the stage. Under XLA a stage-1 gradient is
reduce-scattered where it is computed, like stage 2's: an unsharded gradient would cost an
all_reduce and save nothing. So rows 1 and 2 compile to the same program, with stage 2's memory; the
table gives the paper's bytes.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Which kinds of state are split over the axis `fsdp`."""

    opt_state: bool
    grads: bool
    params: bool


STAGES: Mapping[int, Stage] = MappingProxyType(
    {
        0: Stage(opt_state=False, grads=False, params=False),
        1: Stage(opt_state=True, grads=False, params=False),
        2: Stage(opt_state=True, grads=True, params=False),
        3: Stage(opt_state=True, grads=True, params=True),
    }
)
