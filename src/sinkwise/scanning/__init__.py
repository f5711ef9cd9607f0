"""Run a model over data, every statistic in one pass."""
