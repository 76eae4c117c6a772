"""What tests of `deploy/` read: rendered overlays, and what needs no rendering."""

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
    """The words that render a folder: kubectl's kustomize, or kustomize itself; None where there is neither."""
    if kubectl := shutil.which("kubectl"):
        said = subprocess.run([kubectl, "kustomize", "--help"], capture_output=True, check=False)
        if said.returncode == 0:
            return [kubectl, "kustomize"]
    places = [shutil.which("kustomize"), str(Path(sys.executable).with_name("kustomize"))]
    return next(([place, "build"] for place in places if place and Path(place).exists()), None)


@cache
def rendered(overlay):
    words = renderer()
    if words is None:
        pytest.skip("There is neither kubectl nor kustomize: python .ci/fetch_kustomize.py .venv/bin/kustomize")
    done = subprocess.run([*words, str(KUBERNETES / "overlays" / overlay)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return tuple(one for one in yaml.safe_load_all(done.stdout) if one)


def objects(overlay):
    """All objects of an overlay."""
    return list(rendered(overlay))


def by_hand():
    """Manifests that people apply by themselves."""
    return list(yaml.safe_load_all((KUBERNETES / "restore.yaml").read_text()))


def pods(manifests):
    """(name, metadata, spec) of every pod that these objects make."""
    for one in manifests:
        if one["kind"] in POD_KINDS:
            spec = one["spec"]
            if one["kind"] == "CronJob":
                spec = spec["jobTemplate"]["spec"]
            name = one["metadata"].get("name") or one["metadata"]["generateName"]
            yield f"{one['kind']}/{name}", spec["template"].get("metadata", {}), spec["template"]["spec"]


def containers(spec):
    """Every container of a pod."""
    return [*spec.get("initContainers", ()), *spec["containers"], *spec.get("ephemeralContainers", ())]


def env_file(path):
    """The lines of an env file, as Kustomize and Compose read them."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)
