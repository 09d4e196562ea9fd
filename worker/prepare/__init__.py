"""The parts of a run, from a claimed job: worker/assemble.py lists them. What can be refused is refused before the
weights are loaded."""
