"""Who acts: users, organizations, memberships, activated services, API tokens, and the trail of what was done."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib.auth.base_user import BaseUserManager
from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils.translation import gettext_lazy as _

from console.accounts.roles import Capability, Role, allows

DISTRIBUTED_TRAINING = "distributed-training"


class UserManager(BaseUserManager["User"]):
    """Makes users who are known by their e-mail address."""

    def create_user(self, email: str, password: str | None = None, **fields: Any) -> User:
        """Make a user. Raises ValueError without an e-mail address."""
        if not email:
            raise ValueError("A user needs an e-mail address.")
        user = self.model(email=self.normalize_email(email).lower(), **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user

    def create_superuser(self, email: str, password: str | None = None, **fields: Any) -> User:
        """Make an administrator."""
        return self.create_user(email, password, is_staff=True, is_superuser=True, **fields)


class User(AbstractUser):
    """A person. There is no user name: the e-mail address is it."""

    username = None  # type: ignore[assignment]  # the way Django documents for leaving a field of AbstractUser out
    email = models.EmailField(_("e-mail address"), unique=True)
    language = models.CharField(
        _("language"),
        max_length=8,
        blank=True,
        default="",
        db_default="",
        help_text=_("Of mail; empty until the person has logged in."),
    )

    USERNAME_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    objects: ClassVar[UserManager] = UserManager()  # type: ignore[assignment]  # its own manager: no user names

    class Meta:
        verbose_name = _("user")
        verbose_name_plural = _("users")

    def __str__(self) -> str:
        return self.email


class Organization(models.Model):
    """A customer: owns wallets, datasets, workspaces, jobs. Everything a tenant sees is reached from here."""

    name = models.CharField(_("name"), max_length=100)
    slug = models.SlugField(_("short name"), unique=True, max_length=60)
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    members: models.ManyToManyField[User, Membership] = models.ManyToManyField(User, through="Membership")

    class Meta:
        verbose_name = _("organization")
        verbose_name_plural = _("organizations")

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    """A user's role in an organization."""

    class Roles(models.TextChoices):
        """Labels for `roles.Role`."""

        OWNER = Role.OWNER, _("Owner")
        MEMBER = Role.MEMBER, _("Member")
        BILLING = Role.BILLING, _("Billing")
        VIEWER = Role.VIEWER, _("Viewer")

    user = models.ForeignKey(User, models.CASCADE, related_name="memberships", verbose_name=_("user"))
    organization = models.ForeignKey(
        Organization, models.CASCADE, related_name="memberships", verbose_name=_("organization")
    )
    role = models.CharField(_("role"), max_length=16, choices=Roles.choices, default=Roles.MEMBER)
    created_at = models.DateTimeField(_("created"), auto_now_add=True)

    class Meta:
        verbose_name = _("membership")
        verbose_name_plural = _("memberships")
        constraints = (models.UniqueConstraint(fields=["user", "organization"], name="one_role_per_member"),)

    def __str__(self) -> str:
        return f"{self.user} · {self.organization} · {self.role}"

    def allows(self, capability: Capability) -> bool:
        """Whether this member may do `capability`."""
        return allows(self.role, capability)


class Quota(models.Model):
    """The most an organization may use at once. One row each, made with the organization."""

    organization = models.OneToOneField(Organization, models.CASCADE, related_name="quota")
    max_running_nodes = models.PositiveIntegerField(_("nodes running at once"), default=8)
    max_open_jobs = models.PositiveIntegerField(_("jobs queued or running at once"), default=100)
    max_checks_per_day = models.PositiveIntegerField(_("free checks of an image a day"), default=20)
    max_storage_bytes = models.PositiveBigIntegerField(_("bytes of storage"), default=100 * 1024**3)

    class Meta:
        verbose_name = _("quota")
        verbose_name_plural = _("quotas")

    def __str__(self) -> str:
        return str(self.organization)


class ServiceActivation(models.Model):
    """Whether an organization has taken up a service, and who accepted which terms. The row outlives deactivation."""

    organization = models.ForeignKey(Organization, models.CASCADE, related_name="activations")
    service = models.SlugField(_("service"), default=DISTRIBUTED_TRAINING)
    terms_version = models.CharField(_("terms accepted"), max_length=32)
    activated_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")
    activated_at = models.DateTimeField(_("activated"))
    deactivated_at = models.DateTimeField(_("deactivated"), null=True, blank=True)

    class Meta:
        verbose_name = _("service activation")
        verbose_name_plural = _("service activations")
        constraints = (models.UniqueConstraint(fields=["organization", "service"], name="one_activation_per_service"),)

    def __str__(self) -> str:
        return f"{self.organization} · {self.service}"

    @property
    def is_active(self) -> bool:
        """Whether new orders are taken."""
        return self.deactivated_at is None


class ApiToken(models.Model):
    """A secret that acts for one member. Only its SHA-256 is stored; the secret is shown once, when made."""

    membership = models.ForeignKey(Membership, models.CASCADE, related_name="tokens")
    name = models.CharField(_("name"), max_length=100)
    prefix = models.CharField(_("begins with"), max_length=12)
    digest = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    last_used_at = models.DateTimeField(_("last used"), null=True, blank=True)
    revoked_at = models.DateTimeField(_("revoked"), null=True, blank=True)

    class Meta:
        verbose_name = _("API token")
        verbose_name_plural = _("API tokens")

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"


class AuditEvent(models.Model):
    """One act that mattered: who did what to which object, when, from where. Written once, never changed."""

    organization = models.ForeignKey(Organization, models.SET_NULL, null=True, blank=True, related_name="+")
    actor = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+")
    action = models.CharField(_("action"), max_length=64)
    target = models.CharField(_("object"), max_length=128, blank=True)
    data = models.JSONField(_("details"), default=dict, blank=True)
    created_at = models.DateTimeField(_("when"), auto_now_add=True, db_index=True)

    class Meta:
        verbose_name = _("audit event")
        verbose_name_plural = _("audit events")
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"{self.action} {self.target}"
