"""Shared by all routes: the application, its middleware, dependencies, errors and limits."""
