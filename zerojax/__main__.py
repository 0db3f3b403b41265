"""`python -m zerojax`."""

from zerojax.cli import main

main()
