"""A process that tries grammars out: the library takes hours for some of a few kilobytes, in code
that no thread can be called back from.

Requests and answers are on its standard streams: a length of four bytes, then a ``Grammar`` or a
``GrammarFinding``, as msgpack. The process ends when a grammar takes too long, and with its input.
"""

import resource
import signal
import sys
from contextlib import suppress

import msgspec

from protocol import Grammar, InvalidGrammar
from protocol.grammar_source import check_source

MAX_CPU_S = 2.0
"""CPU time allowed for one grammar. Usable schemas of 250 KB take a quarter of that."""
MAX_BYTES = 2 * 2**30
"""Bound on the address space, the interpreter's own included."""


class GrammarFinding(msgspec.Struct, frozen=True):
    """The result of trying one grammar out."""

    problem: str = ""
    """Why the grammar cannot be used; empty if it can."""
    passed_over: tuple[str, ...] = ()
    """The keywords of a schema that cannot be enforced."""


def main() -> None:
    with suppress(OSError, ValueError):  # not every system bounds it
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    read, write = sys.stdin.buffer.read, sys.stdout.buffer
    decoder = msgspec.msgpack.Decoder(Grammar)
    while size := read(4):
        grammar = decoder.decode(read(int.from_bytes(size, "big")))
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # nobody handles the signal: it ends us
        try:
            found = GrammarFinding(passed_over=tuple(check_source(grammar)))
        except InvalidGrammar as error:
            found = GrammarFinding(str(error).encode(errors="replace").decode())
        except Exception as error:  # the library's own error, of which nothing may be logged
            found = GrammarFinding(f"the grammar cannot be used: {type(error).__name__}")
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answer = msgspec.msgpack.encode(found)
        write.write(len(answer).to_bytes(4, "big") + answer)
        write.flush()


if __name__ == "__main__":
    main()
