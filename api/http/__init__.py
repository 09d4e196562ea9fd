"""What all routes share: the application, its middleware, dependencies, errors and limits."""
