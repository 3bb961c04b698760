"""The naive pipeline behind HTTP, as a process of its own.

    python -m perf.clips.naive_server PORT MODE SIZE SECONDS THREADS

``POST /clips`` takes a recipe and answers with the MP4. Modes:

- ``sequential``  one clip at a time, first come first served; who has hung up when its turn comes
                  is left out, which is more than most do
- ``at-once``     every clip is begun when it comes, on a thread of its own, and goes on whoever
                  has hung up
"""

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from aiohttp import web

from clips.plan.recipe import read_recipe
from perf.clips.naive import NaivePipeline, development_stages
from worker.errors import RequestError

SEQUENTIAL: Final = "sequential"
AT_ONCE: Final = "at-once"
FACTS: Final = "X-Facts"
_MANY: Final = 256
_PIPELINE: Final = web.AppKey("pipeline", NaivePipeline)
_LOOKS: Final = web.AppKey("looks", bool)
_THREADS: Final = web.AppKey("threads", ThreadPoolExecutor)


async def _clips(request: web.Request) -> web.Response:
    app = request.app
    try:
        recipe = read_recipe(await request.read())
    except RequestError as error:
        return web.json_response({"error": str(error)}, status=400)

    def render() -> web.Response | None:
        if app[_LOOKS] and request.transport is None:
            return None
        clip = app[_PIPELINE].render(recipe)
        facts = json.dumps(clip.facts())
        return web.Response(body=clip.mp4, content_type="video/mp4", headers={FACTS: facts})

    answer = await asyncio.get_running_loop().run_in_executor(app[_THREADS], render)
    return answer or web.Response(status=499)


async def _live(_: web.Request) -> web.Response:
    return web.Response(text="ok")


def main() -> None:
    port, mode, size, seconds, threads = sys.argv[1:6]
    torch.set_num_threads(int(threads))
    is_sequential = mode == SEQUENTIAL
    app = web.Application()
    stages = development_stages()
    app[_PIPELINE] = NaivePipeline(stages, int(size), float(seconds))
    app[_THREADS] = ThreadPoolExecutor(1 if is_sequential else _MANY)
    app[_LOOKS] = is_sequential
    app.router.add_post("/clips", _clips)
    app.router.add_get("/health/live", _live)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None, access_log=None)
    for provider in stages.all():
        provider.close()


if __name__ == "__main__":
    main()
