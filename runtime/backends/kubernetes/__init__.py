"""The Kubernetes backend: each run is an Indexed Job.

Words that every module here uses:

- A *node* is one Pod of the run. Its number is the Pod's completion index.
- A *machine* is a Kubernetes Node, which Pods are scheduled to.
- A *rank* is one process of the customer's code inside a Pod.
- The *first process* of a Pod (`runtime.launcher.pod`) does the work of a supervisor. It starts the node's *launcher*,
  which starts the ranks. It also writes the node's *record*, JSON that it signs with the run's key.
"""
