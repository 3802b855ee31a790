"""The run directory: its files, and the only code that writes or reads them. No torch, no Ray."""
