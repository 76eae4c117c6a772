import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("jobs", "0011_script_snapshots"),
        ("storage", "0006_models"),
    ]

    operations = [
        migrations.AddField(
            model_name="job",
            name="checkpoints_copied_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="job",
            name="from_checkpoint",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to="jobs.job",
                verbose_name="from the checkpoint of",
            ),
        ),
        migrations.CreateModel(
            name="JobModel",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("position", models.PositiveSmallIntegerField()),
                (
                    "job",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="job_models", to="jobs.job"
                    ),
                ),
                (
                    "version",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="+", to="storage.modelversion"
                    ),
                ),
            ],
            options={"ordering": ("position",)},
        ),
        migrations.AddConstraint(
            model_name="jobmodel",
            constraint=models.UniqueConstraint(fields=("job", "version"), name="one_mount_per_model_version"),
        ),
    ]
