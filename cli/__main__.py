"""Run the command line as a module: `python -m cli`."""

from .main import main

main()
