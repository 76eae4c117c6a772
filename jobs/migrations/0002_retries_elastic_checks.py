"""What an order says about retries, hangs, fewer nodes and collectives; what an attempt was granted and how it went."""

from __future__ import annotations

from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.models import OuterRef, Subquery

REASONS = [
    ("completed", "Completed"),
    ("code_failed", "The code failed"),
    ("out_of_memory", "Out of memory"),
    ("disk_full", "Disk full"),
    ("hung", "It hung"),
    ("cancelled", "Cancelled"),
    ("time_limit", "Time limit reached"),
    ("no_capacity", "No capacity"),
    ("node_lost", "A node was lost"),
    ("platform_error", "Platform error"),
]


def earlier_attempts_had_all_their_nodes(apps: Apps, _editor: BaseDatabaseSchemaEditor) -> None:
    """Until now no run started with fewer nodes than bought."""
    attempt, job = apps.get_model("jobs", "Attempt"), apps.get_model("jobs", "Job")
    attempt.objects.update(granted_nodes=Subquery(job.objects.filter(pk=OuterRef("job_id")).values("nodes")[:1]))


class Migration(migrations.Migration):
    """See the module."""

    dependencies = [("jobs", "0001_initial")]

    operations = [
        migrations.AddField("job", "retries", models.PositiveSmallIntegerField(default=0, verbose_name="retries")),
        migrations.AddField(
            "job",
            "retry_backoff_seconds",
            models.PositiveIntegerField(default=0, verbose_name="wait before a retry (seconds)"),
        ),
        migrations.AddField(
            "job",
            "on_hang",
            models.CharField(
                choices=[
                    ("stop", "End the run"),
                    ("retry", "Try again, as one of the retries"),
                    ("ignore", "Do not watch for hangs"),
                ],
                default="stop",
                max_length=8,
                verbose_name="when it hangs",
            ),
        ),
        migrations.AddField("job", "min_nodes", models.PositiveSmallIntegerField(default=0, verbose_name="least nodes")),
        migrations.AddField(
            "job",
            "controller",
            models.CharField(
                choices=[("gloo", "Gloo"), ("mpi", "MPI")], default="gloo", max_length=8, verbose_name="controller"
            ),
        ),
        migrations.AddField(
            "job",
            "collective_timeout_seconds",
            models.PositiveIntegerField(default=0, verbose_name="timeout of a collective (seconds)"),
        ),
        migrations.AddField(
            "job",
            "stall_check_seconds",
            models.PositiveIntegerField(default=0, verbose_name="stall check (seconds)"),
        ),
        migrations.AddField("job", "builtin_script", models.CharField(blank=True, max_length=16)),
        migrations.AddField("job", "not_before", models.DateTimeField(blank=True, null=True)),
        migrations.AlterField(
            "job", "reason", models.CharField(blank=True, choices=REASONS, max_length=16, verbose_name="reason")
        ),
        migrations.AddField(
            "attempt", "granted_nodes", models.PositiveSmallIntegerField(default=0), preserve_default=False
        ),
        migrations.AddField("attempt", "spans", models.JSONField(blank=True, default=list)),
        migrations.AddField("attempt", "progress_at", models.DateTimeField(blank=True, null=True)),
        migrations.AddField("attempt", "checkpoint_at", models.DateTimeField(blank=True, null=True)),
        migrations.AddField("attempt", "restarts", models.PositiveSmallIntegerField(default=0)),
        migrations.AlterField("attempt", "reason", models.CharField(blank=True, choices=REASONS, max_length=16)),
        migrations.RunPython(earlier_attempts_had_all_their_nodes, migrations.RunPython.noop),
    ]
