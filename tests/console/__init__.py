"""A package, so that the service and the browser that its files share end with it."""
