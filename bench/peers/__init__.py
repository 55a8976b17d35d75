"""Peers, each through its public API with its best published settings. Nothing here imports durable_actors."""
