"""The job page's forms for name, tags, notes and retention, and the search of the list."""

import re
from datetime import timedelta

from django.urls import reverse
from django.utils import timezone

from billing.models import NodeSpec
from jobs.models import Job

DAY = timedelta(days=1)


def test_the_page_shows_and_changes_the_details(customer, owner_page):
    job = customer.ended_with_log(name="Page", tags=["one"])
    url = reverse("job_edit", args=[job.pk])
    owner_page.post(url, {"name": "New", "tags": "two, three", "notes": "</textarea><b>"})
    day = (timezone.now() + 50 * DAY).date().isoformat()
    owner_page.post(url, {"keep_until": day})
    job.refresh_from_db()
    assert (job.name, job.tags, timezone.localtime(job.keep_until).date().isoformat()) == ("New", ["two", "three"], day)
    html = owner_page.get(reverse("job_tab", args=[job.pk, "configuration"])).text
    assert "&lt;/textarea&gt;&lt;b&gt;" in html
    assert f'value="{day}"' in html
    assert "then deleted" in html
    last_day = re.search(r'name="keep_until"[^>]* max="([^"]+)"', html)[1]
    owner_page.post(url, {"keep_until": last_day})
    job.refresh_from_db()
    assert timezone.localtime(job.keep_until).date().isoformat() == last_day  # accepted to its end
    # The page warns in the last seven days only.
    assert "will be deleted on" not in owner_page.get(reverse("job_detail", args=[job.pk])).text
    owner_page.post(url, {"keep_until": (timezone.now() + 3 * DAY).date().isoformat()})
    assert "will be deleted on" in owner_page.get(reverse("job_detail", args=[job.pk])).text
    assert "Enter a date" in owner_page.post(url, {"keep_until": "9999-99-99"}, follow=True).text
    for query, is_found in (({"tag": "two"}, True), ({"q": "ne", "state": "succeeded"}, True), ({"tag": "one"}, False)):
        rows = owner_page.get(reverse("job_list"), query, headers={"HX-Request": "true"}).text
        assert (f"#{job.pk} New" in rows) is is_found


def test_the_configuration_is_shown_without_the_environment_of_a_removed_cluster(customer, owner_page):
    job = customer.ended_with_log(name="Moved")
    NodeSpec.objects.update(cluster="removed")
    assert "Moved" in owner_page.get(reverse("job_tab", args=[job.pk, "configuration"])).text


def test_the_configuration_shows_a_script_of_any_bytes_and_its_changes(customer, owner_page):
    content = b"# \xff\x00\r\nprint('<b>')\n"
    (customer.folder / "train.py").write_bytes(content)
    job = customer.job()
    assert bytes(Job.objects.get(pk=job.pk).script.content) == content
    customer.write("train.py", "print('<i>')")
    url = reverse("job_configuration", args=[job.pk])
    for place in (url, reverse("job_tab", args=[job.pk, "configuration"])):
        html = owner_page.get(place).text
        for words in (
            "-print(&#x27;&lt;b&gt;&#x27;)",
            "+print(&#x27;&lt;i&gt;&#x27;)",
            "The script train.py has changed.",
        ):
            assert words in html
        assert "<b>" not in html
