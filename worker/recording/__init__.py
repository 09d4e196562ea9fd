"""Records of a run: metrics, rollouts, checkpoints, warnings, the verdict."""
