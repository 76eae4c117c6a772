"""Queries that every order and every run asks: their SQL is put together once a process, and not each time.

It hides Django's compiler, whose work on such a query takes longer than PostgreSQL's. What comes back is what the query
set itself would give. The one rule: what differs from call to call is `given`; all else in it is the same for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

from django.db import DEFAULT_DB_ALIAS, connection
from django.db.models import Expression, Model, QuerySet
from django.db.models.query import get_related_populators
from django.db.models.sql import Query
from django.db.models.sql.compiler import SQLCompiler
from psycopg.sql import Literal
from psycopg.types.numeric import Int8

Row = TypeVar("Row")
_MOST = 2**63


def given(name: str) -> Any:
    """A value that each call brings under this name; PostgreSQL takes its type from the column it is compared with."""
    return _Given(name)


class Kept(Generic[Row]):
    """A query set of model instances or of `values_list`, as `query` makes it the first time it is needed.

    Each call brings a value (or an instance, for its key) for all that is `given`; KeyError where one is missing.
    None equals nothing, as in SQL. `select_related` and `select_for_update` are heeded, `prefetch_related` is not.
    """

    def __init__(self, query: Callable[[], QuerySet[Any, Row]]) -> None:
        self._query = query

    def all(self, **values: Any) -> list[Row]:
        """Every row."""
        return list(self._all.rows(values))

    def first(self, **values: Any) -> Row | None:
        """The first row by the query's order, by the key where it has none."""
        return next(self._first.rows(values), None)

    def get(self, **values: Any) -> Row:
        """The one row there is. Raises the model's DoesNotExist."""
        for row in self._all.rows(values):
            return row
        model = self._query().model
        raise model.DoesNotExist(f"{model.__name__} matching query does not exist.")

    def exists(self, **values: Any) -> bool:
        """Whether there is a row."""
        return bool(self._exists.fetch(values))

    @cached_property
    def _all(self) -> _Statement[Row]:
        return self._rows(self._query())

    @cached_property
    def _first(self) -> _Statement[Row]:
        queryset = self._query()
        return self._rows((queryset if queryset.ordered else queryset.order_by("pk"))[:1])

    @cached_property
    def _exists(self) -> _Statement[Row]:
        return _Statement(self._query().query.exists(), instances=False)

    @staticmethod
    def _rows(queryset: QuerySet[Any, Row]) -> _Statement[Row]:
        return _Statement(queryset.query, instances=queryset._fields is None)  # type: ignore[attr-defined] # what was asked for by values_list


class _Given(Expression):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def as_sql(self, compiler: SQLCompiler, connection: Any) -> tuple[str, Any]:
        del compiler, connection
        return "%s", (self,)


class _Statement(Generic[Row]):
    """A SELECT as it goes to PostgreSQL, and how a row of the answer becomes what the query set would give."""

    def __init__(self, query: Query, *, instances: bool) -> None:
        compiler = query.get_compiler(DEFAULT_DB_ALIAS)
        self._sql, self._names = _with_constants(*compiler.as_sql())
        columns = [column for column, _sql, _alias in (compiler.select or ())[: compiler.col_count]]
        self._converters = list(compiler.get_converters(columns).items())
        self._build: Callable[[list[Any]], Any] = _builder(compiler) if instances else tuple

    def fetch(self, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The rows as PostgreSQL gives them."""
        parameters = [_value(values[name]) for name in self._names]
        with connection.cursor() as cursor:
            cursor.execute(self._sql, parameters)
            fetched: list[tuple[Any, ...]] = cursor.fetchall()
        return fetched

    def rows(self, values: Mapping[str, Any]) -> Iterator[Row]:
        """The rows as the query set gives them."""
        for fetched in self.fetch(values):
            row = list(fetched)
            for position, (converters, expression) in self._converters:
                for convert in converters:
                    row[position] = convert(row[position], expression, connection)
            yield self._build(row)


def _with_constants(sql: str, parameters: Iterable[Any]) -> tuple[str, list[str]]:
    """The statement with what never changes written into it, and the names of what is left for each call.

    So PostgreSQL may keep one plan for all calls: of a parameter it could not know that a partial index holds it.
    """
    left, names = iter(parameters), []

    def place(found: re.Match[str]) -> str:
        if found[0] != "%s":
            return found[0]
        value = next(left)
        if isinstance(value, _Given):
            names.append(value.name)
            return "%s"
        return Literal(value).as_string().replace("%", "%%")

    return re.sub("%.", place, sql), names


def _value(value: Any) -> Any:
    if isinstance(value, Model):
        value = value.pk
    # Of one type whatever its size: for another PostgreSQL would plan anew. What no key can be goes as it is: no match.
    return Int8(value) if type(value) is int and -_MOST <= value < _MOST else value


def _builder(compiler: SQLCompiler) -> Callable[[list[Any]], Any]:
    """What makes an instance, with its related ones, of a row: as Django's ModelIterable does."""
    select, known = compiler.select or [], compiler.klass_info or {}
    model, chosen = known["model"], known["select_fields"]
    begin, end = chosen[0], chosen[-1] + 1
    names = [column.target.attname for column, _sql, _alias in select[begin:end]]
    related = get_related_populators(known, select, DEFAULT_DB_ALIAS)  # type: ignore[call-arg] # the stubs are of Django 6
    annotations = list((compiler.annotation_col_map or {}).items())

    def build(row: list[Any]) -> Any:
        made = model.from_db(DEFAULT_DB_ALIAS, names, row[begin:end])
        for populator in related:
            populator.populate(row, made)
        for name, position in annotations:
            setattr(made, name, row[position])
        return made

    return build
