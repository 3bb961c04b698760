"""The code that runs inside a Triton model: engine, lanes, text. No aiohttp or Triton imports."""

import os

# Set before torch is imported. OpenMP threads that spin at barriers take cores from the threads
# that they wait for. Next to other work (load 4.5 on two cores), 12 tokens of SmolLM2-135M took 8.0
# s, and 1.4 s this way; with two more busy loops, 29 to 45 s and 3.2 to 5.4 s.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
