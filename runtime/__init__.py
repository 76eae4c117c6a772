"""The cluster: starts customers' training runs on nodes and tells how they go.

Knows nothing of Django, Celery or Stripe. The way in is `runtime.backends.create`; what goes down is a
`runtime.specs.RunSpec`, what comes up is a `runtime.specs.RunStatus` or one of `runtime.errors`.
"""
