"""What fits and how fast, before anything is built: the question a user has when choosing a config and a machine.

A plan takes two things: the bytes of a model's state, which `memory` has in closed form, and the rates of the machine, which
are measured. Today there is one plan, `report`: a folder's disk, the largest model that it holds, and the seconds of a step.
"""

from zerojax.planner.disk import report as report
