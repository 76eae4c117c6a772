"""English. The one difference from Django's formats: a time is written with the name of its zone."""

DATETIME_FORMAT = "N j, Y, P T"
SHORT_DATETIME_FORMAT = "m/d/Y P T"
