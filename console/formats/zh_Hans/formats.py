"""Simplified Chinese. The one difference from Django's formats: a time is written with the name of its zone."""

DATETIME_FORMAT = "Y年n月j日 H:i T"
SHORT_DATETIME_FORMAT = "Y年n月j日 H:i T"
