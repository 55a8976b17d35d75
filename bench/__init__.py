"""Measurements. `python -m bench` runs them; the figures are ratios within one run, the machine cancels out."""
