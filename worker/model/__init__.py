"""The model: base weights, adapter, attention, head, memory; what its answers may be (schemas, calls of tools)."""
