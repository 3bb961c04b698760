# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel with the commonest of bugs. Importing this module needs ``triton``."""

import triton
import triton.language as tl


@triton.jit
def write_far(pointer, distance):
    """Write ``distance`` elements behind ``pointer``."""
    tl.store(pointer + distance, 1.0)
