"""SL-3: between stages nothing of a clip is copied but the keyframes."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clips.render.clip import KEYFRAMES
from tests.clips.render.fakes import SIZES, Rig

_COPIES = {"clone", "copy_", "_to_copy", "cat", "stack", "index", "index_select", "constant_pad_nd"}
_ALLOCATES = {"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "new_empty"}


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that torch copies and allocates on this thread; stages have others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        for kind, names in (("copied", _COPIES), ("allocated", _ALLOCATES)):
            if isinstance(out, torch.Tensor) and name in names:
                self.counts[kind] += out.nbytes
        return out


async def test_nothing_but_the_keyframes_is_copied() -> None:
    rig = Rig()
    with Counting() as counting:
        torch.ones(1000, dtype=torch.uint8)[[1, 2, 3]]  # it is counted at all
        clip = await rig.run()
    rig.pipeline.close()
    assert clip.check is not None and clip.check.passed
    assert counting.counts == {"copied": 3 + KEYFRAMES * 3 * SIZES.size**2, "allocated": 1000}
