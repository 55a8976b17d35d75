"""Run the command line as `python -m durable_actors.cli`."""

from durable_actors.cli import main

if __name__ == "__main__":
    main()
