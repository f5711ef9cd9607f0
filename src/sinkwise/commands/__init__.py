"""The commands beside `diagnose`, and what all of them share."""
