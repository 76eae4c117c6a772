import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    """Add to jobs who ordered them, and index jobs by that member. The next migration fills the column.

    The index for estimates no longer depends on values: a prepared statement did not use it.
    """

    dependencies = [
        ("accounts", "0018_email_labels"),
        ("billing", "0024_email_labels"),
        ("jobs", "0024_indexes_of_code"),
        ("storage", "0013_workspace_imports"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField(
            model_name="job",
            name="placed_by",
            field=models.ForeignKey(
                db_index=False,
                editable=False,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to=settings.AUTH_USER_MODEL,
            ),
        ),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(fields=["placed_by", "organization", "queued_at", "id"], name="jobs_of_a_member"),
        ),
        migrations.RemoveIndex(model_name="job", name="completed_jobs_of_a_code"),
        migrations.AddIndex(
            model_name="job",
            index=models.Index(
                condition=models.Q(("finished_at__isnull", False), ("started_at__isnull", False)),
                fields=[
                    "organization", "code_key", "node_spec", "workers_per_node", "builtin_script", "state", "-id",
                ],
                name="ended_jobs_of_a_code",
            ),
        ),
    ]  # fmt: skip
