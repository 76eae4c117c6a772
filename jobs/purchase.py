"""Validate purchases, both from pages and from the API.

All errors are reported at once, each at its field. A Purchase is created only if everything that it names exists.

A quote stores its purchase as JSON (`Quote.purchase`): the fields of `to_json`, and further keys. `sweep`, `notebook`
and `check` mark purchases of these kinds, FREE_ESTIMATE_MARK a free estimate, and EXTENSION_MARK the extension of a
notebook. `orders` adds `rerun_of`, `exact` and `pinned_image`.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from drf_spectacular.utils import extend_schema_serializer
from rest_framework import serializers
from rest_framework.fields import empty
from rest_framework.serializers import ValidationError

from billing.models import NodeSpec
from console.accounts.models import Organization
from jobs import checkpoints, images, inspection, packages
from jobs.clusters import cluster, image_of, resolve_cluster_name, resources_of
from jobs.details import JobNameField, NotesField, TagsField
from jobs.environment import MAX_QUOTED_LENGTH, EnvironmentField, SecretsField, check_references
from jobs.fault_tolerance import FaultTolerance, FaultToleranceSerializer
from jobs.fields import EnumField, FormField, FormSerializer, NameField, ValidValues, WholeNumberField, is_storable_text
from jobs.models import Job, Product
from jobs.packages import Requirements
from jobs.results import INSPECTED_JOB
from runtime.errors import InvalidSpec, RuntimeFault
from runtime.launcher.variables import escape
from runtime.specs import Framework, LocalRankArgument, LrScaling
from storage import mounts, secret_store, sharing
from storage import selectors as storage
from storage.models import DatasetVersion, Image, ModelVersion, Workspace

MAX_ARGUMENTS_LENGTH = 8192
"""Characters of all arguments together, with one separator each. They become the command line of a process. Scripts
take far fewer, and Linux accepts far more."""
MAX_PATH_LENGTH = 1000
"""Characters of a script's path: the length of its column."""
MAX_LR_LENGTH = 32
"""Characters of a learning rate: the length of its column."""
MAX_DATASETS = 100
"""Datasets of one run, and likewise models. Each is a mount on every node, which takes time to set up."""
MAX_VERSION_DIGITS = 9
"""Digits of a version's number, so that it always fits its 32-bit column."""
MAX_VERSIONS_LISTED = 10
"""Existing versions that an error message lists, newest first, so that it stays readable."""
MAX_BATCH_SIZE = 1_000_000
"""Largest batch size: above any real one, and within its 32-bit column."""
MAX_CEILING_MINOR = 10**12
"""Largest ceiling: above any real order, and far within the 64-bit column."""
MIN_TIME_LIMIT_SECONDS = 60
"""Shortest time limit on sale: start-up alone takes several seconds."""
DEFAULT_NOTEBOOK_SECONDS = 4 * 3600
"""Default time limit of a notebook: half a working day."""
MAX_NOTEBOOK_SECONDS = 7 * 24 * 3600
"""Longest time limit of a notebook: a week, as for a training."""
DEFAULT_IDLE_SECONDS = 30 * 60
"""Default time without activity after which a notebook ends: longer than a break, but a forgotten notebook costs
little."""
PROCESSES_PER_CPU = 4
"""Maximum processes per CPU of a node. While some wait for I/O, others compute. More than four only compete for the
CPU."""
EXPANDS_ARGUMENTS = "expands_arguments"
"""Key of a stored purchase whose arguments may refer to variables. Purchases of older versions lack it."""
FREE_ESTIMATE_MARK = "probe"
"""Key that marks the stored purchase of a free estimate."""
MEASURED = "measured"
"""Key of a free estimate's stored purchase. Its value: the nodes, limits and other fields of the measured purchase that
the free estimate overrides."""
EXTENSION_MARK = "extends"
"""Key that marks the stored purchase of a quote that extends a notebook. Its value has the id of the notebook (`job`),
and the `deadline_seconds` and `held_minor` that the notebook had when the quote was made."""


@dataclass(frozen=True)
class VersionChoice:
    """A version of a dataset or model, as the customer chose it. `number` None: the latest version."""

    name: str
    number: int | None = None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}@{self.number}"


@dataclass(frozen=True)
class Purchase:
    """A training run that can be bought, with every name resolved to its row.

    `lr` is the customer's text, such as "1e-3", because the script receives a text. `max_seconds` and `ceiling_minor`
    are the customer's own limits; None: the quote sets them. `datasets` are the choices, and `dataset_versions` the
    rows of the chosen versions, in the same order; likewise for models. `secrets` are names.
    """

    product: Product
    framework: Framework
    image: Image
    workspace: Workspace
    code_path: str
    environment: dict[str, str]
    secrets: tuple[str, ...]
    arguments: tuple[str, ...]
    local_rank_argument: LocalRankArgument
    datasets: tuple[VersionChoice, ...]
    dataset_versions: tuple[DatasetVersion, ...]
    epochs: int
    lr: str
    batch_size: int
    node_spec: NodeSpec
    nodes: int
    workers_per_node: int
    max_seconds: int | None
    ceiling_minor: int | None
    requirements: Requirements | None = None
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    name: str = ""
    """The job's name; empty: the script's file name."""
    tags: tuple[str, ...] = ()
    notes: str = ""
    lr_scaling: LrScaling = LrScaling.NONE
    warmup_epochs: int = 0
    models: tuple[VersionChoice, ...] = ()
    model_versions: tuple[ModelVersion, ...] = ()
    from_checkpoint: Job | None = None
    """The job whose checkpoints the run starts from."""

    @property
    def code_key(self) -> str:
        """Return the key of all runs of this script in this workspace. Estimates use earlier runs with the same key."""
        return hashlib.sha256(f"{self.workspace.pk}:{self.code_path}".encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the API's fields as a quote stores them. `parse` accepts the result.

        `dataset_versions` and `model_versions` pin the versions: the order uses those that were quoted, not newer ones.
        `resolved_datasets` and `resolved_models` name the pinned versions for people.
        """
        return {
            "product": self.product.name,
            "framework": self.framework.value,
            "image": self.image.name,
            "workspace": self.workspace.name,
            "code_path": self.code_path,
            "environment": self.environment,
            "secrets": list(self.secrets),
            "arguments": list(self.arguments),
            "requirements": self.requirements.path if self.requirements else "",
            EXPANDS_ARGUMENTS: True,
            "local_rank_argument": self.local_rank_argument.value,
            "datasets": [str(choice) for choice in self.datasets],
            "dataset_versions": [version.pk for version in self.dataset_versions],
            "resolved_datasets": resolved_names(self.dataset_versions),
            "models": [str(choice) for choice in self.models],
            "model_versions": [version.pk for version in self.model_versions],
            "resolved_models": [version.reference for version in self.model_versions],
            "from_checkpoint": self.from_checkpoint.pk if self.from_checkpoint else None,
            "epochs": self.epochs,
            "lr": self.lr,
            "lr_scaling": self.lr_scaling.value,
            "warmup_epochs": self.warmup_epochs,
            "batch_size": self.batch_size,
            "node_spec": self.node_spec.name,
            "nodes": self.nodes,
            "workers_per_node": self.workers_per_node,
            "max_seconds": self.max_seconds,
            "ceiling_minor": self.ceiling_minor,
            "name": self.name,
            "tags": list(self.tags),
            "notes": self.notes,
        } | self.fault_tolerance.to_json()


@dataclass(frozen=True)
class Placement:
    """What a run is executed with, besides a script: image, workspace, datasets and nodes. Unrelated to scheduling.

    An image check (`jobs.checks`) needs only this.
    """

    framework: Framework
    image: Image
    workspace: Workspace
    datasets: tuple[VersionChoice, ...]
    dataset_versions: tuple[DatasetVersion, ...]
    node_spec: NodeSpec
    nodes: int
    workers_per_node: int

    def to_json(self) -> dict[str, Any]:
        """Return the API's fields."""
        return {
            "framework": self.framework.value,
            "image": self.image.name,
            "workspace": self.workspace.name,
            "datasets": [str(choice) for choice in self.datasets],
            "resolved_datasets": resolved_names(self.dataset_versions),
            "node_spec": self.node_spec.name,
            "nodes": self.nodes,
            "workers_per_node": self.workers_per_node,
        }


@dataclass(frozen=True)
class NotebookPurchase(Placement):
    """A notebook that can be bought. It ends after `idle_seconds` without activity, or after `max_seconds`."""

    name: str
    idle_seconds: int
    max_seconds: int
    ceiling_minor: int | None
    requirements: Requirements | None
    inspected_job: Job | None
    """The ended job whose checkpoints and outputs the notebook reads."""

    def to_json(self) -> dict[str, Any]:
        """Return the API's fields as a quote stores them, with pinned dataset versions."""
        return super().to_json() | {
            "dataset_versions": [version.pk for version in self.dataset_versions],
            "name": self.name,
            "idle_seconds": self.idle_seconds,
            "max_seconds": self.max_seconds,
            "ceiling_minor": self.ceiling_minor,
            "requirements": self.requirements.path if self.requirements else "",
            INSPECTED_JOB: self.inspected_job.pk if self.inspected_job else None,
        }


def resolved_names(versions: Iterable[DatasetVersion]) -> list[str]:
    """Return the versions as `name@number`, as in requests for quotes."""
    return [str(VersionChoice(version.dataset.name, version.number)) for version in versions]


def parse(
    *,
    organization: Organization,
    data: Mapping[str, Any],
    uses_given_versions: bool = False,
    original: Job | None = None,
) -> Purchase:
    """Validate a purchase. Raises InvalidInput with a message for each invalid field.

    `uses_given_versions`: use the versions with the ids in `dataset_versions` and `model_versions`, not the latest.
    `original`: the job that is repeated exactly; its stored script and requirements replace those in the workspace.
    """
    context = {"organization": organization, "uses_given_versions": uses_given_versions, "original": original}
    values = QuoteRequestSerializer(data=data, context=context).values()
    values.pop("exact")  # not a field of Purchase; for an exact rerun, `orders.quote_order` has already replaced `data`
    fault_tolerance = FaultTolerance(**{each.name: values.pop(each.name) for each in fields(FaultTolerance)})
    return Purchase(**values, fault_tolerance=fault_tolerance)


def asks_for_exact_rerun(data: Mapping[str, Any]) -> bool:
    """Whether the field `exact` of a request is true. False for an invalid value, which `parse` reports."""
    try:
        return bool(QuoteRequestSerializer().fields["exact"].run_validation(data.get("exact", empty)))
    except ValidationError:
        return False


def purchase_data(purchase: Mapping[str, Any], *, as_bought: bool = False) -> dict[str, Any]:
    """Return the stored purchase of a quote as data for `parse`.

    A free estimate gets back the limits of the purchase that it measured, because a customer who repeats it wants a
    full run. `as_bought` keeps the free estimate's own limits. Older versions of the console did not store the nodes
    and limits of the measured purchase. They also did not expand variables in arguments, so the dollar signs in their
    purchases are escaped.
    """
    data = dict(purchase)
    if data.pop(FREE_ESTIMATE_MARK, None):
        # Older versions did not store what they replaced. So only the time limit is undone, which each of them set.
        measured = data.pop(MEASURED, {"max_seconds": None})
        if not as_bought:
            data |= measured
    if not data.get(EXPANDS_ARGUMENTS) and "arguments" in data:
        data["arguments"] = [escape(argument) for argument in data["arguments"]]
    return data


def parse_placement(*, organization: Organization, data: Mapping[str, Any]) -> Placement:
    """Validate the placement of an image check. Raises InvalidInput with a message for each invalid field."""
    return Placement(**CheckRequestSerializer(data=data, context={"organization": organization}).values())


def parse_notebook(
    *, organization: Organization, data: Mapping[str, Any], uses_given_versions: bool = False
) -> NotebookPurchase:
    """Validate the purchase of a notebook. Raises InvalidInput with a message for each invalid field.

    `uses_given_versions`: use the versions with the ids in `dataset_versions`, not the latest ones.
    """
    context = {"organization": organization, "uses_given_versions": uses_given_versions}
    values = NotebookQuoteRequestSerializer(data={**data, "nodes": 1, "workers_per_node": 1}, context=context).values()
    return NotebookPurchase(**values)


def max_workers_per_node(spec: NodeSpec) -> int:
    """Return the maximum number of processes on a node: one for each GPU, or a few per CPU.

    At least two without GPUs, so that several ranks on one node can be tried even on a fraction of a CPU.
    """
    return spec.gpus or max(2, math.floor(spec.cpus * PROCESSES_PER_CPU))


def _max_workers(values: ValidValues) -> int:
    """Return the maximum number of processes per node for the chosen node spec."""
    spec: NodeSpec | None = values.get("node_spec")
    if spec is None:
        return 1000  # a loose limit, because the invalid node spec already has an error
    return max_workers_per_node(spec)


class ArgumentsField(FormField, serializers.ListField):
    """A list of arguments (API), or one line that is split as a POSIX shell splits it (forms)."""

    child = serializers.CharField()

    def to_internal_value(self, data: Any) -> list[str]:
        """Return the arguments. Raises ValidationError."""
        if isinstance(data, str):
            try:
                data = shlex.split(data)
            except ValueError:
                raise ValidationError(_("A quotation mark is not closed. Add the closing mark.")) from None
        # `type` instead of `isinstance`, because JSON's true and false become bool, a subclass of int.
        if not isinstance(data, list) or not all(type(item) in (str, int, float) for item in data):
            raise ValidationError(_("The arguments must be a list of strings."))
        arguments = [str(item) for item in data]
        if sum(len(each) + 1 for each in arguments) > MAX_ARGUMENTS_LENGTH or not all(map(is_storable_text, arguments)):
            raise ValidationError(_("The arguments are too long or contain invalid characters."))
        return arguments


class DatasetsField(FormField, serializers.ListField):
    """Datasets, each as `name` or `name@version`: a list (API), or separated by commas (forms)."""

    child = serializers.CharField()
    not_a_list_error = gettext_lazy("The datasets must be a list of names.")
    too_many_error = gettext_lazy("Choose at most %(most)d datasets.")
    repeated_error = gettext_lazy("Choose each dataset only once.")

    def to_internal_value(self, data: Any) -> tuple[VersionChoice, ...]:
        """Return the choices. Raises ValidationError."""
        names = [name.strip() for name in data.split(",") if name.strip()] if isinstance(data, str) else data or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValidationError(self.not_a_list_error)
        if len(names) > MAX_DATASETS:
            raise ValidationError(self.too_many_error % {"most": MAX_DATASETS})
        choices = tuple(self._choice(name) for name in names)
        if len({choice.name for choice in choices}) != len(choices):  # two versions would be mounted at one path
            raise ValidationError(self.repeated_error)
        return choices

    def _choice(self, text: str) -> VersionChoice:
        name, separator, number = text.partition("@")
        if not separator:
            return VersionChoice(name)
        # The length is checked first, because `int` raises for numbers of more than 4,300 digits.
        if not (number.isascii() and number.isdecimal() and len(number) <= MAX_VERSION_DIGITS and int(number)):
            raise ValidationError(_("Write a version as a number, for example digits@3."))
        return VersionChoice(name, int(number))


class ModelsField(DatasetsField):
    """Models, in the same form as datasets."""

    not_a_list_error = gettext_lazy("The models must be a list of names.")
    too_many_error = gettext_lazy("Choose at most %(most)d models.")
    repeated_error = gettext_lazy("Choose each model only once.")


class PinnedVersionsField(FormField, serializers.ListField):
    """Primary keys of versions, one per dataset or model. Ignored unless the context has `uses_given_versions`."""

    child = serializers.IntegerField()

    def run_validation(self, data: Any = empty) -> Any:
        """Return the keys. Raises ValidationError."""
        if not self.context.get("uses_given_versions") or data is empty or not data:
            return []
        # `type` instead of `isinstance`, because JSON's true and false become bool, a subclass of int.
        if not isinstance(data, list) or not all(type(key) is int and 0 < key <= storage.MAX_KEY for key in data):
            raise ValidationError(_("The versions must be a list of numbers."))
        return data


class LearningRateField(FormField, serializers.CharField):
    """A learning rate, as the customer's text."""

    def to_internal_value(self, data: Any) -> str:
        """Return the text without surrounding spaces. Raises ValidationError."""
        text = str(data).strip()
        try:
            rate = Decimal(text)
        except InvalidOperation:
            rate = Decimal("nan")
        if not rate.is_finite():
            raise ValidationError(_("The learning rate must be a number, for example 0.01 or 1e-3."))
        if len(text) > MAX_LR_LENGTH:
            sentence = _("The learning rate must have at most %(most)d characters.")
            raise ValidationError(sentence % {"most": MAX_LR_LENGTH})
        # Compared as a float, because scripts read a float: they would read 1e-999 as 0, and 1e999 as infinity.
        if float(rate) <= 0:
            raise ValidationError(_("The learning rate must be above 0."))
        if math.isinf(float(rate)):
            raise ValidationError(_("The learning rate is too large. Choose a smaller one."))
        return text


class _PlacementSerializer(FormSerializer):
    """Validates the fields that purchases and image checks share. Its context has the `organization`.

    `valid_values`: the values of the fields checked so far, without the invalid ones (`FormSerializer`).
    """

    def validate_node_spec(self, name: str) -> NodeSpec:
        """Return the node spec on offer."""
        spec = NodeSpec.objects.filter(name=name, is_active=True).first()
        if spec is None:
            raise ValidationError(_("This node spec does not exist. Choose one of the offered node specs."))
        return spec

    def validate_image(self, name: str) -> Image:
        """Return the image, which must include the framework and run on the cluster of the node spec."""
        image = storage.image_named(self.context["organization"], name)
        framework, spec = self.valid_values.get("framework"), self.valid_values.get("node_spec")
        if framework and framework not in image.frameworks:
            raise ValidationError(
                _("The image %(image)s does not include %(framework)s. Choose an image for this framework.")
                % {"image": image.name, "framework": framework.value}
            )
        if spec is None:
            return image
        try:
            cluster(spec.cluster).check_image(image_of(image), gpus=spec.gpus)
        except InvalidSpec as error:
            if error.field == "gpus" and not image.is_builtin:
                raise ValidationError(
                    _(
                        "The cluster of this node spec can't give GPUs to your own images. Choose nodes without GPUs, "
                        "or a built-in image."
                    )
                ) from None
            if error.field == "gpus":
                sentence = _("The image %(image)s cannot use GPUs. Choose nodes without GPUs, or another image.")
                raise ValidationError(sentence % {"image": image.name}) from None
            raise ValidationError(images.refusal(image, resolve_cluster_name(spec.cluster))) from None
        except RuntimeFault:
            pass  # the cluster does not answer; it checks the image again when the run is submitted
        return image

    def validate_workspace(self, name: str) -> Workspace:
        """Return the workspace."""
        return storage.workspace_named(self.context["organization"], name)

    def validate_datasets(self, choices: Sequence[VersionChoice]) -> tuple[DatasetVersion, ...]:
        """Return the chosen version of each dataset, by default the latest.

        A stored purchase also has the pinned versions, in the same order.
        """
        # The ids from the field `dataset_versions`, which is read first. Surplus ids are cut off, because `zip_longest`
        # would pair them with no choice.
        pinned = self.valid_values.get("dataset_versions", [])[: len(choices)]
        # The field `datasets` has the source `dataset_versions`, so the rows returned here overwrite the pinned ids
        # under that key. A Purchase has the choices too, so they are stored here.
        self.valid_values["datasets"] = tuple(choices)
        return tuple(self._version(choice, key) for choice, key in zip_longest(choices, pinned))

    def validate_nodes(self, nodes: int) -> int:
        """Check the quota, and that the empty cluster could run this number of nodes."""
        limit = self.context["organization"].quota.max_running_nodes
        if nodes > limit:
            raise ValidationError(
                _(
                    "Your organization can run at most %(most)d nodes at once. Choose fewer, or ask the "
                    "administrator to raise the limit."
                )
                % {"most": limit}
            )
        spec = self.valid_values.get("node_spec")
        if spec is None:
            return nodes
        try:
            most = cluster(spec.cluster).capacity().nodes_ever(resources_of(spec), spec.name)
        except RuntimeFault:
            return nodes  # the cluster does not answer; the scheduler compares again with its capacity
        if not most:
            raise ValidationError(
                _("No machine in this cluster is large enough for a node of %(spec)s. Choose another node spec.")
                % {"spec": spec.name}
            )
        if nodes > most:
            raise ValidationError(
                _("%(nodes)d nodes of %(spec)s do not fit in this cluster. It has capacity for at most %(most)d.")
                % {"nodes": nodes, "spec": spec.name, "most": most}
            )
        return nodes

    def validate_workers_per_node(self, workers: int | None) -> int:
        """Return the processes per node; by default one for each GPU, or one on a node without GPUs."""
        spec: NodeSpec | None = self.valid_values.get("node_spec")
        return workers or (spec.gpus if spec else 0) or 1

    def _version(self, choice: VersionChoice, pinned_key: int | None) -> DatasetVersion:
        """Return the chosen version of a dataset: the pinned one, else the one with its number, else the latest."""
        dataset = sharing.usable_dataset_named(self.context["organization"], choice.name)
        versions = storage.versions_of(dataset)  # newest first
        matching = versions.filter(number=choice.number) if choice.number else versions
        version = matching.filter(pk=pinned_key).first() if pinned_key else matching.first()
        if version is not None:
            return version
        if numbers := ", ".join(map(str, versions.values_list("number", flat=True)[:MAX_VERSIONS_LISTED])):
            sentence = _("The dataset %(name)s does not have this version. Choose one of: %(numbers)s.")
            raise ValidationError(sentence % {"name": choice.name, "numbers": numbers})
        sentence = _("The dataset %(name)s has no published version yet. Upload its files first.")
        raise ValidationError(sentence % {"name": choice.name})


class _PurchaseSerializer(_PlacementSerializer):
    """The fields of a purchase except those of fault tolerance.

    They are checked in this order, and each check may use the values of the fields above it.
    """

    product = NameField()
    framework = EnumField(
        Framework, error_messages={"invalid_choice": gettext_lazy("Choose one of these frameworks: %(known)s.")}
    )
    node_spec = NameField()
    image = NameField()
    workspace = NameField()
    code_path = NameField(
        help_text="Path of the script inside the workspace.",
        error_messages={"missing": gettext_lazy("Choose a script of the workspace.")},
    )
    environment = EnvironmentField(
        default=dict, help_text="Variables of every rank. The names of the environment contract are reserved."
    )
    secrets = SecretsField(
        default=list, help_text="Names of the organization's secrets that every rank gets as variables."
    )
    arguments = ArgumentsField(
        default=list, help_text="`$LR` and `${LR}` are replaced by the variable's value in each rank; `$$` is a `$`."
    )
    requirements = NameField(
        default="",
        allow_blank=True,
        help_text="Path of a requirements file inside the workspace. Its packages are installed before the run starts, "
        "at no charge.",
    )
    local_rank_argument = EnumField(
        LocalRankArgument,
        default=LocalRankArgument.AUTO,
        help_text="How each process gets its number on the node: `--local_rank=N` (`underscore`), `--local-rank=N` "
        "(`dash`) or not at all (`none`). `auto`: as the script's argument parser declares it.",
    )
    dataset_versions = PinnedVersionsField(default=list)
    datasets = DatasetsField(
        default=list, source="dataset_versions", help_text="Each as `name` for the latest version, or `name@3`."
    )
    model_versions = PinnedVersionsField(default=list)
    models = ModelsField(
        default=list, source="model_versions", help_text="Each as `name` for the latest version, or `name@2`."
    )
    from_checkpoint = WholeNumberField(
        most=storage.MAX_KEY,
        default=None,
        help_text="Number of an ended job: its checkpoints are copied to the new job.",
    )
    # If the product is invalid, the purchase is refused anyway. Loose limits then replace the product's, also below.
    epochs = WholeNumberField(most=lambda values: values["product"].max_epochs if "product" in values else 10**6)
    lr = LearningRateField(help_text="A number above 0, for example 0.01 or 1e-3.")
    lr_scaling = EnumField(
        LrScaling,
        default=LrScaling.NONE,
        help_text="`linear`: the code gets `lr` times the number of processes as `LR`, and `lr` as `LR_BASE`.",
    )
    warmup_epochs = WholeNumberField(
        least=0,
        most=lambda values: values.get("epochs", 10**6),
        default=0,
        help_text="The code gets this as `LR_WARMUP_EPOCHS`, and raises the learning rate itself.",
    )
    batch_size = WholeNumberField(most=MAX_BATCH_SIZE, help_text="Per process.")
    nodes = WholeNumberField(most=lambda values: values["product"].max_nodes if "product" in values else 1000)
    workers_per_node = WholeNumberField(
        most=_max_workers,
        default=None,
        help_text="Default: one for each GPU, or one on a node without GPUs.",
    )
    max_seconds = WholeNumberField(
        least=MIN_TIME_LIMIT_SECONDS,
        most=lambda values: values["product"].max_seconds if "product" in values else 10**9,
        default=None,
        help_text="The run ends after this time.",
    )
    ceiling_minor = WholeNumberField(
        most=MAX_CEILING_MINOR, default=None, help_text="The run ends before it costs more."
    )

    name = JobNameField(default="", help_text="Name of the job; empty: the script's file name.")
    tags = TagsField(default=list, help_text="Tags of the job.")
    notes = NotesField(default="", help_text="Notes on the job.")

    def validate_product(self, name: str) -> Product:
        """Return the product on offer."""
        product = Product.objects.filter(name=name, is_active=True).first()
        if product is None:
            raise ValidationError(_("This product does not exist. Choose one of the offered products."))
        return product

    def validate_secrets(self, names: list[str]) -> tuple[str, ...]:
        """Check that the organization has these secrets, and that none has the name of a variable."""
        if missing := secret_store.missing(self.context["organization"], names):
            sentence = _("There is no secret %(name)s. Create it first, or choose another one.")
            raise ValidationError(sentence % {"name": missing[0][:MAX_QUOTED_LENGTH]})
        for name in names:
            if name in self.valid_values.get("environment", {}):
                sentence = _("%(name)s is also an environment variable. Remove it there, or do not choose the secret.")
                raise ValidationError(sentence % {"name": name})
        return tuple(names)

    def validate_arguments(self, arguments: list[str]) -> tuple[str, ...]:
        """Check the variables that the arguments refer to, and return an immutable value for `Purchase`."""
        if "environment" in self.valid_values and "secrets" in self.valid_values:
            check_references(arguments, own=self.valid_values["environment"], secrets=self.valid_values["secrets"])
        return tuple(arguments)

    def validate_models(self, choices: Sequence[VersionChoice]) -> tuple[ModelVersion, ...]:
        """Return the chosen version of each model, by default the latest, as `validate_datasets` does."""
        pinned = self.valid_values.get("model_versions", [])[: len(choices)]
        self.valid_values["models"] = tuple(choices)
        return tuple(self._model_version(choice, key) for choice, key in zip_longest(choices, pinned))

    def _model_version(self, choice: VersionChoice, pinned_key: int | None) -> ModelVersion:
        """Return the chosen version of a model, as `_version` does for a dataset."""
        model = storage.model_named(self.context["organization"], choice.name)
        versions = storage.model_versions_of(model).select_related("model")  # newest first
        matching = versions.filter(number=choice.number) if choice.number else versions
        version = matching.filter(pk=pinned_key).first() if pinned_key else matching.first()
        if version is not None:
            return version
        if numbers := ", ".join(map(str, versions.values_list("number", flat=True)[:MAX_VERSIONS_LISTED])):
            sentence = _("The model %(name)s does not have this version. Choose one of: %(numbers)s.")
            raise ValidationError(sentence % {"name": choice.name, "numbers": numbers})
        sentence = _("The model %(name)s has no version. Publish one first, or choose another model.")
        raise ValidationError(sentence % {"name": choice.name})

    def validate_from_checkpoint(self, pk: int | None) -> Job | None:
        """Return the job to start from."""
        spec: NodeSpec | None = self.valid_values.get("node_spec")
        if pk is None or spec is None:  # an invalid node spec already has an error
            return None
        organization: Organization = self.context["organization"]
        cluster_name = resolve_cluster_name(spec.cluster)
        return checkpoints.find_source(organization=organization, pk=pk, cluster_name=cluster_name)

    def validate_tags(self, tags: list[str]) -> tuple[str, ...]:
        """Return an immutable value for `Purchase`."""
        return tuple(tags)

    def validate_requirements(self, path: str) -> Requirements | None:
        """Return the requirements, whose packages the run's cluster must be able to install."""
        return _read_requirements(path, self.valid_values, original=self.context.get("original"))

    def validate_code_path(self, path: str) -> str:
        """Return the normalized path of a script in the workspace."""
        if len(path) > MAX_PATH_LENGTH:
            raise ValidationError(_("The path is too long. Use shorter names or fewer folders."))
        workspace = self.valid_values.get("workspace")
        if workspace is None or self.context.get("original"):
            return path
        return mounts.check_script(workspace=workspace, code_path=path)


def _read_requirements(path: str, values: ValidValues, *, original: Job | None = None) -> Requirements | None:
    """Return the requirements of a purchase, from the file at `path` in its workspace. Raises InvalidInput.

    None if the purchase has no requirements, or no valid workspace. `values` are its valid values. The stored
    requirements of the job `original` replace the file.
    """
    workspace = values.get("workspace")
    if not path or workspace is None:
        return None
    file = packages.requirements_of(original) if original else packages.read_requirements(workspace, path)
    if file is not None:
        packages.check(file, image=values.get("image"), spec=values.get("node_spec"))
    return file


@extend_schema_serializer(exclude_fields=("dataset_versions", "model_versions"))  # only stored purchases have them
class QuoteRequestSerializer(_PurchaseSerializer, FaultToleranceSerializer):
    """A training run to price."""

    exact = serializers.BooleanField(
        default=False,
        help_text="For a rerun: run the script as it was ordered, with the same dataset versions. Then only nodes, "
        "limits, fault tolerance, name and tags can change.",
    )


class _OptionalFrameworkSerializer(_PlacementSerializer):
    """A placement whose framework is by default the image's first one."""

    node_spec = NameField()
    framework = EnumField(
        Framework,
        default=None,
        error_messages={"invalid_choice": gettext_lazy("Choose one of these frameworks: %(known)s.")},
        help_text="Default: the image's first one.",
    )

    def validate_image(self, name: str) -> Image:
        """Also set the default framework."""
        image = super().validate_image(name)
        # A framework that was left out is None here. An invalid one has no key, and already has an error.
        if self.valid_values.get("framework", "invalid") is None:
            if not image.frameworks:
                raise ValidationError(_("Choose one of these frameworks: %(known)s.") % {"known": ", ".join(Framework)})
            self.valid_values["framework"] = Framework(image.frameworks[0])
        return image


@extend_schema_serializer(exclude_fields=("dataset_versions", "nodes", "workers_per_node"))  # not chosen by customers
class NotebookQuoteRequestSerializer(_OptionalFrameworkSerializer):
    """A notebook to price."""

    image = NameField(help_text="An image with JupyterLab.")
    workspace = NameField(help_text="The folder in which JupyterLab opens and saves notebooks.")
    dataset_versions = PinnedVersionsField(default=list)
    datasets = DatasetsField(
        default=list, source="dataset_versions", help_text="Each as `name` for the latest version, or `name@3`."
    )
    nodes = WholeNumberField(most=1)
    workers_per_node = WholeNumberField(most=1)
    idle_seconds = WholeNumberField(
        least=MIN_TIME_LIMIT_SECONDS,
        most=MAX_NOTEBOOK_SECONDS,
        default=DEFAULT_IDLE_SECONDS,
        help_text="The notebook ends after this time without activity.",
    )
    max_seconds = WholeNumberField(
        least=MIN_TIME_LIMIT_SECONDS,
        most=MAX_NOTEBOOK_SECONDS,
        default=DEFAULT_NOTEBOOK_SECONDS,
        help_text="The notebook ends after this time.",
    )
    ceiling_minor = WholeNumberField(
        most=MAX_CEILING_MINOR, default=None, help_text="The notebook ends before it costs more."
    )
    name = JobNameField(default="", help_text="Name of the notebook; empty: the workspace's name.")
    requirements = NameField(
        default="",
        allow_blank=True,
        help_text="Path of a requirements file inside the workspace. Its packages are installed before the notebook "
        "starts, at no charge.",
    )
    inspected_job = WholeNumberField(
        most=storage.MAX_KEY,
        default=None,
        help_text="Number of an ended job, whose checkpoints and outputs the notebook reads in `/jobs/<number>`.",
    )

    def validate_requirements(self, path: str) -> Requirements | None:
        """Return the requirements, whose packages the notebook's cluster must be able to install."""
        return _read_requirements(path, self.valid_values)

    def validate_inspected_job(self, pk: int | None) -> Job | None:
        """Return the job whose files the notebook reads."""
        spec: NodeSpec | None = self.valid_values.get("node_spec")
        if pk is None or spec is None:  # an invalid node spec already has an error
            return None
        organization: Organization = self.context["organization"]
        cluster_name = resolve_cluster_name(spec.cluster)
        return inspection.find_job(organization=organization, pk=pk, cluster_name=cluster_name)


class NotebookExtensionRequestSerializer(FormSerializer):
    """More time for a running notebook."""

    added_seconds = WholeNumberField(
        least=MIN_TIME_LIMIT_SECONDS,
        most=MAX_NOTEBOOK_SECONDS,
        help_text="How much longer the notebook may run. A notebook may run for at most a week in all.",
    )


@extend_schema_serializer(exclude_fields=("image",))  # the API has it in the path
class CheckRequestSerializer(_OptionalFrameworkSerializer):
    """An image check: which image, and on which nodes."""

    image = NameField()
    workspace = NameField(default="", allow_blank=True, help_text="Default: the organization's first one.")
    datasets = DatasetsField(
        default=list, source="dataset_versions", help_text="Each as `name` for the latest version, or `name@3`."
    )
    nodes = WholeNumberField(most=1000)
    workers_per_node = WholeNumberField(most=_max_workers, default=None)

    def validate_workspace(self, name: str) -> Workspace:
        """Return the workspace, or the organization's first one."""
        if name:
            return super().validate_workspace(name)
        workspace = storage.workspaces_for(self.context["organization"]).first()
        if workspace is None:
            raise ValidationError(_("Create a workspace first."))
        return workspace
