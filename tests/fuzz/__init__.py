"""Bad input at every boundary. `python -m tests.fuzz 50` tries fifty times as much, at random."""
