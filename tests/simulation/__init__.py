"""Simulation: the real engine, many nodes, one thread, virtual time, seeded faults.

Each node is a Trio run of its own (a guest run: `process`), with a clock that the world moves. Everything above the
driver is the product itself: tree, feeder, step tasks, flusher, heartbeat, keeper, reaper, pool, client, store
functions. Below it, in place of libpq and Postgres, are `driver`, `server` and `tables`: they carry out what the
statements mean, atomically, and lose requests, replies, sessions and servers on the way.

    python -m tests.simulation --seed 7          one schedule, with its history when it fails
    python -m tests.simulation --seconds 60      as many as a minute holds
"""
