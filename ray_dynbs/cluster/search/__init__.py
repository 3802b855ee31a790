"""A search: trials of many configurations, by Ray Tune."""
