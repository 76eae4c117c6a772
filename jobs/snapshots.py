"""Snapshots of a job's order: the script's bytes and the identity of the image.

Other parts of an order, such as arguments and dataset versions, are columns of the job. A script is stored once per
organization and content. The snapshot lets a customer see what has changed since the order, and run the same script
again (`reruns`). If the script was changed while the job waited, the job runs a copy of the snapshot, which is written
beside the script as `<stem>.<hash>.py`. So the job runs what was ordered, and the lineage of a model names the script
that trained the model.
"""

from __future__ import annotations

import enum
import hashlib
import io
import posixpath
from dataclasses import dataclass

from django.db import transaction

from console.core.errors import CustomerError
from jobs import lifecycle
from jobs.clusters import cluster, image_of
from jobs.models import Job, ScriptSnapshot
from runtime.errors import InvalidSpec, RuntimeFault
from storage import catalog, files
from storage import selectors as storage
from storage.diffs import DiffLine, line_diff
from storage.models import Image, Workspace

HASH_LIMIT = 64 * 1024**2
"""Largest script, in bytes, that is hashed. The customer waits during hashing, so larger scripts get no snapshot."""
COPY_STEM_LENGTH = 200
"""How many bytes of the script's name the copy's name keeps. With the hash, the name stays below 255 bytes, which is
the limit of Linux."""


@dataclass(frozen=True)
class Script:
    """The bytes of a script, or only their hash if there are more than `files.TEXT_LIMIT`."""

    sha256: str
    size_bytes: int
    content: bytes | None


class ScriptState(enum.StrEnum):
    """How the script in the workspace compares with the snapshot."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    MISSING = "missing"
    """The script was deleted or moved, or cannot be read."""
    UNKNOWN = "unknown"
    """The job has no snapshot."""


def read_script(workspace: Workspace, path: str) -> Script | None:
    """Return the script at a path of a workspace; None if it is larger than HASH_LIMIT. Raises as `files.read` does."""
    file = files.read(root=storage.workspace_folder(workspace), path=path)
    with file.stream:
        if file.size > HASH_LIMIT:
            return None
        digest, size, content = hashlib.sha256(), 0, b""
        for chunk in file:  # at most `file.size` bytes, though a run may append to the file
            digest.update(chunk)
            size += len(chunk)
            if size <= files.TEXT_LIMIT:
                content += chunk
    return Script(digest.hexdigest(), size, content if size <= files.TEXT_LIMIT else None)


def store(organization_pk: int, script: Script | None) -> ScriptSnapshot | None:
    """Return the row of a script, created if it is new; None if there is no script.

    Call it in the transaction that writes the job.
    """
    if script is None:
        return None
    row, _created = ScriptSnapshot.objects.get_or_create(
        organization_id=organization_pk,
        sha256=script.sha256,
        defaults={"size_bytes": script.size_bytes, "content": script.content},
    )
    return row


def image_identity(image: Image, cluster_name: str) -> str:
    """Return an identifier of the image's content on a cluster (`Backend.image_identity`); empty if it is unknown."""
    try:
        return cluster(cluster_name).image_identity(image_of(image))
    except RuntimeFault:
        return ""


# --- The snapshot and the workspace now -------------------------------------------------------------------------------


def text_of(job: Job) -> str | None:
    """Return the script's text as it was ordered; None if it is not stored. U+FFFD replaces invalid UTF-8."""
    content = job.script.content if job.script else None
    return None if content is None else bytes(content).decode(errors="replace")


def current_script(job: Job) -> Script | None:
    """Return the script that is in the job's workspace now; None if it cannot be read.

    A script above HASH_LIMIT has an empty hash here, which differs from every snapshot's: snapshots are smaller.
    """
    try:
        return read_script(job.workspace, job.code_path) or Script("", HASH_LIMIT + 1, None)
    except CustomerError:
        return None


def state_of(job: Job, current: Script | None) -> ScriptState:
    """Compare the snapshot with the script in the workspace. `current` comes from `current_script`."""
    if job.script is None:
        return ScriptState.UNKNOWN
    if current is None:
        return ScriptState.MISSING
    return ScriptState.UNCHANGED if current.sha256 == job.script.sha256 else ScriptState.CHANGED


def diff(job: Job, current: Script | None) -> list[DiffLine]:
    """Return the diff from the snapshot to the script in the workspace; empty if the text of either is unknown."""
    old = text_of(job)
    if old is None or current is None or current.content is None:
        return []
    return line_diff(old=old, new=current.content.decode(errors="replace"))


# --- Running a snapshot -----------------------------------------------------------------------------------------------


def script_path(job: Job) -> str:
    """Return the path in the workspace of the script that the job runs: its own, or the copy of its snapshot."""
    if not job.runs_snapshot or job.script is None:
        return job.code_path
    folder, name = posixpath.split(job.code_path)
    stem = name.removesuffix(".py").encode()[:COPY_STEM_LENGTH].decode(errors="ignore")
    # Twelve digits of the hash are enough to tell the versions of one script apart.
    return posixpath.join(folder, f"{stem}.{job.script.sha256[:12]}.py")


def restore(job: Job) -> None:
    """Ensure that the job runs the script that was ordered, even if the file in the workspace was changed or deleted.

    Writes the copy of the snapshot beside the job's script, unless an unchanged copy exists. Called before each
    attempt, because customers and their code can change both files at any time. A script whose text was not stored,
    because it is too large, runs as it is. Raises InvalidSpec.
    """
    if job.script is None or job.script.content is None:
        return
    if not job.runs_snapshot:
        if state_of(job, current_script(job)) is ScriptState.UNCHANGED:
            return
        _run_snapshot(job)
    path = script_path(job)
    try:
        copy = read_script(job.workspace, path)
    except CustomerError:
        copy = None
    if copy is not None and copy.sha256 == job.script.sha256:
        return
    try:
        catalog.write_file(workspace=job.workspace, path=path, stream=io.BytesIO(bytes(job.script.content)))
    except CustomerError as error:
        raise InvalidSpec(f"The script of the order can't be written to '{path}': {error}", field="script") from error


def _run_snapshot(job: Job) -> None:
    """Let the job run the copy of its snapshot from now on."""
    with transaction.atomic():
        if Job.objects.filter(pk=job.pk, runs_snapshot=False).update(runs_snapshot=True):
            lifecycle.record_event(job=job, kind="runs_snapshot", data={"path": job.code_path})
    job.runs_snapshot = True
