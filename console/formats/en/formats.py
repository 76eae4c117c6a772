"""English. The one difference: a moment is written with the name of its time zone."""

DATETIME_FORMAT = "N j, Y, P T"
SHORT_DATETIME_FORMAT = "m/d/Y P T"
