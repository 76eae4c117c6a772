"""What a run is on Kubernetes, object by object. PURE: a RunSpec and a ClusterConfig in, plain dicts out.

The one rule: what is here is all there is of a run, and everything of it carries its labels, so that it is found again
and deleted whole. `docs/kubernetes.md` shows it whole.
"""

from __future__ import annotations

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "trainyard"
RUN_LABEL = "trainyard.dev/run"
ORGANIZATION_LABEL = "trainyard.dev/organization"
JOB_LABEL = "trainyard.dev/job"
ENDED_LABEL = "trainyard.dev/ended"
"""On a Job whose end is written down: sweeps leave it out."""
SUBMITTED = "trainyard.dev/submitted-at"
"""Annotation of a Job, Unix seconds: without it the submission is half made, and there is no such run yet."""
STARTED = "trainyard.dev/started-at"
"""Annotation of a Job, Unix seconds: when all its pods ran."""
TAKEN_DOWN = "trainyard.dev/taken-down"
"""Annotation of a Job, JSON: why and when it was taken down; the first reason counts."""
FINAL = "trainyard.dev/final"
"""Annotation of a Job, JSON: how it ended, for good."""
INDEX = "batch.kubernetes.io/job-completion-index"
