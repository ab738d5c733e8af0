"""The closed loop: it spends what it may, forgets nothing, never falls back, and finds."""
