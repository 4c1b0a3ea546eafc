"""Pure decisions. No await, no clock, no randomness, no SDK: what is decided here can be proven without a world."""
