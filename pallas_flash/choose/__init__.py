"""Which implementation runs a call, and whether it is right on this machine."""
