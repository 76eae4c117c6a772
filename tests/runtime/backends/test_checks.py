"""No check of a cluster raises. See `test_kubernetes` for those of Kubernetes."""

from types import SimpleNamespace

import pytest

from runtime.backends.local import check as local_check
from runtime.backends.slurm import check as slurm_check
from runtime.backends.slurm.config import SlurmConfig
from runtime.errors import BackendUnavailable

CONFIG = {"backend": "slurm", "accounting": True, "containers": "oci"}
SETTINGS = {"PreemptMode": "OFF"}
"""What Slurm answers about its own configuration."""


@pytest.fixture(autouse=True)
def _one_image(monkeypatch):
    monkeypatch.setattr(local_check.recipes, "recipe_names", lambda: ["bare"])
    monkeypatch.setattr(local_check.venvs, "is_ready", lambda _images_root, _name: True)


def failed_checks(check, backend, *arguments, root):
    results = check.check(backend, *arguments, root=root, images_root=root)
    return {result.name for result in results if not result.ok}


@pytest.fixture
def slurm_answers(monkeypatch):
    """Return a function that lets Slurm's programs exist, and answers in their place."""

    def answer(**calls):
        monkeypatch.setattr(slurm_check.shutil, "which", lambda name, path=None: name)
        monkeypatch.setattr(slurm_check, "Slurm", lambda _config: SimpleNamespace(settings=lambda: SETTINGS, **calls))

    return answer


@pytest.mark.parametrize(
    "error",
    [
        KeyError("cpus"), IndexError("0"), AttributeError("machines"), TypeError("None"), ValueError("many"),
        OSError("full"), BackendUnavailable("away"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_a_check_that_gets_an_error_in_place_of_an_answer_fails(error, tmp_path, slurm_answers):
    def refuse(*_arguments, **_options):
        raise error

    backend = SimpleNamespace(isolation_gaps=refuse, capacity=refuse, submit=refuse, delete=refuse)
    # If the backend is unavailable, the check "machine" reports it, and GPUs count as unknown.
    uncounted = {"GPUs"} if not isinstance(error, BackendUnavailable) else set()
    of_this_machine = {"sandbox", "folder of runs"}  # whether these fail depends on the machine that runs the tests
    failed = failed_checks(local_check, backend, root=tmp_path) - of_this_machine
    assert failed == {"isolation", "machine", "smoke run"} | uncounted
    slurm_answers(call=refuse, permitted_accounts=refuse)
    failed = failed_checks(slurm_check, backend, SlurmConfig.from_data("hpc", CONFIG), root=tmp_path)
    assert failed == {"isolation", "accounting", "machines", "containers", "smoke run"}


@pytest.mark.parametrize("answer", ["[]", "{}", "not JSON"])
def test_an_answer_of_an_unexpected_form_fails_the_check_of_containers(answer, tmp_path, slurm_answers, monkeypatch):
    # The job of this check writes its answer to a file with a random name, here `.check-x`.
    monkeypatch.setattr(slurm_check.secrets, "token_hex", lambda _count: "x")

    def call(program, *_arguments, **_options):
        if program == "sbatch":
            (tmp_path / ".check-x").write_text(answer)

    slurm_answers(call=call, permitted_accounts=lambda: {"root"})
    backend = SimpleNamespace(isolation_gaps=list, capacity=lambda: SimpleNamespace(machines=()))
    assert "containers" in failed_checks(slurm_check, backend, SlurmConfig.from_data("hpc", CONFIG), root=tmp_path)
