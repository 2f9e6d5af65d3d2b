"""How a caller follows a run and stops it: the control of a command, callbacks, streams of events."""
