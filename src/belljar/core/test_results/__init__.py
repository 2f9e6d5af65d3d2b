"""What a run of a project's tests came to: its data, and the readers of what test runners report. Pure.

Whatever is read here was written by a guest: its size is capped first, then it is parsed, and what is no report is a
`ValueError`.
"""
