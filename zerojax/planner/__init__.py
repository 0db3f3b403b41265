"""What fits and how fast: the bandwidth of a disk, and the models that it supports."""

from zerojax.planner.disk import report as report
