"""Connects Triton and the engine: requests in, frames and plain responses out, without Triton."""
