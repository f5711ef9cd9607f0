"""The synthetic tasks as experiments: training over seeds, signatures, scans, verdicts."""
