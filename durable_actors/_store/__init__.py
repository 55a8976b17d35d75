"""Every SQL statement, and the migrations."""
