"""Benchmarks: `python -m bench.otp` and friends. Ratios within one run, never absolute numbers."""
