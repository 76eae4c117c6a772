"""An order's own variables and secrets, in real runs of every backend."""

import json

import pytest

from runtime.specs import Outcome
from tests.runtime.backends import hostile

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")
VALUE = "s3cr3t-of-the-test\nwith-a-second-line"
SCRIPT = """
    import json, os, sys, time
    done = os.environ["RUN_DIR"] + "/done"
    print(json.dumps([sys.argv[1:], os.environ["NCCL_DEBUG"], len(os.environ["API_TOKEN"])]))
    print("value", os.environ["API_TOKEN"].replace("\\n", " "), flush=True)
    os.write(1, b"s3cr3t-of"); sys.stdout.flush(); os.write(2, b"-the-test\\n")
    if os.environ["RANK"] == "0":
        open(done, "w").close()
    else:
        while not os.path.exists(done): time.sleep(0.01)
        raise RuntimeError("refused: " + os.environ["API_TOKEN"].split()[0])
"""


def run(harness):
    spec = harness.submit(
        SCRIPT,
        workers_per_node=2,
        arguments=("--lr", "$LR", "${RANK}of$WORLD_SIZE", "$$HOME", "$NCCL_DEBUG", "$HOME", "$API_TOKEN"),
        expands_arguments=True,
        environment={"NCCL_DEBUG": "INFO"},
        secrets={"API_TOKEN": VALUE, "WORD": "code_failed"},  # a word of the record, which must stay
    )
    ended = harness.wait_for_outcome(Outcome.CODE_FAILED)
    for rank in range(2):
        first, second, third = harness.log(rank).splitlines()[:3]
        # Variables of the platform (LR is 0.01 by default) and of the order are replaced, and no others: neither HOME
        # nor a secret.
        arguments = ["--lr", "0.01", f"{rank}of2", "$HOME", "INFO", "$HOME", "$API_TOKEN"]
        assert json.loads(first) == [arguments, "INFO", len(VALUE)]
        # In the log, each line of the secret is hidden, also if it is written in two parts.
        assert (second, third) == ("value *** ***", "***")
    assert ended.failure.data["message"] == "refused: ***"
    return spec


def test_ranks_get_variables_and_secrets_and_no_file_of_the_run_contains_a_secret(any_harness):
    spec = run(any_harness)
    folder = any_harness.backend.run_folder(spec.name)
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert kept
    for value in VALUE.encode().split():
        assert [path for path in kept if value in path.read_bytes()] == []


def test_forked_ranks_get_variables_and_secrets_too(harness):
    hostile.warm(harness)
    run(harness)
