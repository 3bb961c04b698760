"""What runs inside a Triton model: engine, lanes, text. No aiohttp, and no Triton imports."""

import os

# Before torch is imported. Threads of OpenMP that spin at barriers take the cores from the threads
# that have to get there: next to other work (load 4.5 on two cores) 12 tokens of SmolLM2-135M took
# 8.0 s, and 1.4 s this way; 29 to 45 s and 3.2 to 5.4 s with two busy loops more, in turns.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
