"""Notifications, members' choices of mails, webhooks, and the deliveries of notifications to webhooks."""

from __future__ import annotations

import uuid

from django.db import models
from django.utils.translation import gettext_lazy as _

from console.accounts.models import Membership, Organization, User


class Notification(models.Model):
    """Something that happened in an organization. The row is written in the transaction in which it happened."""

    organization = models.ForeignKey(Organization, models.CASCADE, related_name="notifications")
    kind = models.CharField(_("kind"), max_length=32)
    """A key of `kinds.KINDS`."""
    data = models.JSONField(_("details"), default=dict)
    """The values that webhooks send. Pages and emails build their sentences from them, in the reader's language."""
    user = models.ForeignKey(User, models.SET_NULL, null=True, blank=True, related_name="+")
    """Who gets the email of `jobs.run_mails` or `jobs.notebook_endings`: the user who ordered the run or sweep.

    None: nobody gets it.

    Pages and webhooks ignore this field, which becomes None when the user is deleted.
    """
    created_at = models.DateTimeField(_("when"), auto_now_add=True)
    mailed_at = models.DateTimeField(null=True, blank=True)
    """When `jobs.run_mails` or `jobs.notebook_endings` was done with it, also if nobody wanted the email.

    Notifications of other kinds keep None: other tables keep track of their emails.
    """
    queued_at = models.DateTimeField(null=True, blank=True)
    """When its webhook deliveries were created."""

    class Meta:
        verbose_name = _("notification")
        verbose_name_plural = _("notifications")
        ordering = ("-id",)
        indexes = (
            models.Index(fields=["organization", "-id"], name="notifications_by_time"),
            models.Index(fields=["id"], condition=models.Q(queued_at=None), name="notifications_to_queue"),
            models.Index(fields=["id"], condition=models.Q(mailed_at=None), name="notifications_to_mail"),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.pk}"


class Choices(models.Model):
    """Which kinds of notifications a member gets as emails. Without a row, the defaults of `KINDS` apply."""

    membership = models.OneToOneField(Membership, models.CASCADE, related_name="notification_choices")
    mailed = models.JSONField(default=dict, blank=True)
    """For each kind, by its name in `KINDS`, whether it is emailed. A missing kind has its default."""
    read_until = models.BigIntegerField(default=0)
    """Unused. The previous version writes this column, and both versions use one schema during an upgrade."""

    class Meta:
        verbose_name = _("choices of notifications")
        verbose_name_plural = _("choices of notifications")

    def __str__(self) -> str:
        return f"{self.membership}"


class Webhook(models.Model):
    """A customer's URL that receives a request for each notification of the chosen kinds."""

    organization = models.ForeignKey(Organization, models.CASCADE, related_name="webhooks")
    url = models.URLField(_("URL"), max_length=500)
    kinds = models.JSONField(_("kinds"), default=list)
    """Keys of `KINDS`; empty: all."""
    secret = models.BinaryField(editable=False)
    """The encrypted key of the signatures."""
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(_("created"), auto_now_add=True)

    class Meta:
        verbose_name = _("webhook")
        verbose_name_plural = _("webhooks")
        ordering = ("id",)

    def __str__(self) -> str:
        return self.url


class Delivery(models.Model):
    """The delivery of one notification to one webhook."""

    class States(models.TextChoices):
        """The states of a delivery."""

        DUE = "due", _("will be sent")
        DELIVERED = "delivered", _("delivered")
        FAILED = "failed", _("failed")

    key = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    """The id that the receiver gets. It is the same in each try, so that the receiver can ignore repetitions."""
    webhook = models.ForeignKey(Webhook, models.CASCADE, related_name="deliveries")
    notification = models.ForeignKey(Notification, models.CASCADE, related_name="deliveries")
    state = models.CharField(_("state"), max_length=9, choices=States.choices, default=States.DUE)
    tries = models.PositiveSmallIntegerField(_("tries"), default=0)
    due_at = models.DateTimeField(_("next try"), auto_now_add=True)
    status = models.PositiveSmallIntegerField(_("HTTP status"), null=True, blank=True)
    error = models.CharField(_("error"), max_length=200, blank=True)
    delivered_at = models.DateTimeField(_("delivered"), null=True, blank=True)

    class Meta:
        verbose_name = _("delivery")
        verbose_name_plural = _("deliveries")
        ordering = ("-id",)
        indexes = (models.Index(fields=["due_at"], condition=models.Q(state="due"), name="deliveries_due"),)
        constraints = (
            models.UniqueConstraint(fields=["webhook", "notification"], name="one_delivery_per_notification"),
        )

    def __str__(self) -> str:
        return f"{self.notification} → {self.webhook}"
