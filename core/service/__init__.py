"""The queues, the workers and the metrics of the service as a whole."""
