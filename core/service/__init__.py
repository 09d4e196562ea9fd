"""What the service as a whole is doing: its queues, its workers, and the metrics of both."""
