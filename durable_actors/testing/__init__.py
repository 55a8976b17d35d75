"""Helpers for testing code that uses durable_actors, on a real Postgres."""
