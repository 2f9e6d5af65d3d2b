"""Data and decisions, without I/O: nothing here reads a file, the environment or the network, or starts anything.

New plans and events take an id and a time from the system; all else is a function of its arguments.
"""
