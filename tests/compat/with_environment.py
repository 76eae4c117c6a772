"""Run a script, unchanged, with variables that a run does not have: `with_environment.py NAME=VALUE ... SCRIPT ...`."""

import os
import runpy
import sys

del sys.argv[0]  # as if the script had been started itself
while "=" in sys.argv[0]:
    name, _, value = sys.argv.pop(0).partition("=")
    os.environ[name] = value
runpy.run_path(sys.argv[0], run_name="__main__")
