"""Build the RunSpec of an attempt, which a backend receives."""

from __future__ import annotations

from dataclasses import replace

from django.db.models import Prefetch, prefetch_related_objects

from jobs import inspection, lifecycle, packages, results, snapshots, traces, usage
from jobs.clusters import image_of, resources_of
from jobs.images import pull_secret
from jobs.models import Attempt, Job, JobDataset, JobModel
from jobs.states import OnHang
from jobs.usage import GRACE_SECONDS
from runtime.errors import InvalidSpec
from runtime.specs import Controller, Framework, LocalRankArgument, LrScaling, RunSpec
from storage import mounts, secret_store
from storage import selectors as storage
from storage.errors import SecretUnreadable
from storage.models import DatasetVersion, ModelVersion

WORKSPACE_PATH = "/workspace"
DATASETS_PATH = "/datasets"
MODELS_PATH = "/models"
"""Where a run finds its workspace, datasets and models: the paths of the mounts, which scripts get as the environment
variables WORKSPACE, DATASETS_PATH and MODELS_PATH."""
HANG_SECONDS = 120
"""How long a run may show no sign of progress before it counts as hung. It is longer than the pauses of ordinary
training, such as an evaluation or a checkpoint. The hang detector may decide sooner, if all ranks wait for others."""


def mounted_dataset_versions(job: Job) -> list[DatasetVersion]:
    """Return the dataset versions that a job mounts, in the order chosen. `job` caches them after the first query."""
    rows = JobDataset.objects.select_related("version__dataset")
    prefetch_related_objects([job], Prefetch("job_datasets", rows))
    return [row.version for row in job.job_datasets.all()]


def mounted_model_versions(job: Job) -> list[ModelVersion]:
    """Return the model versions that a job mounts, in the order chosen. `job` caches them after the first query."""
    prefetch_related_objects([job], Prefetch("job_models", JobModel.objects.select_related("version__model")))
    return [row.version for row in job.job_models.all()]


def run_spec(attempt: Attempt) -> RunSpec:
    """Return the attempt's spec without the values that only a submission needs: see `launch_spec`.

    A submission may be repeated, so repeated calls describe the same run. Only the deadline of a running notebook
    changes, when the notebook is extended.
    """
    job, nodes = attempt.job, attempt.granted_nodes
    versions, models = mounted_dataset_versions(job), mounted_model_versions(job)
    deadline = deadline_seconds(attempt)
    return RunSpec(
        name=attempt.run_name,
        framework=Framework(job.framework),
        image=image_of(job.image, job.image_digest),
        nodes=nodes,
        workers_per_node=job.workers_per_node,
        resources=resources_of(job.node_spec),
        script=snapshots.script_path(job),
        builtin_script=job.builtin_script,
        deadline_seconds=deadline,
        arguments=tuple(job.arguments),
        expands_arguments=job.expands_arguments,
        environment=job.environment,
        local_rank_argument=LocalRankArgument(job.local_rank_argument),
        epochs=job.epochs,
        lr=job.lr,
        lr_scaling=LrScaling(job.lr_scaling),
        warmup_epochs=job.warmup_epochs,
        batch_size=job.batch_size,
        datasets=tuple(version.dataset.name for version in versions),
        models=tuple(version.model.name for version in models),
        mounts=mounts.mounts_for(
            workspace=job.workspace,
            dataset_versions=versions,
            model_versions=models,
            workspace_target=WORKSPACE_PATH,
            datasets_target=DATASETS_PATH,
            models_target=MODELS_PATH,
        )
        + inspection.mounts_of(job),
        workspace_target=WORKSPACE_PATH,
        datasets_target=DATASETS_PATH,
        models_target=MODELS_PATH,
        restart_count=attempt.number - 1,
        # SIGTERM comes this long before the deadline, so a short run gives up at most a quarter of its time.
        grace_seconds=min(GRACE_SECONDS, deadline // 4),
        checkpoint_key=results.checkpoint_key(job.pk),
        min_nodes=min(job.min_nodes, nodes),
        controller=Controller(job.controller),
        collective_timeout_seconds=job.collective_timeout_seconds,
        stall_check_seconds=job.stall_check_seconds,
        hang_seconds=0 if job.on_hang == OnHang.IGNORE else HANG_SECONDS,
        packages=packages.folder_of(job),
        labels={"organization": job.organization.slug, "job": str(job.pk)},
        node_kind=job.node_spec.name,
        organization_nodes=job.organization.quota.max_running_nodes,
        traceparent=traces.traceparent_of(attempt),
    )


def launch_spec(attempt: Attempt) -> RunSpec:
    """Return the spec for a submission: `run_spec` with the remaining storage quota, the pull secret and the secrets.

    Writes a copy of the ordered script to the workspace if the job needs one. Raises InvalidSpec.
    """
    job = attempt.job
    snapshots.restore(job)
    return replace(
        run_spec(attempt),
        # None means no limit by the quota: a check runs the platform's own script, which writes little.
        storage_left_mib=None if job.is_check else storage.quota_left(job.organization) >> 20,
        pull_secret=pull_secret(organization=job.organization, image=job.image),
        secrets=_secrets(job),
    )


def _secrets(job: Job) -> dict[str, str]:
    """Return the current values of the secrets that the order names. Raises InvalidSpec."""
    if not job.secrets:
        return {}
    try:
        return secret_store.values_of(job.organization, job.secrets)
    except SecretUnreadable as error:
        raise InvalidSpec(str(error.message), field="secrets") from error


def deadline_seconds(attempt: Attempt) -> int:
    """Return how many seconds the attempt may run: the job's deadline less the time of earlier attempts.

    On fewer nodes than ordered it may run longer.
    """
    job = attempt.job
    if attempt.number == 1 and attempt.granted_nodes == job.nodes:
        return job.deadline_seconds
    earlier_attempts = job.attempts.filter(number__lt=attempt.number)
    longest = lifecycle.longest_seconds(job)
    return max(1, usage.left_seconds(job, earlier_attempts, nodes=attempt.granted_nodes, longest_seconds=longest))
