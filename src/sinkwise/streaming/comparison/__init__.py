"""Methods for endless text, compared on one text: perplexity, time and memory."""
