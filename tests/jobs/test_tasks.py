import pytest
from celery.signals import task_postrun, task_prerun
from django.db import connection

from console.celery import app
from jobs import dispatch, tasks


@pytest.mark.parametrize(
    ("task", "arguments", "called"),
    [
        (tasks.dispatch_queue, (), ("dispatch_queue", ("default",), {})),
        (tasks.dispatch_queue, ("west",), ("dispatch_queue", ("west",), {})),
        (tasks.reconcile, (), ("reconcile", ("default",), {})),
        (tasks.reconcile, ("west",), ("reconcile", ("west",), {})),
        (tasks.forget_runs, (), ("forget_runs", (), {})),
        (tasks.stop_job, (7,), ("stop", (), {"job_pk": 7})),
    ],
)
def test_a_task_calls_one_function_of_dispatch(monkeypatch, task, arguments, called):
    seen = []
    monkeypatch.setattr(tasks.clusters, "to_sweep", lambda: ["default"])
    for name in ("dispatch_queue", "reconcile", "forget_runs", "stop"):
        monkeypatch.setattr(dispatch, name, lambda *given, name=name, **options: seen.append((name, given, options)))
    task(*arguments)
    assert seen == [called]


def test_the_sweep_is_on_the_clock_under_its_own_name(settings):
    app.loader.import_default_modules()
    for entry in settings.CELERY_BEAT_SCHEDULE.values():
        assert entry["task"] in app.tasks
    assert settings.CELERY_BEAT_SCHEDULE["reconcile"]["task"] == tasks.reconcile.name


@pytest.mark.django_db(transaction=True)
def test_tasks_share_a_connection_that_is_looked_at_before_each(monkeypatch):
    """As in a worker: what a restart of the database broke is made anew, and nothing else is."""

    def before_a_task():
        told = {"sender": tasks.reconcile, "task_id": "1", "task": tasks.reconcile, "args": (), "kwargs": {}}
        task_prerun.send(**told)
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                return cursor.fetchone()[0]
        finally:
            task_postrun.send(**told, retval=None, state="SUCCESS")

    for name, value in {"CONN_MAX_AGE": 600, "CONN_HEALTH_CHECKS": True}.items():
        monkeypatch.setitem(connection.settings_dict, name, value)
    connection.close()
    assert app.conf.get("CELERY_DB_REUSE_MAX")
    first = before_a_task()
    assert before_a_task() == first
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [first])
    other.close()
    assert before_a_task() != first
    connection.close()
