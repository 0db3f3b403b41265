"""Plans: which config fits a machine and is fastest, and how long its step takes, before a build.

`plan` searches the configs of a model, or of numbers alone (`Sizes`), for the fastest config that
fits. It combines the figures of a machine (`zerojax.machines`), the costs of a step
(`zerojax.costs`) and an exact choice among keeping, offloading and recomputing (`zerojax.choice`).
The parts of these packages that users need are also exported here, as are the drawing parts that
`zerojax.reporting` uses.
"""

from zerojax.costs import OFFLOADED as OFFLOADED
from zerojax.costs import Sizes as Sizes
from zerojax.costs import activations_working_bytes as activations_working_bytes
from zerojax.costs import arithmetic_intensity as arithmetic_intensity
from zerojax.costs import bandwidth_for as bandwidth_for
from zerojax.costs import efficiency as efficiency
from zerojax.costs import flops_per_token as flops_per_token
from zerojax.costs import hardware_flops_per_token as hardware_flops_per_token
from zerojax.costs import largest_params as largest_params
from zerojax.costs import offload_cut as offload_cut
from zerojax.costs import states_working_bytes as states_working_bytes
from zerojax.machines import FIGURES as FIGURES
from zerojax.machines import NAMED as NAMED
from zerojax.machines import Link as Link
from zerojax.machines import Machine as Machine
from zerojax.machines import ProbeSizes as ProbeSizes
from zerojax.machines import machine as machine
from zerojax.machines import machine_of as machine_of
from zerojax.machines import measure_link as measure_link
from zerojax.machines import probe as probe
from zerojax.machines import report as report
from zerojax.planner.charts import element as element
from zerojax.planner.charts import round_ticks as round_ticks
from zerojax.planner.charts import text as text
from zerojax.planner.command import run_plan as run_plan
from zerojax.planner.planner import auto as auto
from zerojax.planner.planner import plan as plan
from zerojax.planner.planner import plan_uniform as plan_uniform
from zerojax.planner.plans import Plan as Plan
from zerojax.planner.plans import PlanError as PlanError
from zerojax.planner.plans import changed as changed
from zerojax.planner.tuning import Tuned as Tuned
from zerojax.planner.tuning import autotune as autotune
from zerojax.planner.validate import validated as validated
from zerojax.planner.watch import StepWatch as StepWatch
