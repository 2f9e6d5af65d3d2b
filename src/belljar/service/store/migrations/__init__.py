"""The history of the tables. `database.migrate` brings a store to its newest state when it is opened."""
