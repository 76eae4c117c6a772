
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0009_node_spec_cluster'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='stripeevent',
            index=models.Index(condition=models.Q(('state', 'quarantined')), fields=['id'], name='events_in_quarantine'),
        ),
    ]
