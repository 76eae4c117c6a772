from django.db import migrations


def delete_contents(apps, _schema_editor):
    """Delete the scripts of organizations that were closed before closing did so. Safe to repeat."""
    snapshots = apps.get_model("jobs", "ScriptSnapshot").objects
    snapshots.filter(organization__closure__closed_at__isnull=False).update(content=None)


class Migration(migrations.Migration):
    dependencies = [("jobs", "0030_headroom_help"), ("accounts", "0013_closure")]

    operations = [migrations.RunPython(delete_contents, migrations.RunPython.noop)]
