"""Health, readiness and the Prometheus endpoint. It may read every package."""
