"""The longest sequence that fits a machine, found by bisection."""

from zerojax.planner.lengths.longest import BLOCK as BLOCK
from zerojax.planner.lengths.longest import block_of as block_of
from zerojax.planner.lengths.longest import find_longest as find_longest
from zerojax.planner.lengths.longest import with_length as with_length
