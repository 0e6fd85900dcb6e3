"""The plan protocol and its vocabulary. Knows no op and no backend, and imports neither."""
