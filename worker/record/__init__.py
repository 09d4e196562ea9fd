"""What a run records: metrics, rollouts, checkpoints, warnings, the verdict."""
