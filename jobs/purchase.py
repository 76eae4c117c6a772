"""What a customer asks to buy, read from raw values and checked whole: every fault is told at its field, all at once.

Pages and API come here with the same names. The one rule: a Purchase exists only if everything it names does.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from django.utils.translation import gettext as _

from billing.models import NodeSpec
from console.accounts.errors import InvalidInput
from console.accounts.models import Organization
from console.operations.kept import Kept, given
from jobs import fields
from jobs.backend import cluster, image_of, resources_of
from jobs.models import Product
from jobs.resilience import Resilience, read_resilience
from runtime.errors import InvalidSpec, RuntimeFault
from runtime.specs import Framework
from storage import mounts, selectors
from storage.models import DatasetVersion, Image, Workspace

LONGEST_ARGUMENTS = 8192
LONGEST_PATH = 1000
LONGEST_RATE = 32
MOST_DATASETS = 100
MOST_BATCH = 1_000_000
LEAST_SECONDS = 60
PROCESSES_PER_CPU = 4
_PRODUCT = Kept(lambda: Product.objects.filter(name=given("name"), is_active=True))
_NODE_SPEC = Kept(lambda: NodeSpec.objects.filter(name=given("name"), is_active=True))


@dataclass(frozen=True)
class Purchase:
    """A training run as it can be bought: every name resolved."""

    product: Product
    framework: Framework
    image: Image
    workspace: Workspace
    code_path: str
    arguments: tuple[str, ...]
    dataset_versions: tuple[DatasetVersion, ...]
    epochs: int
    lr: str
    batch_size: int
    node_spec: NodeSpec
    nodes: int
    workers_per_node: int
    max_seconds: int | None
    ceiling_minor: int | None
    resilience: Resilience = field(default_factory=Resilience)

    @property
    def code_key(self) -> str:
        """What runs of the same code share: the script's place, whatever its settings."""
        return hashlib.sha256(f"{self.workspace.pk}:{self.code_path}".encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """As the API's field names, with the dataset versions pinned; `parse` reads it again."""
        return {
            "product": self.product.name,
            "framework": self.framework.value,
            "image": self.image.name,
            "workspace": self.workspace.name,
            "code_path": self.code_path,
            "arguments": list(self.arguments),
            "datasets": [version.dataset.name for version in self.dataset_versions],
            "dataset_versions": [version.pk for version in self.dataset_versions],
            "epochs": self.epochs,
            "lr": self.lr,
            "batch_size": self.batch_size,
            "node_spec": self.node_spec.name,
            "nodes": self.nodes,
            "workers_per_node": self.workers_per_node,
            "max_seconds": self.max_seconds,
            "ceiling_minor": self.ceiling_minor,
        } | self.resilience.to_json()


def parse(*, organization: Organization, data: Mapping[str, Any], pinned: Sequence[int] = ()) -> Purchase:
    """Read and check a purchase. Raises InvalidInput with a sentence for each field at fault.

    `pinned`: the versions that were quoted, one for each dataset; without it the latest are taken.
    """
    reader = fields.Reader(data)
    product = reader.field("product", _product)
    framework = reader.field("framework", _framework)
    spec = reader.field("node_spec", _node_spec)
    image = reader.field("image", lambda value: _image(organization, value, framework, spec))
    workspace = reader.field("workspace", lambda value: _workspace(organization, value))
    code_path = reader.field("code_path", lambda value: _code_path(workspace, value))
    arguments = reader.field("arguments", _arguments)
    versions = reader.field("datasets", lambda value: _versions(organization, value, pinned))
    epochs = reader.field("epochs", lambda value: fields.whole(value, 1, product.max_epochs if product else 10**6))
    lr = reader.field("lr", _learning_rate)
    batch_size = reader.field("batch_size", lambda value: fields.whole(value, 1, MOST_BATCH))
    nodes = reader.field("nodes", lambda value: _nodes(organization, product, spec, value))
    workers = reader.field("workers_per_node", lambda value: _workers(spec, value))
    max_seconds = reader.field(
        "max_seconds", lambda value: fields.optional(value, LEAST_SECONDS, product.max_seconds if product else 10**9)
    )
    ceiling_minor = reader.field("ceiling_minor", lambda value: fields.optional(value, 1, 10**12))
    resilience = read_resilience(reader, framework=framework, image=image, spec=spec, nodes=nodes)
    if reader.faults or not (product and framework and image and workspace and code_path and spec):
        raise InvalidInput(fields=reader.faults)
    return Purchase(
        product=product,
        framework=framework,
        image=image,
        workspace=workspace,
        code_path=code_path,
        arguments=arguments or (),
        dataset_versions=versions or (),
        epochs=epochs or 1,
        lr=lr or "",
        batch_size=batch_size or 1,
        node_spec=spec,
        nodes=nodes or 1,
        workers_per_node=workers or 1,
        max_seconds=max_seconds,
        ceiling_minor=ceiling_minor,
        resilience=resilience,
    )


@dataclass(frozen=True)
class Choices:
    """The part of a purchase that says where something runs, and not what."""

    framework: Framework
    image: Image
    workspace: Workspace
    dataset_versions: tuple[DatasetVersion, ...]
    node_spec: NodeSpec
    nodes: int
    workers_per_node: int

    def to_json(self) -> dict[str, Any]:
        """As the API's field names."""
        return {
            "framework": self.framework.value,
            "image": self.image.name,
            "workspace": self.workspace.name,
            "datasets": [version.dataset.name for version in self.dataset_versions],
            "node_spec": self.node_spec.name,
            "nodes": self.nodes,
            "workers_per_node": self.workers_per_node,
        }


def read_choices(reader: fields.Reader, *, organization: Organization) -> Choices | None:
    """Read where something is to run; without a framework the image's first, without a workspace any."""
    spec = reader.field("node_spec", _node_spec)
    found = reader.field("image", lambda value: _image(organization, value, None, spec))
    framework = reader.field("framework", lambda value: _framework_of(found, value))
    image = reader.field("image", lambda value: _image(organization, value, framework, spec))
    workspace = reader.field("workspace", lambda value: _any_workspace(organization, value))
    versions = reader.field("datasets", lambda value: _versions(organization, value, ()))
    nodes = reader.field("nodes", lambda value: _nodes(organization, None, spec, value))
    workers = reader.field("workers_per_node", lambda value: _workers(spec, value))
    if not (framework and image and workspace and spec and nodes and workers):
        return None
    return Choices(framework, image, workspace, versions or (), spec, nodes, workers)


def _framework_of(image: Image | None, value: Any) -> Framework:
    first = image.frameworks[0] if image and image.frameworks else ""
    return _framework(first if fields.is_empty(value) else value)


def _any_workspace(organization: Organization, value: Any) -> Workspace:
    if not fields.is_empty(value):
        return _workspace(organization, value)
    workspace = selectors.workspaces_for(organization).first()
    if workspace is None:
        raise ValueError(_("Create a workspace first."))
    return workspace


def _product(value: Any) -> Product:
    product = _PRODUCT.first(name=fields.name(value))
    if product is None:
        raise ValueError(_("There is no such product. Choose one of those on offer."))
    return product


def _framework(value: Any) -> Framework:
    try:
        return Framework(fields.name(value))
    except ValueError:
        known = ", ".join(Framework)
        raise ValueError(_("Choose one of these frameworks: %(known)s.") % {"known": known}) from None


def _image(organization: Organization, value: Any, framework: Framework | None, spec: NodeSpec | None) -> Image:
    image = selectors.image_named(organization, fields.name(value))
    if framework and framework not in image.frameworks:
        raise ValueError(
            _("The image %(image)s doesn't carry %(framework)s. Choose an image for this framework.")
            % {"image": image.name, "framework": framework.value}
        )
    if spec is None:
        return image
    try:
        cluster(spec.cluster).check_image(image_of(image))
    except InvalidSpec:
        raise ValueError(
            _("The image %(image)s isn't ready on this cluster. Choose another, or ask the administrator to build it.")
            % {"image": image.name}
        ) from None
    except RuntimeFault:
        pass  # the cluster does not answer now; whether it can run is seen when the job is dispatched
    return image


def _workspace(organization: Organization, value: Any) -> Workspace:
    return selectors.workspace_named(organization, fields.name(value))


def _code_path(workspace: Workspace | None, value: Any) -> str:
    path = fields.name(value)
    if len(path) > LONGEST_PATH:
        raise ValueError(_("This path is too long. Use shorter names, or fewer folders."))
    return mounts.check_script(workspace=workspace, code_path=path) if workspace else path


def _arguments(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError:
            raise ValueError(_("A quotation mark is not closed.")) from None
    if not isinstance(value, list) or not all(isinstance(item, str | int | float) for item in value):
        raise ValueError(_("Give the arguments as a list of words."))
    words = tuple(str(item) for item in value)
    if sum(len(word) + 1 for word in words) > LONGEST_ARGUMENTS or not all(fields.is_text(word) for word in words):
        raise ValueError(_("The arguments are too long, or hold characters that no text has."))
    return words


def _versions(organization: Organization, value: Any, pinned: Sequence[int]) -> tuple[DatasetVersion, ...]:
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    names = value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(_("Give the datasets as a list of names."))
    if len(set(names)) != len(names):
        raise ValueError(_("Each dataset can be chosen once."))
    if len(names) > MOST_DATASETS:
        raise ValueError(_("Choose %(most)d datasets at most.") % {"most": MOST_DATASETS})
    wanted = dict(zip(names, pinned, strict=False))
    return tuple(_version(organization, name, wanted.get(name)) for name in names)


def _version(organization: Organization, name: str, pinned: int | None) -> DatasetVersion:
    dataset = selectors.dataset_named(organization, name)
    version = dataset.versions.filter(pk=pinned).first() if pinned else selectors.latest_version(dataset)
    if version is None:
        sentence = _("The dataset %(name)s has no published version yet. Upload its files.")
        raise ValueError(sentence % {"name": name})
    return version


def _learning_rate(value: Any) -> str:
    text = str(value if value is not None else "").strip()
    try:
        rate = Decimal(text)
    except InvalidOperation:
        raise ValueError(_("Give the learning rate as a number, such as 0.01 or 1e-3.")) from None
    # As the code will read it: 1e-999 is above 0 only on paper.
    if not rate.is_finite() or not 0 < float(rate) < math.inf or len(text) > LONGEST_RATE:
        raise ValueError(_("The learning rate is a number above 0."))
    return text


def _node_spec(value: Any) -> NodeSpec:
    spec = _NODE_SPEC.first(name=fields.name(value))
    if spec is None:
        raise ValueError(_("There is no such node spec. Choose one of those on offer."))
    return spec


def _nodes(organization: Organization, product: Product | None, spec: NodeSpec | None, value: Any) -> int:
    nodes = fields.whole(value, 1, product.max_nodes if product else 1000)
    if nodes > organization.quota.max_running_nodes:
        raise ValueError(
            _("Your organization may run %(most)d nodes at once. Choose fewer, or ask the administrator for more.")
            % {"most": organization.quota.max_running_nodes}
        )
    if spec is None:
        return nodes
    try:
        most = cluster(spec.cluster).capacity().nodes_ever(resources_of(spec), spec.name)
    except RuntimeFault:
        return nodes  # the cluster does not answer now; whether it fits is seen when the job is dispatched
    if not most:
        raise ValueError(
            _("No machine of this cluster can hold a node of %(spec)s. Choose another node spec.") % {"spec": spec.name}
        )
    if nodes > most:
        raise ValueError(
            _("%(nodes)d nodes of %(spec)s can never fit this cluster: it has room for %(most)d.")
            % {"nodes": nodes, "spec": spec.name, "most": most}
        )
    return nodes


def _workers(spec: NodeSpec | None, value: Any) -> int:
    if spec is None:
        most, usual = 1000, 1
    elif spec.gpus:
        most = usual = spec.gpus
    else:
        most, usual = max(2, math.floor(spec.cpus * PROCESSES_PER_CPU)), 1
    return usual if fields.is_empty(value) else fields.whole(value, 1, most)
