"""`trainyard`, the command line of a Trainyard console, and the typed client of its HTTP API.

It imports nothing of the console and is installed alone: `pip install ./cli`. The package is then `trainyard_cli`, so
its modules import each other relatively.
"""

VERSION = "0.2.0"
