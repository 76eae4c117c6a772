"""The ConfigMaps that hold launchers: the current one is refreshed, unused ones are removed."""

import time

import pytest

from runtime.backends.kubernetes import launcher_archive, manifests
from runtime.backends.kubernetes.client import ApiClient, resource_path
from runtime.backends.kubernetes.names import LAST_USED_ANNOTATION
from runtime.backends.kubernetes.pod_plan import build_pod_inputs

pytestmark = pytest.mark.slow


class Later:
    """A clock that is ahead by some days."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, days):
        self._days = days

    def time(self):
        return time.time() + self._days * 86400


def launcher_names(fake):
    names = {one["metadata"]["name"] for one in fake.store.find("configmaps")}
    return {name for name in names if name.startswith("trainyard-launcher-")}


def old_launcher(fake, harness, content, **annotations):
    """Create the ConfigMap of another console version and return its name."""
    manifest = manifests.launcher(harness.site.namespace, content)
    manifest["metadata"]["annotations"] = annotations
    name = str(manifest["metadata"]["name"])
    fake.make("configmaps", harness.site.namespace, name, **manifest)
    return name


def test_unused_launchers_are_removed(own_harness, fake, monkeypatch):
    namespace = own_harness.site.namespace
    unused = old_launcher(fake, own_harness, b"unused")
    # In two days, a console of another version will have used it two hours before.
    concurrent = old_launcher(fake, own_harness, b"concurrent", **{LAST_USED_ANNOTATION: repr(Later(2).time() - 7200)})
    unreadable = old_launcher(fake, own_harness, b"unreadable", **{LAST_USED_ANNOTATION: "yesterday"})
    mounted = old_launcher(fake, own_harness, b"mounted")
    spec = own_harness.spec(name="job-2-1")
    job = manifests.job(
        spec,
        own_harness.config(),
        build_pod_inputs(spec, own_harness.config(), own_harness.site.root / "runs"),
        mounted,
    )
    fake.make("jobs", namespace, "job-2-1", **job)
    monkeypatch.setattr(launcher_archive, "time", Later(2))
    own_harness.backend.names()
    assert launcher_names(fake) == {unused, concurrent, unreadable, mounted}, (
        "this version has started no run yet: an upgrade may be going on"
    )
    own_harness.run("print('done')")
    (current,) = launcher_names(fake) - {unused, concurrent, unreadable, mounted}
    # The current launcher's age counts from its creation. It is never removed, even if nothing says that it was used.
    fake.store.edit("configmaps", namespace, current, lambda one: one["metadata"]["annotations"].clear())
    monkeypatch.setattr(launcher_archive, "time", Later(0.9))
    own_harness.backend.names()
    assert unused in launcher_names(fake), (
        "the current launcher is less than a day old: a console of an older version may still run"
    )
    monkeypatch.setattr(launcher_archive, "time", Later(2))
    own_harness.backend.names(live=True)
    assert unused in launcher_names(fake), "the frequent listing of live runs removes no launcher"
    own_harness.backend.names()
    assert launcher_names(fake) == {current, concurrent, unreadable, mounted}
    own_harness.backend.delete("job-2-1")
    own_harness.backend.names()
    assert launcher_names(fake) == {current, concurrent, unreadable}


def test_a_submission_refreshes_or_recreates_the_launcher_and_keeps_it_from_deletion(own_harness, fake, monkeypatch):
    own_harness.run("print('done')")
    (current,) = launcher_names(fake)
    fake.store.delete("configmaps", own_harness.site.namespace, current, {})
    monkeypatch.setattr(launcher_archive, "USAGE_REFRESH_SECONDS", -1.0)  # each submission writes the ConfigMap
    own_harness.complete("print('done')", name="job-2-1")
    metadata = fake.store.get("configmaps", own_harness.site.namespace, current)["metadata"]
    assert abs(time.time() - float(metadata["annotations"][LAST_USED_ANNOTATION])) < 60
    api = ApiClient(own_harness.config())
    address = resource_path("v1", "configmaps", own_harness.site.namespace, current)
    api.patch(address, {"metadata": {"annotations": {LAST_USED_ANNOTATION: "1"}}})
    api.delete(address, version=metadata["resourceVersion"])  # refused without an error: the version has changed
    assert launcher_names(fake) == {current}
    api.delete(address, version=api.get(address)["metadata"]["resourceVersion"])
    assert launcher_names(fake) == set()
