from django.db import migrations, models


class Migration(migrations.Migration):
    """Have the names of jobs in the index for the list of jobs, so that a search by name reads no other block."""

    dependencies = [("jobs", "0026_members_of_jobs")]

    operations = [
        migrations.AddIndex(
            model_name="job",
            index=models.Index(
                fields=["organization", "queued_at", "id"], include=("name",), name="jobs_by_order_and_name"
            ),
        ),
        migrations.RemoveIndex(model_name="job", name="jobs_by_order_time"),
    ]
