"""Durable state machines and jobs on Trio and Postgres.

Layout, top to bottom; imports go down only (ARCHITECTURE.md has the map)::

    cli, testing                leaves: nothing imports them
    _store                      every SQL statement, one function each; migrations
    otp, machine, _postgres     three islands: actors · the state-machine language · psycopg on Trio
    config, errors              values
"""

from durable_actors._version import __version__

__all__ = ["__version__"]
