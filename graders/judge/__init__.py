"""Graders that ask a model."""
