"""Every SQL statement of the engine, and the migrations."""
