"""`python -m durable_actors.cli`, where the script is not on the path."""

from durable_actors.cli import main

if __name__ == "__main__":
    main()
