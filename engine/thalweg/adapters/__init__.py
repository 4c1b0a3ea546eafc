"""The outside, one technology a file. An adapter translates and never decides; SDKs are imported only here."""
