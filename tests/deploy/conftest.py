"""Input of the tests of `deploy/`: rendered overlays, and files that need no rendering."""

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("trial", "production", "organizations")
POD_KINDS = {"Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob"}


@cache
def renderer():
    """Return the command that renders a folder: kubectl's kustomize, or kustomize; None without either."""
    kubectl = shutil.which("kubectl")
    if kubectl and subprocess.run([kubectl, "kustomize", "--help"], capture_output=True, check=False).returncode == 0:
        return [kubectl, "kustomize"]
    places = [shutil.which("kustomize"), str(Path(sys.executable).with_name("kustomize"))]
    return next(([place, "build"] for place in places if place and Path(place).exists()), None)


@cache
def objects(overlay):
    """Return all objects of an overlay."""
    command = renderer()
    if command is None:
        pytest.skip("There is neither kubectl nor kustomize: python .ci/fetch_kustomize.py .venv/bin/kustomize")
    folder = str(KUBERNETES / "overlays" / overlay)
    done = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return tuple(each for each in yaml.safe_load_all(done.stdout) if each)


def manifests_applied_by_hand():
    """Return the manifests that an operator applies when needed, outside any overlay."""
    return list(yaml.safe_load_all((KUBERNETES / "restore.yaml").read_text()))


def pods(manifests):
    """Yield the name, metadata and spec of every pod that these objects create."""
    for each in manifests:
        if each["kind"] in POD_KINDS:
            spec = each["spec"]["jobTemplate"]["spec"] if each["kind"] == "CronJob" else each["spec"]
            name = each["metadata"].get("name") or each["metadata"]["generateName"]
            yield f"{each['kind']}/{name}", spec["template"].get("metadata", {}), spec["template"]["spec"]


def containers(spec):
    """Return every container of a pod."""
    return [*spec.get("initContainers", ()), *spec["containers"], *spec.get("ephemeralContainers", ())]


def env_file(path):
    """Return the variables of an env file, as Kustomize and Compose read them."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)
