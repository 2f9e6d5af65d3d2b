"""The backends: a runtime in each folder. `belljar.engine.backends` is the table of them."""
