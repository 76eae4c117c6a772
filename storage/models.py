"""Database rows of images, datasets and models with their versions, workspaces, uploads and allocations.

Most rows name files below `selectors.root()`. Only the services of this package write these rows, because a row and its
files must change together.
"""

from __future__ import annotations

import re
import uuid
from datetime import datetime, timedelta

from django.conf import settings
from django.core.validators import RegexValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization

KEPT_AFTER_DELETION = timedelta(days=7)
"""How long deleted files are kept. Within a week people notice a mistake.

It must also be longer than a backup takes. A backup copies the rows first, and then needs the files that they name."""
NAME_PATTERN = re.compile(r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?\Z")
NAME_VALIDATOR = RegexValidator(
    NAME_PATTERN,
    _("Use 1 to 63 lowercase letters, digits, hyphens and underscores. Start and end with a letter or digit."),
)


class Registry(models.Model):
    """An image registry and the credentials to pull from it. `secret` is the password, encrypted (`registries`)."""

    organization = models.ForeignKey(
        Organization, models.CASCADE, related_name="registries", verbose_name=_("organization")
    )
    host = models.CharField(_("host"), max_length=255)
    username = models.CharField(_("user name"), max_length=255, blank=True)
    secret = models.BinaryField(blank=True, default=b"")
    created_at = models.DateTimeField(_("created"), auto_now_add=True)

    class Meta:
        verbose_name = _("registry")
        verbose_name_plural = _("registries")
        constraints = (models.UniqueConstraint(fields=["organization", "host"], name="one_registry_per_host"),)

    def __str__(self) -> str:
        return self.host


class Secret(models.Model):
    """A value that runs can get as an environment variable. It is stored encrypted (`secret_store`)."""

    organization = models.ForeignKey(Organization, models.CASCADE, related_name="secrets")
    name = models.CharField(_("name"), max_length=100)
    encrypted = models.BinaryField()
    updated_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("changed by")
    )
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    updated_at = models.DateTimeField(_("changed"), auto_now=True)

    class Meta:
        verbose_name = _("secret")
        verbose_name_plural = _("secrets")
        constraints = (models.UniqueConstraint(fields=["organization", "name"], name="one_secret_per_name"),)

    def __str__(self) -> str:
        return self.name


class Image(models.Model):
    """An image that runs use. Built-in images have no organization; a customer's own have a registry reference."""

    organization = models.ForeignKey(
        Organization, models.CASCADE, null=True, blank=True, related_name="images", verbose_name=_("organization")
    )
    name = models.CharField(_("name"), max_length=63, validators=[NAME_VALIDATOR])
    title = models.CharField(_("title"), max_length=100)
    description = models.TextField(_("description"), blank=True)
    frameworks = models.JSONField(_("frameworks"), default=list, help_text=_("pytorch, horovod, tensorflow"))
    reference = models.CharField(_("registry reference"), max_length=500, blank=True)
    is_active = models.BooleanField(_("offered"), default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("image")
        verbose_name_plural = _("images")
        ordering = ("organization_id", "name")
        constraints = (
            models.UniqueConstraint(fields=["organization", "name"], name="one_image_per_name", nulls_distinct=False),
        )

    def __str__(self) -> str:
        return self.name

    @property
    def is_builtin(self) -> bool:
        """Return whether the image is part of the installation, and not a customer's own."""
        return self.organization_id is None


class Dataset(models.Model):
    """A named set of files. Its published versions never change."""

    organization = models.ForeignKey(
        Organization, models.CASCADE, related_name="datasets", verbose_name=_("organization")
    )
    name = models.CharField(_("name"), max_length=63, validators=[NAME_VALIDATOR])
    description = models.TextField(_("description"), blank=True)
    latest = models.ForeignKey(
        "DatasetVersion", models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("latest version")
    )
    is_public = models.BooleanField(
        _("public"), default=False, db_default=False, help_text=_("Every organization can read it.")
    )
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("created by")
    )
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True)
    published: list[DatasetVersion]
    """The versions that can be chosen; only on the objects of `sharing.datasets_to_choose`."""

    class Meta:
        verbose_name = _("dataset")
        verbose_name_plural = _("datasets")
        ordering = ("name",)
        constraints = (
            models.UniqueConstraint(
                fields=["organization", "name"],
                name="one_dataset_per_name",
                condition=models.Q(deleted_at__isnull=True),
            ),
        )

    def __str__(self) -> str:
        return self.name


class DatasetShare(models.Model):
    """Read access to a dataset for another organization. It begins when the recipient enters the share's code.

    Until then, `recipient` and `accepted_at` are None.
    """

    dataset = models.ForeignKey(Dataset, models.CASCADE, related_name="shares")
    label = models.CharField(_("label"), max_length=100)
    """The owner's note on who gets the code. The recipient does not see it."""
    code_sha256 = models.CharField(max_length=64, unique=True)
    recipient = models.ForeignKey(Organization, models.CASCADE, null=True, blank=True, related_name="+")
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    expires_at = models.DateTimeField(_("expires"))
    """Until when the code can be entered. An accepted share does not expire."""
    accepted_at = models.DateTimeField(_("accepted"), null=True, blank=True)
    revoked_at = models.DateTimeField(_("revoked"), null=True, blank=True)

    class Meta:
        verbose_name = _("dataset share")
        verbose_name_plural = _("dataset shares")
        indexes = (
            models.Index(fields=["recipient"], name="shares_of_a_recipient", condition=models.Q(revoked_at=None)),
        )

    def __str__(self) -> str:
        return f"{self.dataset}: {self.label}"


class DatasetImport(models.Model):
    """The import of a dataset version from an address. It ends with a `version` or with an `error`."""

    dataset = models.ForeignKey(Dataset, models.CASCADE, related_name="imports")
    url = models.CharField(_("address"), max_length=2000)
    """An https address, or `s3://bucket/key`."""
    endpoint = models.CharField(_("endpoint"), max_length=300, blank=True, default="", db_default="")
    """The origin of the bucket's server; empty for an https address."""
    access_key_id_secret = models.CharField(max_length=100, blank=True, default="", db_default="")
    """This and the next column name the Secrets with the bucket's credentials. Both are empty for a public bucket."""
    secret_access_key_secret = models.CharField(max_length=100, blank=True, default="", db_default="")
    version = models.ForeignKey("DatasetVersion", models.SET_NULL, null=True, blank=True, related_name="+")
    size_bytes = models.PositiveBigIntegerField(_("size"), null=True, blank=True)
    """In bytes. For an https address: what the server announced. For a bucket: the size of the tar file into which the
    import packs its objects. None while unknown."""
    received_bytes = models.PositiveBigIntegerField(_("received"), default=0)
    validator = models.CharField(max_length=200, blank=True, default="")
    """The ETag or date of the file (HTTP's validators). With it a broken transfer can continue: see `imports`."""
    started_at: datetime
    """When this process began to work on it (`imports.run_import`). Not a column."""
    error = models.CharField(_("error"), max_length=500, blank=True, default="")
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    updated_at = models.DateTimeField(_("updated"), auto_now=True)
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)

    class Meta:
        verbose_name = _("dataset import")
        verbose_name_plural = _("dataset imports")
        indexes = (models.Index(fields=["id"], name="open_dataset_imports", condition=models.Q(ended_at=None)),)

    def __str__(self) -> str:
        return f"{self.dataset}: {self.url}"

    @property
    def allocation_key(self) -> str:
        """Return the key of the Allocation that reserves quota for the import."""
        return f"import:{self.pk}"


class DatasetVersion(models.Model):
    """One immutable version of a dataset, in a read-only folder of its own."""

    kind = "versions"
    """The segment for dataset versions in the URLs of deleted items (`usage_api`). Fixed, because it is in the API."""
    dataset = models.ForeignKey(Dataset, models.CASCADE, related_name="versions", verbose_name=_("dataset"))
    number = models.PositiveIntegerField(_("version"))
    folder = models.CharField(_("folder"), max_length=200, unique=True)
    """The name of the version's folder in `datasets/`."""
    size_bytes = models.PositiveBigIntegerField(_("size"))
    file_count = models.PositiveIntegerField(_("files"))
    entry_count = models.PositiveIntegerField(
        _("entries"), default=0, db_default=0, help_text=_("Files, links and folders.")
    )
    """0 only in a row of an older version of Trainyard, until garbage collection fills it in."""
    sha256 = models.CharField(
        _("SHA-256"),
        max_length=64,
        help_text=_("Of the uploaded archive. For files uploaded separately, of their list in sha256sum format."),
    )
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("created by")
    )
    published_at = models.DateTimeField(_("published"), auto_now_add=True)
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True)
    kept_until = models.DateTimeField(_("kept until"), null=True, blank=True)
    """Until when the files of a deleted version are kept, count against the quota and can be restored."""
    removed_at = models.DateTimeField(_("files removed"), null=True, blank=True)

    class Meta:
        verbose_name = _("dataset version")
        verbose_name_plural = _("dataset versions")
        ordering = ("-number",)
        constraints = (models.UniqueConstraint(fields=["dataset", "number"], name="one_dataset_version_per_number"),)

    def __str__(self) -> str:
        return f"{self.dataset} v{self.number}"


class Model(models.Model):
    """A named series of trained models. Its published versions never change."""

    organization = models.ForeignKey(
        Organization, models.CASCADE, related_name="trained_models", verbose_name=_("organization")
    )
    name = models.CharField(_("name"), max_length=63, validators=[NAME_VALIDATOR])
    description = models.TextField(_("description"), blank=True)
    latest = models.ForeignKey(
        "ModelVersion", models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("latest version")
    )
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("created by")
    )
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True)

    class Meta:
        verbose_name = _("model")
        verbose_name_plural = _("models")
        ordering = ("name",)
        constraints = (
            models.UniqueConstraint(
                fields=["organization", "name"],
                name="one_model_per_name",
                condition=models.Q(deleted_at__isnull=True),
            ),
        )

    def __str__(self) -> str:
        return self.name


class ModelVersion(models.Model):
    """One immutable version of a model, in a read-only folder of its own."""

    kind = "models"
    """The segment for model versions in the URLs of deleted items (`usage_api`). Fixed, because it is in the API."""
    model = models.ForeignKey(Model, models.CASCADE, related_name="versions", verbose_name=_("model"))
    number = models.PositiveIntegerField(_("version"))
    folder = models.CharField(_("folder"), max_length=200, unique=True)
    """The name of the version's folder in `models/`."""
    size_bytes = models.PositiveBigIntegerField(_("size"))
    file_count = models.PositiveIntegerField(_("files"))
    entry_count = models.PositiveIntegerField(_("entries"), help_text=_("Files and folders."))
    sha256 = models.CharField(
        _("SHA-256"), max_length=64, help_text=_("Of the list of its files in sha256sum format, sorted by path.")
    )
    job_pk = models.PositiveBigIntegerField(_("job"), null=True, blank=True, db_index=True)
    """The id of the job that wrote the files. No foreign key, because the version may outlive the job, and this package
    may not import `jobs`."""
    lineage = models.JSONField(_("lineage"), default=dict, blank=True)
    """How the model was made (`model_catalog.Lineage`): copies of the values at the time of publication."""
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("created by")
    )
    published_at = models.DateTimeField(_("published"), auto_now_add=True)
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True)
    kept_until = models.DateTimeField(_("kept until"), null=True, blank=True)
    """Until when the files of a deleted version are kept, count against the quota and can be restored."""
    removed_at = models.DateTimeField(_("files removed"), null=True, blank=True)

    class Meta:
        verbose_name = _("model version")
        verbose_name_plural = _("model versions")
        ordering = ("-number",)
        constraints = (models.UniqueConstraint(fields=["model", "number"], name="one_model_version_per_number"),)

    def __str__(self) -> str:
        return f"{self.model} v{self.number}"

    @property
    def reference(self) -> str:
        """Return `name@number`, by which a quote's request names the version."""
        return f"{self.model.name}@{self.number}"


class Workspace(models.Model):
    """A folder of a customer, to which both runs and the console write."""

    kind = "workspaces"
    """The segment for workspaces in the URLs of deleted items (`usage_api`). Fixed, because it is in the API."""
    organization = models.ForeignKey(
        Organization, models.CASCADE, related_name="workspaces", verbose_name=_("organization")
    )
    name = models.CharField(_("name"), max_length=63, validators=[NAME_VALIDATOR])
    description = models.TextField(_("description"), blank=True)
    folder = models.CharField(_("folder"), max_length=200, unique=True)
    """The name of the workspace's folder in `workspaces/`."""
    size_bytes = models.PositiveBigIntegerField(_("size"), default=0, help_text=_("last measured value"))
    entry_count = models.PositiveIntegerField(
        _("entries"), default=1, db_default=1, help_text=_("Files, links and folders.")
    )
    """An empty workspace has one entry: its folder."""
    measured_at = models.DateTimeField(_("last measured"), null=True, blank=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("created by")
    )
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True)
    kept_until = models.DateTimeField(_("kept until"), null=True, blank=True)
    """Until when the files of a deleted workspace are kept, count against the quota and can be restored."""
    removed_at = models.DateTimeField(_("files removed"), null=True, blank=True)

    class Meta:
        verbose_name = _("workspace")
        verbose_name_plural = _("workspaces")
        ordering = ("name",)
        constraints = (
            models.UniqueConstraint(
                fields=["organization", "name"],
                name="one_workspace_per_name",
                condition=models.Q(deleted_at__isnull=True),
            ),
        )

    def __str__(self) -> str:
        return self.name


class WorkspaceImport(models.Model):
    """The import of a git repository as a new workspace. It ends with a `workspace` or with an `error`."""

    class States(models.TextChoices):
        """How far an import is, as computed from the columns."""

        WAITING = "waiting", _("Waiting")
        IMPORTING = "importing", _("Importing")
        COMPLETE = "complete", _("Complete")
        FAILED = "failed", _("Failed")

    organization = models.ForeignKey(
        Organization, models.CASCADE, related_name="workspace_imports", verbose_name=_("organization")
    )
    name = models.CharField(_("name"), max_length=63)
    """The name of the workspace to create; `description` is its description."""
    description = models.TextField(_("description"), blank=True)
    git_url = models.CharField(_("address"), max_length=500)
    git_branch = models.CharField(_("branch or tag"), max_length=200, blank=True)
    git_secret = models.CharField(_("access token"), max_length=100, blank=True)
    """The name of the secret with the token."""
    workspace = models.ForeignKey(
        Workspace, models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("workspace")
    )
    received_bytes = models.PositiveBigIntegerField(_("received"), default=0)
    attempts = models.PositiveSmallIntegerField(_("attempts"), default=0)
    """How often a worker has begun the import. More than once means that a worker died."""
    error = models.CharField(_("error"), max_length=500, blank=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("created by")
    )
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    updated_at = models.DateTimeField(_("updated"), auto_now=True)
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)

    class Meta:
        verbose_name = _("workspace import")
        verbose_name_plural = _("workspace imports")
        constraints = (
            models.UniqueConstraint(
                fields=["organization", "name"],
                name="one_open_workspace_import_per_name",
                condition=models.Q(ended_at__isnull=True),
            ),
        )

    def __str__(self) -> str:
        return f"{self.name}: {self.git_url}"

    @property
    def state(self) -> States:
        """Return how far the import is."""
        if self.error:
            return self.States.FAILED
        if self.ended_at:
            return self.States.COMPLETE
        return self.States.IMPORTING if self.attempts else self.States.WAITING

    @property
    def allocation_key(self) -> str:
        """Return the key of the Allocation that reserves quota for the import."""
        return f"git-import:{self.pk}"


class DeletedFile(models.Model):
    """A file or folder in a workspace's recycle bin. It is removed with its row after `kept_until`."""

    workspace = models.ForeignKey(Workspace, models.CASCADE, related_name="deleted_files", verbose_name=_("workspace"))
    path = models.CharField(_("path"), max_length=4000)
    """The path before the deletion, below the workspace's folder."""
    folder = models.CharField(_("folder in the recycle bin"), max_length=200, unique=True)
    """The name of the deleted file or folder in the recycle bins' folder (`recycle_bin.path_in_bin`)."""
    is_folder = models.BooleanField(_("folder"))
    size_bytes = models.PositiveBigIntegerField(_("size"), default=0)
    entry_count = models.PositiveIntegerField(_("entries"), default=0, help_text=_("Files, links and folders."))
    deleted_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("deleted by")
    )
    deleted_at = models.DateTimeField(_("deleted"), auto_now_add=True)
    kept_until = models.DateTimeField(_("kept until"), db_index=True)

    class Meta:
        verbose_name = _("deleted file")
        verbose_name_plural = _("deleted files")
        ordering = ("-id",)

    def __str__(self) -> str:
        return self.path


class Allocation(models.Model):
    """Bytes and entries that count against a quota, and belong to no version and no workspace."""

    class Kinds(models.TextChoices):
        """What an allocation counts."""

        UPLOAD = "upload", _("Upload in progress")
        """Any unfinished write: of an upload, an import, a copy or a publication (`quota.Reservation`)."""
        RUN = "run", _("Run results")

    organization = models.ForeignKey(
        Organization, models.CASCADE, related_name="allocations", verbose_name=_("organization")
    )
    kind = models.CharField(_("kind"), max_length=8, choices=Kinds.choices)
    key = models.CharField(_("key"), max_length=64, unique=True)
    """`job:<id>` for a run's results, `upload:<key>` for a resumable upload. Other unfinished writes: if an import or
    upload repeats the write after a crash, its `allocation_key` or `finishing_key`; else random."""
    label = models.CharField(_("name"), max_length=200)
    size_bytes = models.PositiveBigIntegerField(_("size"), default=0)
    entry_count = models.PositiveIntegerField(_("entries"), default=0, help_text=_("Files, links and folders."))
    kept_until = models.DateTimeField(_("kept until"), null=True, blank=True)
    """When the results of a run are deleted; None for an upload, and before the run's job has ended."""
    updated_at = models.DateTimeField(_("updated"), auto_now=True)

    class Meta:
        verbose_name = _("storage allocation")
        verbose_name_plural = _("storage allocations")
        ordering = ("kind", "-id")

    def __str__(self) -> str:
        return self.label

    @property
    def job_pk(self) -> int:
        """Return the id of the job whose run wrote the results. Only for the kind RUN."""
        return int(self.key.removeprefix("job:"))


class Upload(models.Model):
    """A resumable upload (`uploads`). Its bytes are in a file, whose length is the upload's offset."""

    class States(models.TextChoices):
        """The states of an upload. While FINISHING, all bytes have arrived, and are being published or stored."""

        RECEIVING = "receiving", _("Receiving")
        FINISHING = "finishing", _("Finishing")
        COMPLETE = "complete", _("Complete")
        FAILED = "failed", _("Failed")

    class Purposes(models.TextChoices):
        """What the bytes are for. A PART waits until a final upload joins it with others."""

        DATASET = "dataset", _("Dataset version")
        WORKSPACE = "workspace", _("Workspace file")
        PART = "part", _("Part of an upload")

    key = models.UUIDField(unique=True, default=uuid.uuid4, editable=False)
    """Names the upload in its URL, and its file."""
    organization = models.ForeignKey(Organization, models.CASCADE, related_name="uploads")
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    purpose = models.CharField(_("purpose"), max_length=9, choices=Purposes.choices)
    name = models.CharField(_("name"), max_length=63, blank=True)
    """The dataset's or workspace's name."""
    path = models.TextField(_("path"), blank=True)
    """The path in the workspace, of the file or of the folder into which the archive is unpacked."""
    filename = models.CharField(_("file name"), max_length=255, blank=True)
    """The name of the file on the client's machine, by which people recognize the upload."""
    is_unpacked = models.BooleanField(default=False)
    """Whether an archive for a workspace is unpacked. An archive for a dataset always is."""
    metadata = models.TextField(blank=True)
    """The client's `Upload-Metadata`, which `HEAD` returns."""
    size_bytes = models.PositiveBigIntegerField(_("size"))
    final = models.ForeignKey("self", models.SET_NULL, null=True, blank=True, related_name="parts")
    """If this is a part: the upload that joins it with others."""
    position = models.PositiveIntegerField(default=0)
    """If this is a part: its place in the final upload, from 0."""
    multipart_id = models.TextField(blank=True, default="", db_default="")
    """If this is a direct upload (`direct_uploads`): the ID of the multipart upload in the bucket. Else empty."""
    is_in_bucket = models.BooleanField(default=False, db_default=False)
    """If this is a direct upload: whether all its bytes are in the bucket, so that a worker can fetch them."""
    state = models.CharField(_("state"), max_length=9, choices=States.choices, default=States.RECEIVING)
    error_code = models.CharField(max_length=50, blank=True)
    error = models.TextField(_("error"), blank=True)
    sha256 = models.CharField(_("SHA-256"), max_length=64, blank=True)
    version = models.ForeignKey(DatasetVersion, models.SET_NULL, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    expires_at = models.DateTimeField(_("expires"), db_index=True)

    class Meta:
        verbose_name = _("upload")
        verbose_name_plural = _("uploads")
        ordering = ("-id",)

    def __str__(self) -> str:
        return self.filename or self.path or self.name or str(self.key)

    @property
    def allocation_key(self) -> str:
        """Return the key of the Allocation that reserves quota for the upload."""
        return f"upload:{self.key.hex}"

    @property
    def finishing_key(self) -> str:
        """Return the key of the Allocation that reserves quota for what is unpacked while the upload is finished."""
        return f"finish:{self.key.hex}"
