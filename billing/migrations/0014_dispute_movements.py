"""What a dispute moved becomes rows of its own, one for each balance transaction: there may be more than two."""

from __future__ import annotations

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

WRITE_DOWN = """
INSERT INTO billing_disputemovement (dispute_id, reference, amount_minor, moved_at)
    SELECT id, 'dispute:' || dispute_id, amount_minor, opened_at FROM billing_dispute WHERE is_withdrawn
    UNION ALL
    SELECT id, 'dispute-won:' || dispute_id, -amount_minor, opened_at FROM billing_dispute WHERE is_reinstated;
UPDATE billing_dispute SET withdrawn_minor = amount_minor WHERE is_withdrawn AND NOT is_reinstated;
"""
"""The provider's ids were not kept: each is written down when the provider next tells of the dispute."""


class Migration(migrations.Migration):
    """The rows, the sum, and no flags any more."""

    dependencies = [("billing", "0013_deleted_customers")]
    operations = [
        migrations.CreateModel(
            name="DisputeMovement",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "balance_transaction",
                    models.CharField(
                        blank=True, max_length=255, null=True, unique=True, verbose_name="balance transaction"
                    ),
                ),
                ("reference", models.CharField(max_length=100, unique=True, verbose_name="transaction")),
                (
                    "amount_minor",
                    models.BigIntegerField(help_text="Negative: given back.", verbose_name="taken (minor units)"),
                ),
                ("moved_at", models.DateTimeField(default=django.utils.timezone.now, verbose_name="when")),
                (
                    "dispute",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="movements",
                        to="billing.dispute",
                        verbose_name="dispute",
                    ),
                ),
            ],
            options={
                "verbose_name": "movement of a dispute",
                "verbose_name_plural": "movements of disputes",
                "ordering": ("id",),
            },
        ),
        migrations.AddField(
            model_name="dispute",
            name="withdrawn_minor",
            field=models.BigIntegerField(
                default=0, help_text="The sum of what moved.", verbose_name="taken back now (minor units)"
            ),
        ),
        migrations.RunSQL(WRITE_DOWN, migrations.RunSQL.noop),
        migrations.RemoveConstraint(model_name="dispute", name="only_what_was_withdrawn_is_reinstated"),
        migrations.RemoveField(model_name="dispute", name="is_reinstated"),
        migrations.RemoveField(model_name="dispute", name="is_withdrawn"),
        migrations.AddConstraint(
            model_name="dispute",
            constraint=models.CheckConstraint(
                condition=models.Q(("withdrawn_minor__gte", 0)), name="no_more_is_given_back_than_was_taken"
            ),
        ),
    ]
