"""The synchronous client. Written by .ci/sync_client.py; do not edit."""
