"""vLLM as it runs on CUDA, on a CPU: its second model runner, and steps that overlap.

Its kernels are triton's, which triton's interpreter runs: slowly, for tiny models. Needs
``TRITON_INTERPRET=1`` from the start of the process, and vLLM's wheel for CPUs.
"""

import os
from types import SimpleNamespace
from typing import Any

from worker.settings import WorkerSettings


def is_interpreted() -> bool:
    """Whether this process runs triton's kernels by its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def run_as_on_cuda(settings: WorkerSettings) -> None:
    """Make the engines that this process builds from now on use the second runner, and overlap."""
    import triton.backends

    # vLLM takes its second runner where triton has a backend for CPUs; nothing is asked of it here.
    driver = SimpleNamespace(is_active=lambda: False)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    from triton.runtime import interpreter

    from worker.engines.vllm import arguments, build, library

    store = interpreter.InterpreterBuilder.create_masked_store

    def store_by_any_mask(
        self: object, at: object, value: object, mask: Any, policy: object
    ) -> Any:
        whole = interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
        return store(self, at, value, whole, policy)

    # vLLM's kernel for grammars makes its mask of whole numbers.
    interpreter.InterpreterBuilder.create_masked_store = store_by_any_mask

    library.load_library(settings)
    from vllm.v1.sample.ops import topk_topp_sampler as filters

    # Its kernel for top_k and top_p has numbers that the interpreter takes for Python's own.
    filters.apply_top_k_top_p_triton = lambda logits, k, p: filters.apply_top_k_top_p_pytorch(
        logits, k, p, allow_cpu_sync=True
    )

    def overlapping(settings: WorkerSettings) -> object:
        config = arguments.engine_config(settings)
        config.scheduler_config.async_scheduling = True  # on CPUs vLLM turns it off
        return config

    build.engine_config = overlapping
