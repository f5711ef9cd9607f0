"""The vocabulary: records of attention calls, token layouts, what a cache keeps."""
