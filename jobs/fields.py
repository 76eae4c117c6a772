"""Base classes of serializers that read both forms and JSON, and of their fields.

A form sends an empty string for a value that was left out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from rest_framework import serializers
from rest_framework.fields import empty

from console.core.errors import CustomerError, InvalidInput

ValidValues = Mapping[str, Any]
"""The values of the fields that were already found valid, by the fields' `source`. An invalid field is missing."""


class FormSerializer(serializers.Serializer[Any]):
    """A serializer that checks its fields in order and reports the errors of all of them at once.

    A method `validate_<field>` finds the values of earlier fields in `valid_values`. It raises ValidationError, or a
    CustomerError whose message for the field becomes the error.
    """

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        """Return the values by field name. Raises ValidationError."""
        if not isinstance(data, Mapping):
            raise serializers.ValidationError(_("Send a JSON object."))
        self.valid_values: dict[str, Any] = {}
        errors: dict[str, Any] = {}
        for name, field in self.fields.items():
            check: Callable[[Any], Any] = getattr(self, f"validate_{name}", lambda value: value)
            try:
                self.valid_values[str(field.source)] = check(field.run_validation(data.get(name, empty)))
            except CustomerError as error:
                # The message for this field is more specific than the error's general one.
                errors[name] = [error.fields.get(name) or error.message]
            except serializers.ValidationError as error:
                errors[name] = error.detail
        if errors:
            raise serializers.ValidationError(errors)
        return self.valid_values

    def values(self) -> dict[str, Any]:
        """Return the valid values. Raises InvalidInput with a message for each invalid field."""
        if not self.is_valid():
            raise InvalidInput(fields={name: " ".join(map(str, detail)) for name, detail in self.errors.items()})
        return dict(self.validated_data)


class FormField(serializers.Field[Any, Any, Any, Any]):
    """Base of the fields. The default replaces a missing, null or empty value. Without a default, it is an error."""

    def run_validation(self, data: Any = empty) -> Any:
        """Return the valid value. Raises ValidationError."""
        if (data is empty or data is None or data == "") and self.default is not empty:
            return self.get_default()
        return self.to_internal_value("" if data is empty else data)


class NameField(FormField, serializers.CharField):
    """The name of something that a form offers in a list, without surrounding spaces."""

    default_error_messages: ClassVar = {"missing": gettext_lazy("Choose an option.")}

    def to_internal_value(self, data: Any) -> str:
        """Return the name. Raises ValidationError."""
        if not isinstance(data, str) or not data.strip() or not is_storable_text(data):
            raise serializers.ValidationError(self.error_messages["missing"])
        return data.strip()


class EnumField(FormField, serializers.ChoiceField):
    """A member of an enumeration."""

    default_error_messages: ClassVar = {"invalid_choice": gettext_lazy("Choose one of: %(known)s.")}

    def __init__(self, enumeration: type[enum.StrEnum], **options: Any) -> None:
        self._enumeration = enumeration
        super().__init__(choices=[member.value for member in enumeration], **options)

    def to_internal_value(self, data: Any) -> enum.StrEnum:
        """Return the member. Raises ValidationError."""
        try:
            return self._enumeration(data.strip() if isinstance(data, str) else data)
        except ValueError:
            known = ", ".join(self._enumeration)
            raise serializers.ValidationError(self.error_messages["invalid_choice"] % {"known": known}) from None


class WholeNumberField(FormField, serializers.IntegerField):
    """A whole number from `least` to `most`. `most` may depend on the earlier fields; `allow_zero` also accepts 0."""

    def __init__(
        self, *, least: int = 1, most: int | Callable[[ValidValues], int], allow_zero: bool = False, **options: Any
    ) -> None:
        self._least, self._most, self._allow_zero = least, most, allow_zero
        super().__init__(**options)

    def to_internal_value(self, data: Any) -> int:
        """Return the number. Raises ValidationError."""
        most = self._most(self.parent.valid_values) if callable(self._most) else self._most  # type: ignore[attr-defined]  # a FormSerializer
        text = str(data).strip()  # because `int` would also accept the JSON values 2.5 and true
        if self._allow_zero and text == "0":
            return 0
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not self._least <= number <= most:
            sentence = _("Enter a whole number from %(least)d to %(most)d.")
            raise serializers.ValidationError(sentence % {"least": self._least, "most": most})
        return number


def is_storable_text(value: str) -> bool:
    """Whether PostgreSQL can store the text. JSON can encode NUL and lone surrogates, which PostgreSQL refuses."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)
