"""Find out which images the clusters can run.

`problem`, `problem_on` and `refusal` return a sentence for customers in the reader's language.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.conf import settings
from django.utils.translation import gettext as _

from console.accounts.models import Organization
from jobs import clusters
from jobs.clusters import cluster, cluster_names, image_of
from runtime.errors import InvalidSpec, RuntimeFault
from runtime.images.contents import Contents, read_contents
from runtime.specs import PullSecret
from storage import registries
from storage.models import Image


def problem(image: Image) -> str:
    """Return why no cluster can run the image; empty if a cluster can, or if any cluster does not answer."""
    return problems([image]).get(image.pk, "")


def problems(images: Iterable[Image]) -> dict[int, str]:
    """Return what `problem` returns, by the primary keys of the images that have a problem.

    Besides reading `images`, this makes one database query, for the clusters that do not answer.
    """
    unavailable = clusters.unavailable_clusters()
    if any(name in unavailable for name in cluster_names()):
        return {}  # a cluster that does not answer might run any of the images
    reasons = ((image.pk, [problem_on(image, name) for name in cluster_names()]) for image in images)
    # An image has a problem only if every cluster refuses it. Pages show only the first cluster's reason.
    return {pk: sentences[0] for pk, sentences in reasons if all(sentences)}


def problem_on(image: Image, cluster_name: str) -> str:
    """Return why the cluster cannot run the image; empty if it can, or does not answer."""
    try:
        cluster(cluster_name).check_image(image_of(image))
    except InvalidSpec:
        return refusal(image, cluster_name)
    except RuntimeFault:
        return ""
    return ""


def refusal(image: Image, cluster_name: str) -> str:
    """Return why a cluster whose `check_image` raised InvalidSpec refused the image, and what to do.

    Does not use the exception's message, which is in English only.
    """
    if image.is_builtin:
        sentence = _(
            "The image %(image)s is not ready on this cluster. Choose another one, or ask the "
            "administrator to build it."
        )
    elif not clusters.pulls_images(cluster_name):
        sentence = _(
            "This cluster runs built-in environments, and pulls no images, so it cannot run %(image)s. Choose a "
            "built-in image, and list further packages in a requirements.txt."
        )
    else:  # for nodes without GPUs, a cluster refuses a customer's image only if its reference is invalid
        sentence = _("The registry reference of the image %(image)s is not valid. Edit the image.")
    return sentence % {"image": image.name}


def pull_secret(*, organization: Organization, image: Image) -> PullSecret | None:
    """Return the credentials that the organization stored for the image's registry; None if the pull needs none."""
    if image.is_builtin:
        return None
    registry = registries.registry_for(organization=organization, reference=image.reference)
    if registry is None or not registry.username:
        return None
    return PullSecret(registry.host, registry.username, registries.password_of(registry))


def contents_of(image: Image) -> Contents | None:
    """Return what a built-in image contains; None if it is not built here, and for a customer's image."""
    return read_contents(settings.TRAINYARD_IMAGES_ROOT, image.name) if image.is_builtin else None


def any_cluster_pulls_images() -> bool:
    """Whether any cluster runs images from registries, and not only built-in ones."""
    return any(map(clusters.pulls_images, cluster_names()))


def default_image(ready: Iterable[Image]) -> Image | None:
    """Return which of the ready images the form of a new order preselects; None if there are none.

    Built-in images are preferred to others, then images whose first framework is PyTorch, then the first name.
    """
    return min(
        ready,
        key=lambda image: (not image.is_builtin, image.frameworks[:1] != ["pytorch"], image.name),
        default=None,
    )
