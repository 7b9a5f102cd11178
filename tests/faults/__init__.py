"""Every error of the share, at every call that the flusher makes on it."""
