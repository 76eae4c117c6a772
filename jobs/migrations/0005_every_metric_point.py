from django.db import migrations, models
from django.db.models import F


def count_on_from_the_step(apps, schema_editor):
    apps.get_model("jobs", "MetricPoint").objects.update(position=F("step"))


class Migration(migrations.Migration):
    dependencies = [("jobs", "0004_job_traceparent")]

    operations = [
        migrations.RemoveConstraint(model_name="metricpoint", name="one_value_per_step"),
        migrations.AddField(
            model_name="metricpoint", name="position", field=models.BigIntegerField(db_default=0)
        ),
        migrations.RunPython(count_on_from_the_step, migrations.RunPython.noop),
        migrations.AddIndex(
            model_name="metricpoint", index=models.Index(fields=["job", "name"], name="metric_points_of_a_curve")
        ),
    ]
