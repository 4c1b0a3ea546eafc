"""Bytes to record batches. CPU only: no await, no I/O; a bad record is isolated and its neighbours flow."""
