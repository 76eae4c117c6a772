"""The first process of a pod, which runs one node of a run on Kubernetes."""
