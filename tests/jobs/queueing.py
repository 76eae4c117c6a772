"""States and sentences of waiting jobs, for tests of the dispatcher."""

from django.utils import timezone

from jobs import selectors
from jobs.models import Job


def states(*jobs):
    return [Job.objects.get(pk=job.pk).state for job in jobs]


def waiting(customer, job):
    """Return the sentence that tells the customer what the job waits for."""
    return selectors.waiting_for(selectors.job_for(customer.organization, job.pk))


def age(job, duration):
    """Let the job have waited this long."""
    Job.objects.filter(pk=job.pk).update(queued_at=timezone.now() - duration)


def filled(customer, nodes=8):
    """A started job on nodes of one core each; by default it takes all 8 cores of the fake cluster."""
    customer.quota(max_running_nodes=100)
    return customer.started(node_spec="small", nodes=nodes)
