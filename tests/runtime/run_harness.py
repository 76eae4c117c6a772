"""Actions on runs for tests of any backend. Nothing polls: a change of the run ends each wait."""

import dataclasses
import textwrap

from runtime.specs import Framework, Image, Mount, Outcome, Resources, RunPhase, RunSpec


class RunHarness:
    """A `backend` with a `workspace` and a `dataset`.

    Subclasses define `new_backend()`, which returns a backend as another process would have it, and `all_logs(name)`,
    for the message of a failed test. For the contract suite they also define `lose_node(node, name)` and
    `left_behind()`, which lists what deleted runs have left.
    """

    keeps_output: bool
    """Whether what a run wrote outlives its Pods. On Kubernetes this needs shared storage."""
    late_seconds = 0.0
    """How much longer than its deadline a run may seem to take. The deadline may begin after the measured start, once
    the nodes have met, and a cluster may report times in whole seconds."""
    patience = 60.0
    """How many seconds a wait may take, unless the test gives another number."""
    image = "bare"
    resources = Resources(cpus=1, memory_mib=1024)
    deadline_seconds = 60

    def spec(self, source="print('hello')", /, **changes):
        """Return a spec whose workspace holds the script as `train.py`."""
        self.write_script(textwrap.dedent(source))
        spec = RunSpec(
            name="job-1-1",
            framework=Framework.PYTORCH,
            image=Image(builtin=self.image),
            nodes=1,
            workers_per_node=1,
            resources=self.resources,
            script="train.py",
            deadline_seconds=self.deadline_seconds,
            datasets=("digits",),
            mounts=(
                Mount(str(self.workspace), "/workspace", read_only=False),
                Mount(str(self.dataset), "/datasets/digits"),
            ),
        )
        return dataclasses.replace(spec, **changes)

    def write_script(self, source):
        """Write the workspace's `train.py`."""
        (self.workspace / "train.py").write_text(source)

    def wait(self, name, until, seconds=0.0):
        """Return the run's first status for which `until` holds; fail if there is none in time."""
        seconds = seconds or self.patience
        status = self.backend.describe(name)
        if until(status):
            return status
        for _names in self.backend.changes(stop_after_seconds=seconds):
            status = self.backend.describe(name)
            if until(status):
                return status
        raise AssertionError(f"not in {seconds} s: {status}\n{self.all_logs(name)}")

    def wait_for_end(self, name="job-1-1"):
        """Return the run's last status."""
        return self.wait(name, lambda status: status.phase is RunPhase.ENDED)

    def wait_for_text(self, text, name="job-1-1", rank=0):
        """Return the run's status once a rank has printed the text."""
        return self.wait(name, lambda _status: text in self.log(rank, name))

    def wait_for_outcome(self, outcome, name="job-1-1"):
        """Return the last status of a run that must end with this outcome."""
        status = self.wait_for_end(name)
        assert status.outcome is outcome, f"{status}\n{self.all_logs(name)}"
        return status

    def wait_for_failure(self, outcome, name="job-1-1"):
        """Return the failure of a run that must end with this outcome."""
        return self.wait_for_outcome(outcome, name).failure

    def submit(self, source="print('hello')", /, **changes):
        """Submit a run and return its spec."""
        spec = self.spec(source, **changes)
        self.backend.submit(spec)
        return spec

    def run(self, source, /, **changes):
        """Submit a run and return its last status."""
        return self.wait_for_end(self.submit(source, **changes).name)

    def start(self, source, /, text="ready", **changes):
        """Submit a run and wait until every rank has printed the text."""
        spec = self.submit(source, **changes)
        for rank in range(spec.nodes * spec.workers_per_node):
            self.wait_for_text(text, spec.name, rank)

    def run_to_failure(self, outcome, source, /, **changes):
        """Submit a run and return its failure; it must end with this outcome."""
        return self.wait_for_failure(outcome, self.submit(source, **changes).name)

    def complete(self, source, /, **changes):
        """Submit a run that must complete, and return its last status."""
        return self.wait_for_outcome(Outcome.COMPLETED, self.submit(source, **changes).name)

    def log(self, rank=0, name="job-1-1"):
        """Return everything that a rank printed."""
        return self.backend.logs(name, rank, limit=1 << 24).text
