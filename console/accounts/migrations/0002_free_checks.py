"""How many free checks of an image an organization may buy a day."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """See the module."""

    dependencies = [("accounts", "0001_initial")]

    operations = [
        migrations.AddField(
            "quota",
            "max_checks_per_day",
            models.PositiveIntegerField(default=20, verbose_name="free checks of an image a day"),
        )
    ]
