"""The world where time is ours: the engine on an event loop whose clock is a simulation. Run from the checkout, never shipped."""
