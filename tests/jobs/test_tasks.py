import pytest

from console.celery import app
from jobs import dispatch, tasks


@pytest.mark.parametrize(
    ("task", "arguments", "called"),
    [
        (tasks.dispatch_queue, (), ("dispatch_queue", {})),
        (tasks.reconcile, (), ("reconcile", {})),
        (tasks.forget_runs, (), ("forget_runs", {})),
        (tasks.stop_job, (7,), ("stop", {"job_pk": 7})),
    ],
)
def test_a_task_calls_one_function_of_dispatch(monkeypatch, task, arguments, called):
    seen = []
    for name in ("dispatch_queue", "reconcile", "forget_runs", "stop"):
        monkeypatch.setattr(dispatch, name, lambda name=name, **options: seen.append((name, options)))
    task(*arguments)
    assert seen == [called]


def test_the_sweep_is_on_the_clock_under_its_own_name(settings):
    app.loader.import_default_modules()
    for entry in settings.CELERY_BEAT_SCHEDULE.values():
        assert entry["task"] in app.tasks
    assert settings.CELERY_BEAT_SCHEDULE["reconcile"]["task"] == tasks.reconcile.name
