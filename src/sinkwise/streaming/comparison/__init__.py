"""Ways to handle endless text, compared on one text: quality, time and memory."""
