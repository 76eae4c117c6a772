import pytest

from console.celery import app
from console.supervision import supervisor
from jobs import dispatch, reconciliation, tasks

CALLS = [
    (tasks.forget_runs, (), (reconciliation, "delete_old_runs"), ((), {})),
    (tasks.stop_job, (7,), (reconciliation, "stop"), ((), {"job_pk": 7})),
    (dispatch.dispatch, ("west",), (dispatch, "dispatch_queue"), (("west",), {})),
]


@pytest.mark.parametrize(("task", "arguments", "function", "expected"), CALLS)
def test_a_task_calls_one_function(monkeypatch, task, arguments, function, expected):
    calls = []
    monkeypatch.setattr(*function, lambda *given, **options: calls.append((given, options)))
    task(*arguments)
    assert calls == [expected]


def test_dispatch_has_a_queue_and_worker_processes_of_its_own(settings):
    queue = app.amqp.router.route({}, dispatch.dispatch.name)["queue"].name
    assert queue == "dispatch"
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    programs = {program.name: " ".join(program.arguments) for program in supervisor.programs()}
    assert f"--queues {queue} --concurrency 4" in programs["dispatcher"]
    assert f"--queues {settings.CELERY_TASK_DEFAULT_QUEUE} " in programs["worker"]


def test_the_sweep_is_on_the_clock_under_its_own_name(settings):
    app.loader.import_default_modules()
    for entry in settings.CELERY_BEAT_SCHEDULE.values():
        assert entry["task"] in app.tasks
    assert settings.CELERY_BEAT_SCHEDULE["reconcile"]["task"] == tasks.reconcile.name
