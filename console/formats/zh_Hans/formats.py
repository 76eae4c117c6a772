"""Simplified Chinese. The one difference: a moment is written with the name of its time zone."""

DATETIME_FORMAT = "Y年n月j日 H:i T"
SHORT_DATETIME_FORMAT = "Y年n月j日 H:i T"
