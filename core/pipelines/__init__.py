"""Pipelines: named stages that are jobs or make files, each from the results of earlier ones."""
