"""What a job produces: rollouts, evals, tuned models, exports and previews."""
