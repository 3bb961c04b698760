"""A process that compiles grammars to test them. The library takes hours for some grammars of a few
kilobytes, and a thread in it cannot be interrupted.

Requests come on stdin and answers go to stdout: a length of four bytes, then a ``Grammar`` or
``GrammarFinding`` as msgpack. The process ends if a grammar takes too long, or at end of input.
"""

import resource
import signal
import sys
from contextlib import suppress

import msgspec

from protocol import Grammar, InvalidGrammar
from protocol.grammar_source import check_source

MAX_CPU_S = 2.0
"""Seconds of CPU time per grammar. Usable schemas of 250 KB take a quarter of that."""
MAX_BYTES = 2 * 2**30
"""Limit on the address space in bytes, including the interpreter's own."""


class GrammarFinding(msgspec.Struct, frozen=True):
    """The result of testing one grammar."""

    problem: str = ""
    """Why the grammar cannot be used; empty if it can."""
    passed_over: tuple[str, ...] = ()
    """Keywords of the schema that cannot be enforced."""


def main() -> None:
    with suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    read, write = sys.stdin.buffer.read, sys.stdout.buffer
    decoder = msgspec.msgpack.Decoder(Grammar)
    while size := read(4):
        grammar = decoder.decode(read(int.from_bytes(size, "big")))
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # the signal ends the process
        try:
            found = GrammarFinding(passed_over=tuple(check_source(grammar)))
        except InvalidGrammar as error:
            found = GrammarFinding(str(error).encode(errors="replace").decode())
        except Exception as error:  # may hold client text: do not log it
            found = GrammarFinding(f"the grammar cannot be used: {type(error).__name__}")
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answer = msgspec.msgpack.encode(found)
        write.write(len(answer).to_bytes(4, "big") + answer)
        write.flush()


if __name__ == "__main__":
    main()
