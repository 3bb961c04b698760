"""vLLM in this process, as a ``StepCore``: its scheduler, cache and kernels under our deadlines."""
