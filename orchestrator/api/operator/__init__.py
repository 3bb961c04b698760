"""For whoever runs it: instances, health, metrics."""
