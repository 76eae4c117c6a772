"""What a dispute moved becomes rows of its own, one for each balance transaction: there may be more than two.

What the version before has booked, or books while both work, is found in the ledger when the dispute is next told of.
"""

from __future__ import annotations

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    """The rows and their sum."""

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
                help_text="The sum of what moved.", null=True, verbose_name="taken back now (minor units)"
            ),
        ),
    ]
