"""The blob store, and what is kept in it: files, uploads, datasets, checkpoints."""
