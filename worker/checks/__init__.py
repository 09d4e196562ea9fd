"""Whether a model is computed as transformers computes it, and sampled as it is trained."""
