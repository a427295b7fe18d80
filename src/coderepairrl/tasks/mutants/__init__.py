"""Tasks made by breaking healthy code: one verified one-line bug each."""
