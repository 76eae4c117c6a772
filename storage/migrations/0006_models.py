import django.core.validators
import django.db.models.deletion
import re
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0007_field_labels"),
        ("storage", "0005_uploads"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Model",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "name",
                    models.CharField(
                        max_length=63,
                        validators=[
                            django.core.validators.RegexValidator(
                                re.compile("^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?\\Z"),
                                "Use 1 to 63 lowercase letters, digits, hyphens and underscores. Start and end with a letter or digit.",
                            )
                        ],
                        verbose_name="name",
                    ),
                ),
                ("description", models.TextField(blank=True, verbose_name="description")),
                ("created_at", models.DateTimeField(auto_now_add=True, verbose_name="created")),
                ("deleted_at", models.DateTimeField(blank=True, null=True, verbose_name="deleted")),
                (
                    "created_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "organization",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="trained_models", to="accounts.organization"
                    ),
                ),
            ],
            options={
                "verbose_name": "model",
                "verbose_name_plural": "models",
                "ordering": ("name",),
            },
        ),
        migrations.CreateModel(
            name="ModelVersion",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.PositiveIntegerField(verbose_name="version")),
                ("folder", models.CharField(max_length=200, unique=True)),
                ("size_bytes", models.PositiveBigIntegerField(verbose_name="size")),
                ("file_count", models.PositiveIntegerField(verbose_name="files")),
                ("entry_count", models.PositiveIntegerField(help_text="Files and folders.", verbose_name="entries")),
                (
                    "sha256",
                    models.CharField(
                        help_text="Of the list of its files in sha256sum format, sorted by path.",
                        max_length=64,
                        verbose_name="SHA-256",
                    ),
                ),
                ("job_pk", models.PositiveBigIntegerField(blank=True, db_index=True, null=True, verbose_name="job")),
                ("lineage", models.JSONField(blank=True, default=dict, verbose_name="lineage")),
                ("published_at", models.DateTimeField(auto_now_add=True, verbose_name="published")),
                ("deleted_at", models.DateTimeField(blank=True, null=True, verbose_name="deleted")),
                ("kept_until", models.DateTimeField(blank=True, null=True, verbose_name="kept until")),
                ("removed_at", models.DateTimeField(blank=True, null=True, verbose_name="files removed")),
                (
                    "created_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="versions", to="storage.model"
                    ),
                ),
            ],
            options={
                "verbose_name": "model version",
                "verbose_name_plural": "model versions",
                "ordering": ("-number",),
            },
        ),
        migrations.AddField(
            model_name="model",
            name="latest",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to="storage.modelversion",
                verbose_name="latest version",
            ),
        ),
        migrations.AddConstraint(
            model_name="modelversion",
            constraint=models.UniqueConstraint(fields=("model", "number"), name="one_model_version_per_number"),
        ),
        migrations.AddConstraint(
            model_name="model",
            constraint=models.UniqueConstraint(
                condition=models.Q(("deleted_at__isnull", True)),
                fields=("organization", "name"),
                name="one_model_per_name",
            ),
        ),
    ]
