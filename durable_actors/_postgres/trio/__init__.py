"""`TrioConnection`: psycopg's own interface on Trio."""
