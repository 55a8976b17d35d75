"""psycopg on Trio: driver, pool, `TrioConnection`, embedded server. It knows no table."""
