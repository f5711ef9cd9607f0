"""The synthetic tasks as experiments: trained over seeds, their signatures read, then scanned."""
