"""Run the ``saccade`` command as ``python -m saccade``."""

from saccade.cli import main

if __name__ == "__main__":
    main()
