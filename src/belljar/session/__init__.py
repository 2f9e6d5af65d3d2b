"""Stateful sessions: one interpreter across calls, with checkpoints and forks."""
