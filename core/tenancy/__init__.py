"""Projects: their keys, limits, audit log and idempotency keys."""
