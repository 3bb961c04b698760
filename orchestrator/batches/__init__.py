"""Batches: files of requests that run in the background, each with its own outcome. No HTTP here;
``service.Batches`` is the interface for APIs."""
