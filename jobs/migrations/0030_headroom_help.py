from decimal import Decimal

from django.core.validators import MinValueValidator
from django.db import migrations, models


class Migration(migrations.Migration):
    """Say what the headroom of a product multiplies. Only a help text changes."""

    dependencies = [("jobs", "0029_capacity_kept_for_a_job")]

    operations = [
        migrations.AlterField(
            model_name="product",
            name="headroom",
            field=models.DecimalField(
                decimal_places=2,
                default=Decimal(2),
                help_text="If the customer sets no time limit, the longest time of a run is its p90 estimate times this. A fixed price includes 1.5 times the reference seconds of its epochs, times this; a longer run costs more.",
                max_digits=4,
                validators=[MinValueValidator(Decimal(1))],
                verbose_name="headroom of the ceiling",
            ),
        ),
    ]
