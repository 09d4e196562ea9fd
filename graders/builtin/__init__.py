"""Graders that run on this server without calling another one."""
