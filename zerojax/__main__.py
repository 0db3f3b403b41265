"""Run the command line: `python -m zerojax`."""

from zerojax.cli import main

main()
