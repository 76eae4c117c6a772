"""Preview what the code of a quoted run gets: its arguments and the environment variables of a rank. Stores nothing."""

from __future__ import annotations

from dataclasses import dataclass

from billing.models import Quote
from console.core.errors import CustomerError, InvalidInput, NotFound
from jobs import reruns, snapshots
from jobs.clusters import cluster, image_of, resources_of
from jobs.errors import ChoiceUnavailable
from jobs.models import Job
from jobs.purchase import Purchase, parse, purchase_data
from jobs.run_specs import DATASETS_PATH, HANG_SECONDS, MODELS_PATH, WORKSPACE_PATH
from jobs.states import OnHang
from runtime.errors import RuntimeFault
from runtime.launcher.masking import MASK
from runtime.launcher.topology import local_rank_flag, with_local_rank
from runtime.launcher.variables import expand
from runtime.specs import RunSpec
from storage.files import read_text
from storage.selectors import workspace_folder

RUN_NAME = "job-0-1"
"""The name of a run whose job does not exist yet: 0 stands for the job's number, 1 is its first attempt."""


@dataclass(frozen=True)
class LaunchPreview:
    """The arguments and variables of a rank. Ports are 0, the job's number is 0, and secrets are masked."""

    arguments: list[str]
    environment: dict[str, str]


def launch_preview(quote: Quote, rank: int = 0) -> LaunchPreview:
    """Return the arguments and variables that a rank of a quoted run will get.

    Raises NotFound for an unknown rank, and for a cluster that the settings no longer name. Raises ChoiceUnavailable if
    something that the quote names no longer exists.
    """
    original = reruns.exact_original(quote)  # the job that the quote repeats exactly, or None
    data = purchase_data(quote.purchase, as_bought=True)  # of a free estimate: with the limits that it runs under
    try:
        purchase = parse(organization=quote.organization, data=data, uses_given_versions=True, original=original)
    except InvalidInput as error:
        raise ChoiceUnavailable(fields=error.fields) from error
    spec = _spec(purchase)
    if not 0 <= rank < spec.world_size:
        raise NotFound
    try:
        contract = cluster(purchase.node_spec.cluster).environment(spec, rank)
    except RuntimeFault as error:
        raise NotFound from error
    own_variables = {**purchase.environment, **dict.fromkeys(purchase.secrets, MASK.decode())}
    arguments = [expand(each, contract | purchase.environment) for each in purchase.arguments]
    flag = local_rank_flag(_sources(purchase, original), purchase.local_rank_argument.value)
    arguments = with_local_rank(arguments, rank % spec.workers_per_node, flag)
    return LaunchPreview(arguments, dict(sorted({**contract, **own_variables}.items())))


def _sources(purchase: Purchase, original: Job | None) -> list[str]:
    """Return the text of the run's script, in a list; an empty list if it cannot be read.

    The launcher also reads the modules beside the script. The preview does not: a script usually parses its arguments
    itself.
    """
    if original is not None:
        return [text for text in (snapshots.text_of(original),) if text is not None]
    try:
        return [read_text(root=workspace_folder(purchase.workspace), path=purchase.code_path)]
    except CustomerError:
        return []


def _spec(purchase: Purchase) -> RunSpec:
    """Return a spec of the run with only the fields that decide its environment."""
    fault_tolerance = purchase.fault_tolerance
    return RunSpec(
        name=RUN_NAME,
        framework=purchase.framework,
        image=image_of(purchase.image),
        nodes=purchase.nodes,
        workers_per_node=purchase.workers_per_node,
        resources=resources_of(purchase.node_spec),
        script=purchase.code_path,
        deadline_seconds=0,  # required, but no variable depends on it
        arguments=purchase.arguments,
        epochs=purchase.epochs,
        lr=purchase.lr,
        lr_scaling=purchase.lr_scaling,
        warmup_epochs=purchase.warmup_epochs,
        batch_size=purchase.batch_size,
        datasets=tuple(choice.name for choice in purchase.datasets),
        models=tuple(choice.name for choice in purchase.models),
        workspace_target=WORKSPACE_PATH,
        datasets_target=DATASETS_PATH,
        models_target=MODELS_PATH,
        min_nodes=fault_tolerance.min_nodes,
        controller=fault_tolerance.controller,
        collective_timeout_seconds=fault_tolerance.collective_timeout_seconds,
        stall_check_seconds=fault_tolerance.stall_check_seconds,
        hang_seconds=0 if fault_tolerance.on_hang == OnHang.IGNORE else HANG_SECONDS,
    )
