"""Async loops. They await ports only, so the same code runs in the simulator and against real servers."""
