"""What runs inside a Triton model: engine, lanes, text. No aiohttp, and no Triton imports."""
