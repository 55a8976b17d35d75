"""Runs psycopg's own asynchronous test-suite on TrioConnection. See `__main__`."""
