"""The parts of `benchmarks/beside_plain.py`: what zerojax does, beside a plain program that does the same."""
