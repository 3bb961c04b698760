"""Routes for operators: instances, health, metrics, catalogs, the live page."""
