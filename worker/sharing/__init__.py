"""Several jobs on one device with one copy of their base model: docs/adr/0017-jobs-on-one-base.md."""
