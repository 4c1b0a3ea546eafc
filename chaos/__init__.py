"""The world where time is not ours: real servers, real processes, faults on the wire. Run from the checkout, never shipped."""
