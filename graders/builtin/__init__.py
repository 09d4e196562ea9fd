"""The graders that call no other server."""
