"""Around the runs: the supervisor, validation, the reconciler and its passes. Never imports torch."""
