"""Embedded Postgres: a real server, no installation needed."""
