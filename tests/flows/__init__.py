"""A package, so that the consoles its tests share end with it, and no later test runs beside them."""
