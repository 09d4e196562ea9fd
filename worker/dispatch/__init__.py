"""One Kubernetes Job for each queued job, created by the service itself: docs/adr/0025-a-dispatcher-by-choice.md."""
