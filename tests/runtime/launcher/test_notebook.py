"""When a notebook ends by itself, judged by the real JupyterLab of the image."""

import json
import subprocess

import pytest

from runtime.launcher import notebook
from runtime.specs import Outcome, Resources
from tests.factories.notebooks import FAST_CHECKS, FAST_CHECKS_SOURCE
from tests.runtime.images_of_ours import image_folder, use_image

PROBE = """
import json, runpy, sys
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
notebook = runpy.run_path(sys.argv[1])
notebook["end_when_idle"]()  # replaces methods of the two classes that are imported next
from jupyter_server.base.handlers import APIHandler
from jupyter_server.serverapp import ServerApp

def ends(state, seconds):
    stopped = []
    activity = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    app = SimpleNamespace(
        kernel_manager=SimpleNamespace(list_kernels=lambda: [{"execution_state": state}]),
        web_app=SimpleNamespace(last_activity=lambda: activity), shutdown_no_activity_timeout=60,
        log=SimpleNamespace(info=print), stop=lambda: stopped.append(1),
    )
    ServerApp.shutdown_no_activity(app)
    return bool(stopped)

def counts(method, path):
    handler = SimpleNamespace(
        request=SimpleNamespace(method=method, path=path), settings={}, _track_activity=True,
        _jupyter_current_user="me", get_argument=lambda *_: None,
    )
    APIHandler.update_api_activity(handler)
    return "api_last_activity" in handler.settings

print(json.dumps([
    [ends("idle", 61), ends("idle", 59), ends("busy", 3600)],
    [counts("PUT", "/api/contents/a.ipynb"), counts("GET", "/api/contents"), counts("PUT", "/lab/api/workspaces/x")],
]))
"""


def run_in_image(source, *arguments):
    """Run a source in the image, with the path of the notebook script; return its last line, which is JSON."""
    command = [image_folder("pytorch") / "bin" / "python", "-c", source, notebook.__file__, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.torch
def test_an_open_tab_alone_keeps_no_notebook_open():
    # It ends after 60 s without activity, unless a kernel works. Saving a file is activity. What a tab sends is not.
    assert run_in_image(PROBE) == [[True, False, False], [True, False, False]]


@pytest.mark.slow
@pytest.mark.torch
def test_an_idle_notebook_ends_by_itself(harness):
    use_image(harness, "pytorch")
    # JupyterLab reads this file. It then checks twice a second whether it is idle, not once a minute.
    (harness.workspace / FAST_CHECKS).write_text(FAST_CHECKS_SOURCE)
    idle_seconds = "2"
    ended = harness.run(
        "", script="", builtin_script="notebook", arguments=(idle_seconds,), deadline_seconds=600,
        environment={"JUPYTER_CONFIG_PATH": "/workspace"}, resources=Resources(cpus=1, memory_mib=2048),
    )  # fmt: skip
    assert ended.outcome is Outcome.COMPLETED, ended
    assert "Idle for" in harness.log()


SETTINGS = """
import json, os, runpy, sys
from jupyterlab.commands import get_app_dir
from jupyterlab_server.settings_utils import get_settings
home = sys.argv[2]
runpy.run_path(sys.argv[1])["write_preferences"](home)
app = get_app_dir()
settings, warnings = get_settings(
    os.path.join(app, "settings"), os.path.join(app, "schemas"), os.path.join(home, ".jupyter", "lab", "user-settings"),
    schema_name="@jupyterlab/docmanager-extension:plugin",
)
print(json.dumps([settings["schema"]["properties"]["autosave"]["default"], settings["settings"], warnings]))
"""


@pytest.mark.torch
def test_jupyterlab_saves_changed_files_by_itself(tmp_path):
    """JupyterLab itself reads the settings, and checks them by its schema."""
    is_autosave_on, settings, warnings = run_in_image(SETTINGS, tmp_path)
    assert is_autosave_on
    assert settings == {"autosaveInterval": notebook.AUTOSAVE_SECONDS}
    assert warnings == [None], "the settings match JupyterLab's schema"


def test_an_image_without_jupyterlab_says_so(monkeypatch):
    monkeypatch.setattr(notebook.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit, match="This image has no JupyterLab"):
        notebook.main()
