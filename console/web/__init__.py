"""The console's pages: HTML views by area, template tags, navigation."""
