"""The model: base weights, adapter, attention, memory."""
