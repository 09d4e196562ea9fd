"""Graders that call a judge model."""
