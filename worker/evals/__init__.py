"""Runs of evals: sampling, grading, and the record from which a killed run resumes."""
