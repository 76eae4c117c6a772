"""The roof: HTML views by area, template tags, navigation."""
