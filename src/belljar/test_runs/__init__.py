"""Runs the tests of a project in a living sandbox, here or on a server, and reads what its runner reports."""
