"""Users, organizations and their closures, memberships, service activations, invitations, API tokens, the audit log."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib.auth.base_user import BaseUserManager
from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from console.accounts.roles import CAPABILITIES, Capability, Role, allows

DISTRIBUTED_TRAINING = "distributed-training"
"""The service that organizations activate before they order. So far the console sells no other."""
ACCOUNT_ACTION_PREFIX = "account."
"""How the `action` of each audit event about a person's own log-in begins (`console.accounts.audit`)."""
MAX_TARGET_LENGTH = 128
"""The length of the database column `AuditEvent.target`; longer texts are cut."""


class UserManager(BaseUserManager["User"]):
    """Creates users. A user has no user name, but is identified by e-mail address."""

    def create_user(self, email: str, password: str | None = None, **fields: Any) -> User:
        """Create a user. Raises ValueError without an e-mail address."""
        if not email:
            raise ValueError("A user needs an e-mail address.")
        user = self.model(email=self.normalize_email(email).lower(), **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user

    def create_superuser(self, email: str, password: str | None = None, **fields: Any) -> User:
        """Create an administrator."""
        return self.create_user(email, password, is_staff=True, is_superuser=True, **fields)


class User(AbstractUser):
    """A user, identified by e-mail address."""

    username = None  # type: ignore[assignment]  # the way Django documents for leaving a field of AbstractUser out
    email = models.EmailField(_("email address"), unique=True)
    language = models.CharField(
        _("language"),
        max_length=8,
        blank=True,
        default="",
        db_default="",
        help_text=_("Language of emails. Empty until the user first logs in."),
    )

    time_zone = models.CharField(
        _("time zone"),
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text=_("An IANA name such as Europe/Berlin. Leave empty to use the browser's time zone."),
    )
    browser_time_zone = models.CharField(
        _("time zone of the browser"), max_length=64, blank=True, default="", db_default=""
    )

    awaits_approval = models.BooleanField(
        _("awaits approval"),
        default=False,
        db_default=False,
        editable=False,
        help_text=_("The user signed up and cannot log in until an administrator approves."),
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
    """A tenant, which owns its wallet, datasets, workspaces and jobs."""

    name = models.CharField(_("name"), max_length=100)
    slug = models.SlugField(_("short name"), unique=True, max_length=60)
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    requires_second_factor = models.BooleanField(
        _("requires a second factor"),
        default=False,
        db_default=False,
        help_text=_("Members without a second factor cannot access the organization. Service accounts can."),
    )
    shell_enabled = models.BooleanField(
        _("shells are enabled"),
        default=False,
        db_default=False,
        help_text=_("Members who may run trainings can open a shell in the nodes of running jobs."),
    )
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

    scopes: frozenset[str] | None = None
    """The capabilities that the API token of this request is limited to. Not stored; None without a limit."""

    def allows(self, capability: Capability) -> bool:
        """Return whether the member's role, and the token if one is used, allows `capability`."""
        return allows(self.role, capability) and (self.scopes is None or capability in self.scopes)

    def may_grant(self, role: str) -> bool:
        """Return whether the member, with the token if one is used, has every capability of `role`."""
        return all(self.allows(capability) for capability in CAPABILITIES[Role(role)])


class ServiceAccount(models.Model):
    """An account of an organization for programs: it acts with API tokens and cannot log in.

    Its user is inactive and has no password, so it can neither log in nor receive email.
    """

    membership = models.OneToOneField(
        Membership, models.CASCADE, related_name="service_account", verbose_name=_("membership")
    )
    name = models.SlugField(_("name"), max_length=40)
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+", verbose_name=_("created by"))
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    disabled_at = models.DateTimeField(_("disabled"), null=True, blank=True)

    class Meta:
        verbose_name = _("service account")
        verbose_name_plural = _("service accounts")

    def __str__(self) -> str:
        return self.name


class Invitation(models.Model):
    """An invitation with a role, sent by email. The recipient accepts or declines it."""

    organization = models.ForeignKey(
        Organization, models.CASCADE, related_name="invitations", verbose_name=_("organization")
    )
    email = models.EmailField(_("email address"))
    role = models.CharField(_("role"), max_length=16, choices=Membership.Roles.choices)
    invited_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+", verbose_name=_("invited by"))
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    expires_at = models.DateTimeField(_("expires"))
    mailed_at = models.DateTimeField(_("mailed"), null=True, blank=True)
    accepted_at = models.DateTimeField(_("accepted"), null=True, blank=True)
    revoked_at = models.DateTimeField(_("revoked or declined"), null=True, blank=True)

    class Meta:
        verbose_name = _("invitation")
        verbose_name_plural = _("invitations")
        constraints = (
            models.UniqueConstraint(
                fields=["organization", "email"],
                condition=models.Q(accepted_at=None, revoked_at=None),
                name="one_open_invitation_per_address",
            ),
        )

    def __str__(self) -> str:
        return f"{self.email} · {self.organization}"

    @property
    def is_expired(self) -> bool:
        """Return whether the invitation has expired."""
        return self.expires_at <= timezone.now()


class Quota(models.Model):
    """The quotas of an organization. The row is created with the organization."""

    organization = models.OneToOneField(
        Organization, models.CASCADE, related_name="quota", verbose_name=_("organization")
    )
    max_running_nodes = models.PositiveIntegerField(_("maximum running nodes"), default=8)
    max_open_jobs = models.PositiveIntegerField(_("maximum open jobs"), default=100)
    max_checks_per_day = models.PositiveIntegerField(_("free image checks per day"), default=20)
    max_storage_bytes = models.PositiveBigIntegerField(_("maximum storage (bytes)"), default=100 * 1024**3)
    max_files = models.PositiveBigIntegerField(
        _("maximum files"), default=5_000_000, db_default=5_000_000, help_text=_("Files, links and folders.")
    )
    max_datasets = models.PositiveIntegerField(_("maximum datasets"), default=1000, db_default=1000)
    max_workspaces = models.PositiveIntegerField(_("maximum workspaces"), default=200, db_default=200)
    stops_writes = models.BooleanField(
        _("stops writes"),
        default=False,
        db_default=False,
        editable=False,
        help_text=_("Storage has been unpaid for too long, so nothing more can be stored."),
    )
    max_models = models.PositiveIntegerField(_("maximum models"), default=1000, db_default=1000)

    class Meta:
        verbose_name = _("quota")
        verbose_name_plural = _("quotas")

    def __str__(self) -> str:
        return str(self.organization)


class Closure(models.Model):
    """The closure of an organization: an owner requested it, and it is carried out after a notice period.

    Withdrawing the closure before `ends_at` deletes the row.
    """

    organization = models.OneToOneField(
        Organization, models.CASCADE, related_name="closure", verbose_name=_("organization")
    )
    requested_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+", verbose_name=_("requested by"))
    requested_at = models.DateTimeField(_("requested"), auto_now_add=True)
    ends_at = models.DateTimeField(_("end of the notice"))
    closed_at = models.DateTimeField(_("closed"), null=True, blank=True)
    problem = models.TextField(
        _("problem"), blank=True, default="", db_default="", help_text=_("Why the last attempt to close it stopped.")
    )
    mailed_at = models.DateTimeField(null=True, blank=True, editable=False)
    """When the emails that announce the closure to all members were sent (`accounts.emails.deliver`)."""

    class Meta:
        verbose_name = _("closure")
        verbose_name_plural = _("closures")
        ordering = ("-requested_at",)

    def __str__(self) -> str:
        return str(self.organization)

    @property
    def is_due(self) -> bool:
        """Return whether the notice period is over, so that the closure can no longer be withdrawn."""
        return self.ends_at <= timezone.now()


class ServiceActivation(models.Model):
    """The activation of a service by an organization, with the accepted terms. Kept after deactivation."""

    organization = models.ForeignKey(Organization, models.CASCADE, related_name="activations")
    service = models.SlugField(_("service"), default=DISTRIBUTED_TRAINING)
    terms_version = models.CharField(_("terms accepted"), max_length=32)
    activated_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+", verbose_name=_("activated by"))
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
        """Return whether the service is active."""
        return self.deactivated_at is None


class ApiToken(models.Model):
    """An API token of one member. Only its SHA-256 is stored; the secret is shown once, on creation."""

    membership = models.ForeignKey(Membership, models.CASCADE, related_name="tokens", verbose_name=_("membership"))
    name = models.CharField(_("name"), max_length=100)
    prefix = models.CharField(_("prefix"), max_length=12)
    """The first characters of the secret, by which a member recognizes the token."""
    digest = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    scopes = models.JSONField(
        _("scopes"), null=True, blank=True, help_text=_("Capabilities of the token. Empty: all that the role allows.")
    )
    expires_at = models.DateTimeField(_("expires"), null=True, blank=True)
    last_used_at = models.DateTimeField(_("last used"), null=True, blank=True)
    revoked_at = models.DateTimeField(_("revoked"), null=True, blank=True)

    class Meta:
        verbose_name = _("API token")
        verbose_name_plural = _("API tokens")

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    def scope_set(self) -> frozenset[str] | None:
        """Return the capabilities that the token is limited to; None: all that the role allows."""
        return None if self.scopes is None else frozenset(self.scopes)


class EmailDelivery(models.Model):
    """One recipient of an email that is being sent (`accounts.emails`). Deleted when all recipients have the email."""

    source = models.CharField(max_length=100)
    """The row that marks the email as due, such as `InvoiceMail:7`."""
    address = models.EmailField()
    leased_until = models.DateTimeField(null=True)
    """Until this time, only the worker that set it may send to this recipient. None: no worker is sending."""
    sent_at = models.DateTimeField(null=True)
    """When the recipient's email was sent, or was refused for good."""
    created_at = models.DateTimeField(auto_now_add=True)
    seen_at = models.DateTimeField()
    """When a worker last tried to complete the email."""

    class Meta:
        verbose_name = _("delivery of an email")
        verbose_name_plural = _("deliveries of emails")
        constraints = (models.UniqueConstraint(fields=["source", "address"], name="one_email_per_recipient"),)

    def __str__(self) -> str:
        return f"{self.source} → {self.address}"


class AuditEvent(models.Model):
    """An entry of the audit log: who did what to which object, when, from where.

    An entry never changes, except that `actor_email` replaces `actor` when that account is deleted.
    """

    organization = models.ForeignKey(
        Organization, models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("organization")
    )
    actor = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("who"))
    actor_email = models.EmailField(_("address of a deleted account"), blank=True, default="", db_default="")
    action = models.CharField(_("action"), max_length=64)
    target = models.CharField(_("object"), max_length=MAX_TARGET_LENGTH, blank=True)
    data = models.JSONField(_("details"), default=dict, blank=True)
    address = models.GenericIPAddressField(_("IP address"), null=True, blank=True)
    created_at = models.DateTimeField(_("when"), auto_now_add=True, db_index=True)

    class Meta:
        verbose_name = _("audit event")
        verbose_name_plural = _("audit events")
        ordering = ("-id",)
        indexes = (models.Index(fields=["organization", "-id"], name="audit_of_organization"),)

    def __str__(self) -> str:
        return f"{self.action} {self.target}"

    @property
    def actor_name(self) -> str:
        """Return the actor's e-mail address, also after the account was deleted; empty for the installation itself."""
        return str(self.actor) if self.actor else self.actor_email
