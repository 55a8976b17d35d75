"""psycopg driven by Trio; knows no table."""
