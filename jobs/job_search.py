"""The search of the list of jobs: filters, order, pages, counts and the views that members save.

Each query is fast even for an organization with a million jobs. The filters by state, workspace, node spec, member and
time use an index. Name and tag are compared only in the window: the first `WINDOW` jobs that match the other filters. A
page begins after the last job of the previous page, so that no earlier row is read again. Nothing is counted beyond
`COUNT_LIMIT`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import date, datetime, time, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from billing.models import NodeSpec
from console.accounts.models import Membership, Organization, User
from console.core.errors import InvalidInput, NotFound
from jobs import rows
from jobs.errors import QuotaExceeded
from jobs.fields import is_storable_text
from jobs.models import Job, SavedView
from jobs.states import ENDED, JobState
from storage.models import Workspace

PAGE_SIZE = 25
"""Jobs per page of the list: about a screen."""
WINDOW = 20_000
"""Jobs in which name and tag are compared. The comparison takes about 50 ms of the database's time."""
COUNT_LIMIT = 1000
"""Jobs of a state are counted up to this number, because counting a million would take seconds."""
EXPORT_BATCH = 500
"""Jobs that an export reads at a time, so that it needs little memory."""
MAX_TEXT_LENGTH = 254
"""Characters of a parameter: as many as an e-mail address, the longest parameter, may have."""
MAX_VIEWS = 50
"""Saved views per member. The page lists them all."""
MAX_VIEW_NAME_LENGTH = 60
"""Characters of a view's name: the length of its column."""
STATES = {
    "open": (gettext_lazy("Open"), tuple(sorted(set(JobState) - ENDED))),
    "succeeded": (gettext_lazy("Succeeded"), (JobState.SUCCEEDED,)),
    "failed": (gettext_lazy("Failed"), (JobState.FAILED,)),
    "cancelled": (gettext_lazy("Cancelled"), (JobState.CANCELLED,)),
}
"""The values of the filter by state: the title and the states of each."""
SORT_ORDERS = {
    "": (gettext_lazy("Newest first"), ("-queued_at", "-id")),
    "oldest": (gettext_lazy("Oldest first"), ("queued_at", "id")),
}
"""The sort orders: the title and the columns of each. Every index of `Job` for the list ends with these columns."""


@dataclass(frozen=True)
class JobSearch:
    """The filters and the order of a list of jobs. An empty value does not filter."""

    state: str = ""
    """A key of STATES."""
    q: str = ""
    """A part of the name, in any case."""
    tag: str = ""
    workspace: str = ""
    """A workspace's name."""
    node_spec: str = ""
    """A node spec's name."""
    member: str = ""
    """The e-mail address of the member who ordered."""
    since: str = ""
    until: str = ""
    """First and last day of the order, as ISO dates in the reader's time zone."""
    sort: str = ""
    """A key of SORT_ORDERS."""

    @classmethod
    def parse(cls, parameters: Mapping[str, Any]) -> JobSearch:
        """Return the search that the query parameters of a URL describe. Unknown and invalid ones are ignored."""
        values = {field.name: str(parameters.get(field.name, "")).strip() for field in fields(cls)}
        values = {
            name: text for name, text in values.items() if is_storable_text(text) and len(text) <= MAX_TEXT_LENGTH
        }
        for name, choices in (("state", STATES), ("sort", SORT_ORDERS)):
            if values.get(name) not in choices:
                values.pop(name, None)
        for name in ("since", "until"):
            if values.get(name) and _day(values[name]) is None:
                del values[name]
        return cls(**values)

    @property
    def parameters(self) -> dict[str, str]:
        """Return the query parameters that describe this search; empty values are left out."""
        return {name: text for name, text in vars(self).items() if text}

    @property
    def query_string(self) -> str:
        """Return the parameters as in a URL."""
        return urlencode(self.parameters)

    @property
    def is_filtered(self) -> bool:
        """Whether there is a filter besides the filter by state."""
        return bool(replace(self, state="", sort="").parameters)

    @property
    def ordering(self) -> tuple[str, str]:
        """Return the columns of the order."""
        return SORT_ORDERS[self.sort][1]

    @property
    def is_newest_first(self) -> bool:
        """Whether the jobs are sorted from the newest to the oldest."""
        return self.sort == ""

    def in_state(self, state: str) -> JobSearch:
        """Return the same search for another state."""
        return replace(self, state=state)


@dataclass(frozen=True)
class JobPage:
    """One page of a search."""

    jobs: list[Job]
    before: int | None = None
    """Id of this page's first job, for a link to the previous page; None on the first page."""
    after: int | None = None
    """Id of this page's last job, for a link to the next page; None on the last page."""
    is_partial: bool = False
    """Whether more jobs match the other filters than `WINDOW`, so that name and tag are not compared in all."""


class _Matches(NamedTuple):
    """The jobs of a search in its order, without related rows; `is_partial` as in `JobPage`."""

    jobs: QuerySet[Job]
    is_partial: bool


def matching(organization: Organization, search: JobSearch) -> QuerySet[Job]:
    """Return the jobs of a search in its order, without related rows."""
    return _matches(organization, search).jobs


def page(
    organization: Organization, search: JobSearch, *, after: int | None = None, before: int | None = None
) -> JobPage:
    """Return the page that follows the job with the id `after`, or precedes the job with the id `before`.

    Without such a job, return the first page.
    """
    matches = _matches(organization, search)
    position = _position(organization, before if after is None else after)
    if position is None:
        return _first_page(search, matches)
    get_page = _page_before if after is None else _page_after
    return get_page(search, matches, position)


# These functions read one job more than a page, to know whether another page follows.


def _first_page(search: JobSearch, matches: _Matches) -> JobPage:
    """Return the first page of a search."""
    read = _read(search, matches.jobs[: PAGE_SIZE + 1])
    jobs = read[:PAGE_SIZE]
    return JobPage(jobs, after=jobs[-1].pk if len(read) > PAGE_SIZE else None, is_partial=matches.is_partial)


def _page_after(search: JobSearch, matches: _Matches, position: tuple[datetime, int]) -> JobPage:
    """Return the page that follows a position; the first page if no job follows it."""
    following = matches.jobs.filter(_beyond(position, is_below=search.is_newest_first))
    read = _read(search, following[: PAGE_SIZE + 1])
    if not read:
        return _first_page(search, matches)
    jobs = read[:PAGE_SIZE]
    after = jobs[-1].pk if len(read) > PAGE_SIZE else None
    return JobPage(jobs, before=jobs[0].pk, after=after, is_partial=matches.is_partial)


def _page_before(search: JobSearch, matches: _Matches, position: tuple[datetime, int]) -> JobPage:
    """Return the page that precedes a position."""
    preceding = matches.jobs.filter(_beyond(position, is_below=not search.is_newest_first))
    read = _read(search, preceding.reverse()[: PAGE_SIZE + 1])
    if len(read) <= PAGE_SIZE:
        return _first_page(search, matches)  # which may have more jobs than the ones that were read
    jobs = read[1:]  # `_read` sorts in the search's order, so the additional job is the first one
    return JobPage(jobs, before=jobs[0].pk, after=jobs[-1].pk, is_partial=matches.is_partial)


def counts_by_state(organization: Organization) -> dict[str, int]:
    """Return the number of an organization's jobs by key of STATES, each at most COUNT_LIMIT + 1. Makes one query.

    The SQL is written here, because Django would take longer to build the query than PostgreSQL to run it. The states
    are constants in the SQL, not parameters, so that PostgreSQL's planner knows them.
    """
    count_of_states = (
        "(SELECT count(*) FROM (SELECT FROM jobs_job WHERE organization_id = %s AND state IN ({}) LIMIT {}) jobs)"
    )
    subqueries = [
        count_of_states.format(", ".join(f"'{state}'" for state in states), COUNT_LIMIT + 1)
        for _title, states in STATES.values()
    ]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(subqueries)}", [organization.pk] * len(subqueries))
        return dict(zip(STATES, cursor.fetchone(), strict=True))


def count(organization: Organization, search: JobSearch) -> int:
    """Return the number of jobs of a search, at most COUNT_LIMIT + 1."""
    return matching(organization, search).order_by().values("pk")[: COUNT_LIMIT + 1].count()


def export(organization: Organization, search: JobSearch) -> Iterator[Job]:
    """Yield all jobs of a search in its order for `exports.jobs_csv`. They are read in batches of EXPORT_BATCH."""
    jobs, position = matching(organization, search), None
    while True:
        after = jobs.filter(_beyond(position, is_below=search.is_newest_first)) if position else jobs
        batch = _read(search, after[:EXPORT_BATCH], "finished_at", "reason")
        yield from batch
        if len(batch) < EXPORT_BATCH:
            return
        position = (batch[-1].queued_at, batch[-1].pk)


def views(membership: Membership) -> list[SavedView]:
    """Return a member's saved views, sorted by name."""
    return list(membership.job_views.all())


def save_view(*, membership: Membership, name: str, search: JobSearch) -> SavedView:
    """Save a search under a name; replaces a view of the same name. Raises InvalidInput, QuotaExceeded."""
    name = " ".join(name.split())
    if not name or len(name) > MAX_VIEW_NAME_LENGTH or not is_storable_text(name) or not name.isprintable():
        sentence = _("The name must have 1 to %(most)d printable characters.") % {"most": MAX_VIEW_NAME_LENGTH}
        raise InvalidInput(fields={"name": sentence})
    with transaction.atomic():
        # The lock makes concurrent requests wait, so that they keep the limit.
        Membership.objects.select_for_update(no_key=True).get(pk=membership.pk)
        if membership.job_views.exclude(name=name).count() >= MAX_VIEWS:
            raise QuotaExceeded(
                _("You have %(most)d saved views, the most that a member can have. Delete one first.")
                % {"most": MAX_VIEWS}
            )
        view, _is_new = SavedView.objects.update_or_create(
            membership=membership, name=name, defaults={"query": search.parameters}
        )
    return view


def delete_view(*, membership: Membership, pk: int) -> None:
    """Delete a saved view of the member. Raises NotFound."""
    deleted, _rows = membership.job_views.filter(pk=pk).delete()
    if not deleted:
        raise NotFound


def _matches(organization: Organization, search: JobSearch) -> _Matches:
    """Return the jobs of a search. Name and tag are compared only in the window."""
    jobs = _candidates(organization, search)
    windowed = _windowed_filter(search)
    if not windowed:
        return _Matches(jobs, is_partial=False)
    # The window is a range of times, for which PostgreSQL scans a range of the index. A subquery with a LIMIT would
    # scan all rows.
    window_end = jobs.values_list("queued_at", flat=True)[WINDOW : WINDOW + 1].first()
    if window_end is not None:
        jobs = (
            jobs.filter(queued_at__gte=window_end) if search.is_newest_first else jobs.filter(queued_at__lte=window_end)
        )
    return _Matches(jobs.filter(windowed), is_partial=window_end is not None)


def _candidates(organization: Organization, search: JobSearch) -> QuerySet[Job]:
    """Return the jobs that match the filters with an index, in the search's order."""
    jobs = Job.objects.filter(_indexed_filter(organization, search), organization=organization)
    return jobs.order_by(*search.ordering)


def _read(search: JobSearch, jobs: QuerySet[Job], *columns: str) -> list[Job]:
    """Return the jobs of a sliced query for `rows.row`, in the search's order, with further `columns` of the job.

    A second query joins the related rows, so that they are read for these jobs only.
    """
    with_relations = rows.with_ids(list(jobs.values_list("pk", flat=True)))
    return list(with_relations.order_by(*search.ordering).only(*rows.FIELDS, *columns))


def _indexed_filter(organization: Organization, search: JobSearch) -> Q:
    """Return the filter by state, workspace, node spec, member and time, which uses an index.

    Names are resolved to ids by separate queries, because PostgreSQL's planner can then estimate how many rows match.
    """
    condition = Q()
    if search.state:
        states = STATES[search.state][1]
        condition &= Q(state__in=states) if len(states) > 1 else Q(state=states[0])
    if search.workspace:
        workspaces = Workspace.objects.filter(organization=organization, name=search.workspace)
        condition &= Q(workspace__in=list(workspaces.values_list("pk", flat=True)))
    if search.node_spec:
        condition &= Q(node_spec__in=list(NodeSpec.objects.filter(name=search.node_spec).values_list("pk", flat=True)))
    if search.member:
        members = User.objects.filter(email=search.member.lower())
        condition &= Q(placed_by__in=list(members.values_list("pk", flat=True)))
    if day := _day(search.since):
        condition &= Q(queued_at__gte=_midnight(day))
    if day := _day(search.until):
        condition &= Q(queued_at__lt=_midnight(day + timedelta(days=1)))
    return condition


def _windowed_filter(search: JobSearch) -> Q:
    """Return the filter by name and tag; an empty one, which is false, if the search has neither."""
    condition = Q()
    if search.q:
        condition &= Q(name__icontains=search.q)
    if search.tag:
        condition &= Q(tags__contains=[search.tag])
    return condition


def _position(organization: Organization, pk: int | None) -> tuple[datetime, int] | None:
    """Return a job's position in the sort order; None for an unknown job."""
    if pk is None:
        return None
    return Job.objects.filter(organization=organization, pk=pk).values_list("queued_at", "pk").first()


def _beyond(position: tuple[datetime, int], *, is_below: bool) -> Q:
    """Return the filter for the jobs whose position (time and id) is below or above a given one."""
    at, pk = position
    operator = "lt" if is_below else "gt"
    is_beyond = Q(**{f"queued_at__{operator}": at}) | Q(**{"queued_at": at, f"pk__{operator}": pk})
    # `is_beyond` implies this condition, but without it PostgreSQL would use no index.
    return Q(**{f"queued_at__{operator}e": at}) & is_beyond


def _day(text: str) -> date | None:
    """Parse an ISO date. Return None if it is invalid, or so early or late that time zone conversion could fail."""
    try:
        day = date.fromisoformat(text)
    except ValueError:
        return None
    return day if 2000 <= day.year <= 9000 else None


def _midnight(day: date) -> datetime:
    """Return the beginning of a day in the reader's time zone."""
    return timezone.make_aware(datetime.combine(day, time.min))
