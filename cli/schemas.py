"""Responses of the API as dataclasses. Amounts are in minor units, sizes in bytes, times ISO 8601 strings.

Each dataclass has the fields that the program needs of one component of the OpenAPI schema. COMPONENTS names the
component, and a test compares the fields of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Organization:
    """The organization that a token belongs to. `service_active`: whether the organization may order."""

    name: str
    slug: str
    service_active: bool


@dataclass(frozen=True)
class WhoAmI:
    """The account and organization of a token, and its capabilities."""

    email: str
    organization: Organization
    role: str
    capabilities: tuple[str, ...]


@dataclass(frozen=True)
class Product:
    """A product on offer."""

    name: str
    title: str


@dataclass(frozen=True)
class NodeSpec:
    """A node spec on sale. `hourly_minor` is its price per hour, a decimal string; None if it has no price."""

    name: str
    title: str
    cpus: float
    memory_mib: int
    gpus: int
    gpu_type: str
    hourly_minor: str | None
    currency: str


@dataclass(frozen=True)
class Image:
    """An image on offer. `builtin` images are part of the console; `not_ready_because` is empty for a `ready` image."""

    name: str
    title: str
    frameworks: tuple[str, ...]
    builtin: bool
    ready: bool
    not_ready_because: str


@dataclass(frozen=True)
class DatasetVersion:
    """A published version of a dataset."""

    version: int
    size_bytes: int
    file_count: int
    sha256: str
    published_at: str


@dataclass(frozen=True)
class Dataset:
    """A dataset with its latest version, if there is one."""

    name: str
    created_at: str
    latest: DatasetVersion | None
    description: str = ""


@dataclass(frozen=True)
class Upload:
    """A resumable upload of `size_bytes`, of which the console has the first `offset`.

    `version` is the published version of a dataset, `error` why the upload failed. `uploads.FINAL_STATES`
    has the final values of `state`.
    """

    id: str
    size_bytes: int
    offset: int
    version: int | None
    error: dict[str, Any] | None
    state: str = ""


@dataclass(frozen=True)
class Workspace:
    """A workspace."""

    name: str
    created_at: str
    description: str = ""
    size_bytes: int = 0


@dataclass(frozen=True)
class Entry:
    """A file or folder in a listing of a workspace. `kind` is `file`, `folder`, `link` or `other`."""

    name: str
    kind: str
    size: int
    modified: str


@dataclass(frozen=True)
class Line:
    """A line of a quote or receipt. `rule` is a code for what is charged, `title` its name.

    `quantity` and `unit_minor`, the price of one unit, are decimal strings.
    """

    rule: str
    title: str
    quantity: str
    unit: str
    unit_minor: str
    amount_minor: int


@dataclass(frozen=True)
class Basis:
    """The basis of an estimate, as a sentence for the customer."""

    sentence: str


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a run: `p50_minor` is likely, `p90_minor` a high estimate."""

    p50_minor: int
    p90_minor: int
    basis: Basis


@dataclass(frozen=True)
class Quote:
    """The price of a run. `lines` sum to the ceiling. `refusal` says why nobody can buy the quote now, or is empty.

    `mode` is `metered` (charged by the time used) or `fixed` (by epoch). `minimum_minor` is the least that a run with
    billable time costs. `notes` are sentences about the price; `warnings` name datasets that the script reads but the
    customer has not chosen.
    """

    id: str
    currency: str
    mode: str
    lines: tuple[Line, ...]
    estimate: Estimate
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    refusal: str
    minimum_minor: int
    ceiling_minor: int
    deadline_seconds: int
    expires_at: str


@dataclass(frozen=True)
class Order:
    """An order and the id of its job."""

    id: str
    job: int


@dataclass(frozen=True)
class Progress:
    """The progress of a job. `fraction` is from 0 to 1."""

    fraction: float
    epoch: int
    epochs: int
    eta_seconds: int | None


@dataclass(frozen=True)
class Attempt:
    """One try of a job. `reason` is a code that says why it ended, `detail` its explanation."""

    number: int
    reason: str
    detail: str
    started_at: str | None
    finished_at: str | None


@dataclass(frozen=True)
class Job:
    """A job. `sentence` says how it ended, `waiting_for` why it waits; both are empty otherwise."""

    id: int
    name: str
    tags: tuple[str, ...]
    state: str
    reason: str
    detail: str
    sentence: str
    waiting_for: str
    progress: Progress
    attempts: tuple[Attempt, ...]
    queued_at: str
    started_at: str | None
    finished_at: str | None
    currency: str
    cost_minor: int
    ceiling_minor: int
    framework: str
    image: str
    workspace: str
    code_path: str
    arguments: tuple[str, ...]
    datasets: tuple[str, ...]
    epochs: int
    lr: str
    batch_size: int
    node_spec: str
    nodes: int


@dataclass(frozen=True)
class Diagnosis:
    """Why a job failed. `cause` is a code, `exception` what Python printed; it may be empty.

    `file`, `line` (a number), `function` and `code` (the text) are the failed line of the customer's code. `rank` is
    the rank that failed first.
    """

    cause: str
    title: str
    advice: str
    exception: str
    rank: int | None
    node: int | None
    is_billed: bool
    file: str = ""
    line: int | None = None
    function: str = ""
    code: str = ""


@dataclass(frozen=True)
class Log:
    """A part of a rank's output. The next part begins at the byte `next_offset`. `eof`: there is no next part.

    `times` are pairs (number of a line in `text`, Unix time) in order, if they were requested and are known. A time
    applies to its line and the lines after it, up to the next pair's line.
    """

    text: str
    next_offset: int
    eof: bool
    times: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class JobEntry:
    """A file or folder of a job. `kind` is `file` or `folder`."""

    path: str
    size: int
    modified_at: str | None
    kind: str


@dataclass(frozen=True)
class ModelVersion:
    """A published version of a model. `lineage` says how it was made, for example by which `job`."""

    version: int
    size_bytes: int
    file_count: int
    sha256: str
    published_at: str
    lineage: dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model with its latest version, if there is one."""

    name: str
    created_at: str
    latest: ModelVersion | None
    description: str = ""


@dataclass(frozen=True)
class Receipt:
    """The charge of a job. `total_minor` is at most `ceiling_minor`."""

    id: int
    title: str
    currency: str
    lines: tuple[Line, ...]
    total_minor: int
    ceiling_minor: int
    created_at: str


@dataclass(frozen=True)
class NotebookQuote:
    """The price of a notebook, at least `minimum_minor`. It ends after `deadline_seconds` at the latest."""

    id: str
    currency: str
    lines: tuple[Line, ...]
    refusal: str
    minimum_minor: int
    ceiling_minor: int
    deadline_seconds: int
    expires_at: str


@dataclass(frozen=True)
class NotebookExtensionQuote(NotebookQuote):
    """The price of a notebook with more time. Buying it holds `added_minor` in addition."""

    added_minor: int


@dataclass(frozen=True)
class Notebook:
    """A notebook. `url` opens JupyterLab in a browser; empty while it does not run."""

    id: int
    name: str
    state: str
    reason: str
    waiting_for: str
    url: str
    workspace: str
    image: str
    node_spec: str
    currency: str
    cost_minor: int
    ceiling_minor: int
    queued_at: str
    finished_at: str | None


@dataclass(frozen=True)
class SweepEstimate:
    """Estimated cost of all trials together."""

    p50_minor: int
    p90_minor: int


@dataclass(frozen=True)
class SweepQuote:
    """The price of a sweep. `trials` is the maximum number of trials, each of which costs at least `minimum_minor`."""

    id: str
    currency: str
    lines: tuple[Line, ...]
    estimate: SweepEstimate
    trials: int
    refusal: str
    minimum_minor: int
    ceiling_minor: int
    expires_at: str


@dataclass(frozen=True)
class Objective:
    """The metric that a sweep optimizes. `goal` is `maximize` or `minimize`."""

    metric: str
    goal: str


@dataclass(frozen=True)
class Best:
    """The best completed trial of a sweep."""

    trial: int
    job: int
    parameters: dict[str, Any]
    value: float


@dataclass(frozen=True)
class Sweep:
    """A sweep. `reason` is a code that says why it ended or is stopping."""

    id: int
    name: str
    state: str
    reason: str
    waiting_for: str
    objective: Objective
    method: str
    trials_total: int
    trials_done: int
    best: Best | None
    currency: str
    cost_minor: int
    ceiling_minor: int
    created_at: str
    ended_at: str | None


@dataclass(frozen=True)
class Trial:
    """A trial of a sweep. `state` is that of its job. `outcome` says how the trial ended; empty while the job is open.

    `value` is the metric's last value; None without one.
    """

    number: int
    job: int
    state: str
    outcome: str
    parameters: dict[str, Any]
    value: float | None
    cost_minor: int
    is_best: bool


COMPONENTS: dict[type, str] = {
    Organization: "Organization",
    WhoAmI: "WhoAmI",
    Product: "Product",
    NodeSpec: "NodeSpec",
    Image: "Image",
    DatasetVersion: "Version",
    Dataset: "Dataset",
    Upload: "Upload",
    Workspace: "Workspace",
    Entry: "Entry",
    Line: "Line",
    Quote: "Quote",
    Order: "Order",
    Progress: "Progress",
    Attempt: "Attempt",
    Job: "Job",
    Diagnosis: "Diagnosis",
    Log: "Log",
    JobEntry: "JobEntry",
    ModelVersion: "ModelVersion",
    Model: "Model",
    Receipt: "Receipt",
    NotebookExtensionQuote: "NotebookExtensionQuote",
    NotebookQuote: "NotebookQuote",
    Notebook: "Notebook",
    SweepEstimate: "SweepEstimate",
    SweepQuote: "SweepQuote",
    Objective: "Objective",
    Best: "Best",
    Sweep: "Sweep",
    Trial: "Trial",
}
"""Name of each component in the OpenAPI schema. `Basis` and `Estimate` are missing, because the schema describes them
only as objects."""
