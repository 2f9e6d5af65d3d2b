"""Data and decisions. Pure: nothing here reads a file, an environment variable or a clock it was not handed."""
