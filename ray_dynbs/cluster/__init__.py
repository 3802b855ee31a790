"""Ray: the coordinator, the data, the worker loop and the driver."""
