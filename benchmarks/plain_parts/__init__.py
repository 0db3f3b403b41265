"""The parts of `benchmarks/beside_plain.py`, each of which compares zerojax with plain programs
that do the same work.
"""
