"""Statistics of attention calls and of the residual stream; they see records, never models."""
