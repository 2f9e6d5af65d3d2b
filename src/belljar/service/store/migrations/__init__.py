"""The history of the tables. `migrate.migrate` brings a store to its newest state when it is opened."""
