from datetime import timedelta

from django.db import migrations
from django.db.models import F
from django.utils import timezone

KEPT = timedelta(days=7)


def fill(apps, _schema_editor):
    """Say of rows deleted before these columns existed until when their files stay, or that they are gone."""
    version = apps.get_model("storage", "DatasetVersion")
    workspace = apps.get_model("storage", "Workspace")
    version.objects.filter(entry_count=0).update(entry_count=F("file_count") + 1)
    for dataset in apps.get_model("storage", "Dataset").objects.exclude(deleted_at=None).iterator():
        end = dataset.deleted_at + KEPT
        version.objects.filter(dataset=dataset).update(deleted_at=dataset.deleted_at, kept_until=end)
    workspace.objects.exclude(deleted_at=None).update(kept_until=F("deleted_at") + KEPT)
    for model in (version, workspace):
        model.objects.filter(kept_until__lt=timezone.now()).update(removed_at=F("kept_until"))


class Migration(migrations.Migration):
    dependencies = [("storage", "0002_storage_accounting")]
    operations = [migrations.RunPython(fill, migrations.RunPython.noop)]
