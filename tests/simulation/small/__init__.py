"""The small simulation: several small nodes in one Trio run, in virtual time, with seeded faults.

A node is the product's tree and everything in it, on simulated connections. The store is that of the large simulation:
the same tables, the same meaning of each statement, the same checks. A schedule takes milliseconds, so that a minute
holds thousands; what it cannot see, the whole engines in `tests.simulation` can.

    python -m tests.simulation.small --seed 7          one schedule, with its history when it fails
    python -m tests.simulation.small --seconds 60      as many as a minute holds
"""
