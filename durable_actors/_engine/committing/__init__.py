"""Committing: outcomes on their way into the database, and what follows a verdict."""
