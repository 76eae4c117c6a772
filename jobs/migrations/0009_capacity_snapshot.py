import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    """Renames a model and keeps its table, which the version before must find during an upgrade."""

    dependencies = [
        ("jobs", "0008_field_labels"),
    ]

    operations = [
        migrations.AlterModelTable(name="room", table="jobs_room"),
        migrations.RenameModel(old_name="Room", new_name="CapacitySnapshot"),
        migrations.AlterField(
            model_name="capacitysnapshot",
            name="node_spec",
            field=models.OneToOneField(
                on_delete=django.db.models.deletion.CASCADE, related_name="capacity_snapshot", to="billing.nodespec"
            ),
        ),
    ]
