"""Show a run: bars and lines on a terminal, writers of figures, and a report on one page."""

from zerojax.reporting.display import bars as bars
from zerojax.reporting.run import Run as Run
from zerojax.reporting.speed import peak_flops as peak_flops
from zerojax.reporting.writers import import_writers as import_writers
