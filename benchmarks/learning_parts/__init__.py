"""The task of `benchmarks/learning.py`, and its runs with zerojax and with PEFT and TRL."""
