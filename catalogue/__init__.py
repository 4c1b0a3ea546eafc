"""Executable specs: what must be true of the engine, in any world. Knows no world, imports nothing of the engine's insides."""
