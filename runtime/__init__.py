"""Start customers' training runs on clusters and report their status.

Imports no Django, Celery or Stripe. `runtime.backends.base.create` returns a backend. It takes a
`runtime.specs.RunSpec`, and returns a `runtime.specs.RunStatus` or raises one of `runtime.errors`.
"""
