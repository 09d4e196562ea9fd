"""Results of jobs: rollouts, evals, tuned models, exports and previews."""
