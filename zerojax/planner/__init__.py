"""What fits and how fast, before anything is built: the question a user has when choosing a config and a machine.

A plan takes two things: the bytes of a model's state, which `memory` has in closed form, and the figures of a machine
(`Machine`), which are a vendor's, assumed or measured, and say which. `report` is the plan of one folder's disk: the largest
model that it holds, and the seconds of a step.
"""

from zerojax.planner.disk import report as report
from zerojax.planner.flops import flops_per_token as flops_per_token
from zerojax.planner.flops import hardware_flops_per_token as hardware_flops_per_token
from zerojax.planner.machines import FIGURES as FIGURES
from zerojax.planner.machines import UNITS as UNITS
from zerojax.planner.machines import Machine as Machine
from zerojax.planner.named_machines import NAMED as NAMED
from zerojax.planner.named_machines import machine as machine
from zerojax.planner.named_machines import machine_of as machine_of
from zerojax.planner.probe import Link as Link
from zerojax.planner.probe import ProbeSizes as ProbeSizes
from zerojax.planner.probe import measure_link as measure_link
from zerojax.planner.probe import probe as probe
