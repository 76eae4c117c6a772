from django.db import migrations
from django.db.models import OuterRef, Subquery

BATCH_SIZE = 10_000
"""Jobs that one transaction updates, so that none is locked for more than a second."""


def copy_members(apps, _schema_editor):
    """Copy to each job who ordered it. Safe to repeat."""
    job, order = apps.get_model("jobs", "Job"), apps.get_model("jobs", "Order")
    member = Subquery(order.objects.filter(pk=OuterRef("order")).values("placed_by")[:1])
    empty = job.objects.filter(placed_by=None).order_by("pk")
    last = 0
    while ids := list(empty.filter(pk__gt=last).values_list("pk", flat=True)[:BATCH_SIZE]):
        job.objects.filter(pk__in=ids).update(placed_by=member)
        last = ids[-1]


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("jobs", "0025_jobs_of_a_member")]

    operations = [migrations.RunPython(copy_members, migrations.RunPython.noop)]
