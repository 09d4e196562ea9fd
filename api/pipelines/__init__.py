"""Advancing pipelines: a task of every API process that starts stages, follows them and makes their files."""
