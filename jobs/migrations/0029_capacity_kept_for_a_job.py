from django.db import migrations, models


class Migration(migrations.Migration):
    """Rename two fields of CapacitySnapshot. Their columns keep their names, so the database does not change."""

    dependencies = [("jobs", "0028_admin_labels")]

    operations = [
        migrations.AlterField(
            model_name="capacitysnapshot",
            name="held_from",
            field=models.DateTimeField(blank=True, db_column="held_from", null=True),
        ),
        migrations.AlterField(
            model_name="capacitysnapshot",
            name="held_from_job",
            field=models.BigIntegerField(blank=True, db_column="held_from_job", null=True),
        ),
        migrations.RenameField(
            model_name="capacitysnapshot", old_name="held_from", new_name="kept_for_job_queued_at"
        ),
        migrations.RenameField(model_name="capacitysnapshot", old_name="held_from_job", new_name="kept_for_job"),
    ]
