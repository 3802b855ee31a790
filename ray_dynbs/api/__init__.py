"""What users call from Python: our trainer in place of Ray Train's."""
