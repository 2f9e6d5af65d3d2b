"""The one path from a request to its result: decide, choose, open, run, diagnose, publish."""
