"""vLLM in this process, as a ``StepCore``: its scheduler, cache and kernels under our deadlines.

``library.py`` finds it, ``arguments.py`` has its settings, ``build.py`` starts its engine core on
our own thread, ``backend.py`` steps that, ``requests.py`` and ``images.py``
translate, ``adapters.py`` has LoRA adapters, and ``prefix_cache.py`` gives its KV blocks our names.
"""
