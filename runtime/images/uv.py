"""Run uv with the configuration of pip: `python -m runtime.images.uv pip install -r requirements/base.txt`.

pip's configuration names a machine's wheel folders, indexes and certificates. uv does not read it. This module uses
only the standard library, because `make setup` runs it when only pip and uv are installed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

# The variable that gives a setting to uv, by the name of pip's option for that setting.
_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
# uv separates the values of these options by commas, and all others by spaces; pip uses white space.
_COMMA_SEPARATED = {"find-links"}


def executable() -> str:
    """Return the path of the uv beside this interpreter. Raises FileNotFoundError where there is none."""
    path = Path(sys.executable).with_name("uv")
    if not path.exists():
        raise FileNotFoundError(f"uv is not installed beside {sys.executable}. Run: pip install uv")
    return str(path)


def environment(configuration: str | None = None) -> dict[str, str]:
    """Return variables that give the settings of pip to uv, without variables that this process has already.

    `configuration` is the output of `pip config list`; None runs that command.
    """
    if configuration is None:
        command = [sys.executable, "-m", "pip", "config", "list"]
        configuration = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # later sections override earlier ones, as in pip
        for line in configuration.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                settings[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    variables = {
        _VARIABLES[name]: ("," if name in _COMMA_SEPARATED else " ").join(value.split())
        for name, value in settings.items()
        if name in _VARIABLES
    }
    # pip takes the best version of all its indexes; uv would take a package from the first index that has it.
    variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in variables.items() if value and name not in os.environ}


def main(arguments: list[str]) -> None:
    """Replace this process by uv with these arguments."""
    program = executable()
    os.execve(program, [program, *arguments], {**os.environ, **environment()})  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
