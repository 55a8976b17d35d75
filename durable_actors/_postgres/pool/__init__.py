"""The connection pool: lanes that cannot starve each other."""
