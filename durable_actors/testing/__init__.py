"""Pytest fixtures for code that uses durable_actors: a real Postgres, a fresh database per test.

`plugin` has the fixtures, `database` starts the server and makes the databases. Install `durable-actors[testing]`.
"""
