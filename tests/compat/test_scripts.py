"""Third-party scripts run unchanged (docs/compatibility.md says what each needs)."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from runtime.backends import host
from runtime.specs import Framework, Resources
from tests.compat.scripts import LICENCES, SCRIPTS
from tests.runtime.images_of_ours import image_folder, use_image

pytestmark = [pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds"), pytest.mark.slow]

HERE = Path(__file__).resolve().parent


def outputs_of(stage, framework, script, *, image="", **changes):
    """Run a script of the workspace until it completes; return every rank's output."""
    use_image(stage, image or framework)
    # The harness writes a `train.py` too. It is empty, and nothing runs it.
    status = stage.complete("", script=script, framework=Framework(framework), deadline_seconds=240, **changes)
    size = changes.get("nodes", 1) * changes.get("workers_per_node", 1)
    return [stage.log(rank, status.name) for rank in range(size)]


@pytest.mark.cores(2)
@pytest.mark.torch
def test_accelerates_own_tests_pass(stage, node):
    """`test_script.py` is Hugging Face's own test of Accelerate in several processes."""
    # A customer would install it into the workspace like this.
    python = image_folder("pytorch") / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", stage.workspace]
    subprocess.run([*command, "--requirement", HERE / "requirements.txt"], check=True)
    script = stage.workspace / "accelerate" / "test_utils" / "scripts" / "test_script.py"
    shutil.copy(script, stage.workspace)
    # `accelerate launch --cpu` sets the variable; without it Accelerate sees one process.
    variables = {"ACCELERATE_USE_CPU": "true"}
    outputs = outputs_of(stage, "pytorch", script.name, environment=variables, nodes=2, resources=node)
    # A test that fails ends the script with an error, and then the run does not complete.
    assert "Backend: gloo\nNum processes: 2\n" in outputs[0], outputs[0]


def copy_script(foreign, stage):
    """Copy the script and its wrapper into the workspace; skip the test where it was not fetched."""
    if not foreign.folder.is_dir():
        pytest.skip("needs scripts of others: python -m tests.compat.scripts fetches them")
    for path in (*foreign.folder.iterdir(), *([HERE / foreign.wrapper] if foreign.wrapper else [])):
        shutil.copy(path, stage.workspace)


@pytest.mark.cores(2)
@pytest.mark.torch
@pytest.mark.parametrize(
    ("foreign", "nodes", "workers"),
    [
        pytest.param(foreign, nodes, workers, id=f"{foreign.name}-{nodes}-{workers}")
        for foreign in SCRIPTS
        for nodes, workers in foreign.shapes
    ],
)
def test_a_fetched_script_prints_what_its_entry_says(stage, node, foreign, nodes, workers):
    copy_script(foreign, stage)
    size = nodes * workers
    gpus = workers if foreign.needs_gpu else 0  # of each node
    if gpus and len(host.gpus()) < nodes * gpus:
        pytest.skip("needs GPUs")
    outputs = outputs_of(
        stage,
        foreign.framework,
        foreign.script,
        image=foreign.image,
        arguments=foreign.arguments,
        nodes=nodes,
        workers_per_node=workers,
        resources=Resources(node.cpus, node.memory_mib, gpus),
    )
    prints = lambda pattern, rank: bool(
        re.search(pattern.replace("{rank}", str(rank)).replace("{world_size}", str(size)), outputs[rank])
    )
    assert prints(foreign.output, 0), outputs[0]
    if foreign.node_output:
        first_ranks = [rank % workers == 0 for rank in range(size)]
        assert [prints(foreign.node_output, rank) for rank in range(size)] == first_ranks, outputs


@pytest.mark.cores(2)
@pytest.mark.torch
def test_the_ddp_tutorial_continues_from_its_snapshot(stage, node):
    foreign = next(foreign for foreign in SCRIPTS if foreign.name == "pytorch-ddp-series-on-cpu")
    copy_script(foreign, stage)
    # Epochs count from 0, and every second one writes a snapshot. So the first run writes its last one in epoch 2.
    for name, epochs in (("job-1-1", "4"), ("job-2-1", "6")):
        arguments = ("multinode.py", epochs, "2")
        outputs = outputs_of(stage, "pytorch", foreign.script, name=name, arguments=arguments, nodes=2, resources=node)
    for rank, output in enumerate(outputs):  # of the second run
        assert "Resuming training from snapshot at Epoch 2" in output
        assert re.findall(rf"\[GPU{rank}\] Epoch (\d)", output) == ["2", "3", "4", "5"]


def test_every_third_party_script_is_documented():
    guide = (HERE.parents[1] / "docs" / "compatibility.md").read_text()
    for foreign in SCRIPTS:
        for text in (foreign.repository, foreign.script, LICENCES[foreign.repository]):
            assert text in guide, f"{foreign.name}: {text}"
