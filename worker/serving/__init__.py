"""The inference server."""
