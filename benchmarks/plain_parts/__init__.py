"""Parts of `benchmarks/beside_plain.py`, which compare zerojax with equivalent plain programs."""
