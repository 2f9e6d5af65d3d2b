"""Who may run now, and who waits."""
