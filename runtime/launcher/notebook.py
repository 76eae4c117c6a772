"""The platform's script that runs a notebook: JupyterLab, listening on a Unix socket in RUN_DIR.

    notebook.py IDLE_SECONDS [PORT]

JupyterLab ends after IDLE_SECONDS without activity. In a pod it listens on PORT of 127.0.0.1 instead of the socket,
because a Unix socket on shared storage cannot be reached from another machine.

JupyterLab asks for no token, because only two can connect to it: processes in the run's sandbox or pod, and the console
on behalf of the organization's members. The console also checks the origin of each request and removes cookies. Without
cookies, JupyterLab's own check of a cookie against a form field (XSRF) cannot work, so it is off.
"""

import importlib
import importlib.util
import json
import os
import sys
from datetime import datetime, timezone

TYPE_CHECKING = False  # type checkers take it for True
if TYPE_CHECKING:
    from typing import Any, List

SOCKET = "notebook.sock"
"""The socket's name in RUN_DIR, where the local backend finds it."""
AUTOSAVE_SECONDS = 30
"""Interval at which JupyterLab saves a changed file, so that little is lost when a notebook ends. Its default is 120 s.
"""


def options(idle_seconds: int, folder: str, run_dir: str, port: int = 0) -> "List[str]":
    """Return JupyterLab's options for the notebooks in `folder`. With a port, it listens on no socket in `run_dir`."""
    if port:
        # No retries: the console would not find another port.
        address = {"ServerApp.ip": "127.0.0.1", "ServerApp.port": str(port), "ServerApp.port_retries": "0"}
    else:
        address = {"ServerApp.sock": os.path.join(run_dir, SOCKET), "ServerApp.sock_mode": "0600"}
    settings = {
        "ServerApp.root_dir": folder,
        "ServerApp.open_browser": "False",
        "ServerApp.allow_root": "True",  # in its sandbox only
        "ServerApp.allow_remote_access": "True",  # the Host header has the console's name for the notebook
        "ServerApp.disable_check_xsrf": "True",
        "IdentityProvider.token": "",
        # Makes JupyterLab call `shutdown_no_activity` once a minute: see `end_when_idle`.
        "ServerApp.shutdown_no_activity_timeout": str(idle_seconds),
        "LabApp.extension_manager": "readonly",  # the default one searches PyPI, which a sandbox cannot reach
    }
    return ["--{}={}".format(name, value) for name, value in {**address, **settings}.items()]


def end_when_idle() -> None:
    """Make JupyterLab end when idle even if a browser tab is open, since a forgotten tab would cost its owner money.

    Activity is a running cell, the output of a cell, the input of a terminal, and a change of a file. JupyterLab's own
    rule waits until all kernels are closed. It also counts the requests by which an open tab polls and saves its layout
    every few seconds.
    """
    APIHandler = importlib.import_module("jupyter_server.base.handlers").APIHandler  # noqa: N806 - a class
    ServerApp = importlib.import_module("jupyter_server.serverapp").ServerApp  # noqa: N806 - a class
    count_activity = APIHandler.update_api_activity

    def update_api_activity(handler: "Any") -> None:
        # The layout is saved below `/lab/api/`, so saving it does not count.
        if handler.request.method not in ("GET", "HEAD", "OPTIONS") and handler.request.path.startswith("/api/"):
            count_activity(handler)

    def shutdown_no_activity(app: "Any") -> None:
        if any(kernel["execution_state"] == "busy" for kernel in app.kernel_manager.list_kernels()):
            return
        idle_seconds = (datetime.now(timezone.utc) - app.web_app.last_activity()).total_seconds()
        if idle_seconds > app.shutdown_no_activity_timeout:
            app.log.info("Idle for {:.0f} seconds: the notebook ends.".format(idle_seconds))
            app.stop()

    APIHandler.update_api_activity = update_api_activity
    ServerApp.shutdown_no_activity = shutdown_no_activity


def write_preferences(home: str) -> None:
    """Have JupyterLab save open files often, and turn off its news and its search for updates.

    News and updates need the internet, which a sandbox does not have.
    """
    settings = {
        # In JupyterLab's schema, `fetchNews` is one of three texts, and `checkForUpdates` a boolean.
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "docmanager-extension/plugin": {"autosaveInterval": AUTOSAVE_SECONDS},
    }
    for name, values in settings.items():
        path = os.path.join(home, ".jupyter", "lab", "user-settings", "@jupyterlab", name + ".jupyterlab-settings")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            json.dump(values, file)


def main() -> None:
    """Run JupyterLab; end with a sentence if the image has none."""
    if importlib.util.find_spec("jupyterlab") is None:
        sys.exit("This image has no JupyterLab. Add the package jupyterlab to the image, or choose another image.")
    workspace = os.environ["WORKSPACE"]
    os.chdir(workspace)
    write_preferences(os.path.expanduser("~"))
    end_when_idle()
    lab = importlib.import_module("jupyterlab.labapp").LabApp
    idle_seconds, port = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    lab.launch_instance(options(idle_seconds, workspace, os.environ["RUN_DIR"], port))


if __name__ == "__main__":
    main()
