"""Memory sizes and rates of machines, by name, from files or measured; what a disk can train."""

from zerojax.machines.disk import report as report
from zerojax.machines.machines import COUNTS as COUNTS
from zerojax.machines.machines import FIGURES as FIGURES
from zerojax.machines.machines import Machine as Machine
from zerojax.machines.machines import MissingFigureError as MissingFigureError
from zerojax.machines.machines import format_bytes as format_bytes
from zerojax.machines.machines import nearest as nearest
from zerojax.machines.named_machines import NAMED as NAMED
from zerojax.machines.named_machines import machine as machine
from zerojax.machines.named_machines import machine_of as machine_of
from zerojax.machines.probe import Link as Link
from zerojax.machines.probe import ProbeSizes as ProbeSizes
from zerojax.machines.probe import measure_link as measure_link
from zerojax.machines.probe import probe as probe
from zerojax.machines.probe import probe_memories as probe_memories
