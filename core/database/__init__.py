"""Tables, transactions, pagination and migrations."""
