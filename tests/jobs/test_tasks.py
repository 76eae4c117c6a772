"""The queues and the schedule of Celery tasks."""

from console.celery import app
from console.supervision import supervisor
from jobs import dispatch, tasks


def test_dispatch_has_a_queue_and_worker_processes_of_its_own(settings):
    queue = app.amqp.router.route({}, dispatch.dispatch.name)["queue"].name
    assert queue == "dispatch"
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    programs = {program.name: " ".join(program.arguments) for program in supervisor.programs()}
    assert f"--queues {queue} --concurrency 4" in programs["dispatcher"]  # two for each cluster
    assert f"--queues {settings.CELERY_TASK_DEFAULT_QUEUE} " in programs["worker"]


def test_every_periodic_task_exists_and_reconciliation_is_one(settings):
    app.loader.import_default_modules()
    for entry in settings.CELERY_BEAT_SCHEDULE.values():
        assert entry["task"] in app.tasks
    assert settings.CELERY_BEAT_SCHEDULE["reconcile"]["task"] == tasks.reconcile.name
