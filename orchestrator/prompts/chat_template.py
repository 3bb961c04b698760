"""A model's chat template: Jinja in a sandbox, with the helpers of ``transformers``.

Templates come from models, messages from clients. A template may have nested loops over the
messages. So rendering checks the CPU time at each loop iteration and each macro call. The work
between two checks is at most linear in the messages.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from orchestrator.prompts.turns import MESSAGE_CHARS, BadTemplate, Refused

MAX_RENDER_CPU_S = 2.0
"""CPU seconds of one thread. A usual template renders 10,000 messages in less than 0.1 s."""

MAX_GROWTH = 16
"""A rendered text may be this many times as long as its messages. Each message counts
``MESSAGE_CHARS`` more; the template itself counts ``_OWN_CHARS``."""

_OWN_CHARS = 65536
_REASON_CHARS = 200

_TICK = " tick"
"""Name of the filter. It is not an identifier, so templates cannot use it."""

_TURNS_PER_LOOK = 32
"""Loop iterations between two checks of the CPU time, because each check is a system call."""


class _Budget:
    """The rest of the CPU time of one render."""

    __slots__ = ("cpu_until", "turns")

    def __init__(self) -> None:
        self.cpu_until = time.thread_time() + MAX_RENDER_CPU_S
        self.turns = _TURNS_PER_LOOK

    def look(self) -> None:
        if time.thread_time() > self.cpu_until:
            raise Refused(
                f"rendering takes more than {MAX_RENDER_CPU_S:g} s; send fewer or shorter messages"
            )
        self.turns = _TURNS_PER_LOOK


_budget: ContextVar[_Budget] = ContextVar("_budget")


class ChatTemplate:
    """Renders the messages of a chat to a prompt. Thread-safe."""

    def __init__(self, source: str) -> None:
        """``source`` is Jinja. Raises ``BadTemplate``."""
        environment = _Environment()
        try:
            tree = environment.parse(source)
            repeated = [(node.lineno, node.body) for node in tree.find_all(jinja2.nodes.For)]
            repeated += [(node.lineno, node.body) for node in tree.find_all(jinja2.nodes.Macro)]
            for line, body in repeated:
                body.insert(0, _tick_at(line))
            self._template = jinja2.Template.from_code(
                environment, environment.compile(tree), environment.make_globals(None)
            )
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            """Names that the template reads but does not set."""
        except jinja2.TemplateSyntaxError as error:
            reason = _short(error).partition("\n")[0].rstrip(".")
            raise BadTemplate(f"line {error.lineno}: {reason}") from None
        except Exception as error:  # errors of Python's own compiler or stack
            raise BadTemplate(_named(error)) from None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        special_tokens: Mapping[str, str],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        chars: int | None = None,
    ) -> str:
        """Render ``messages``, which have a role and a content. With ``add_generation_prompt``, the
        model's turn is next. Templates may read ``arguments``; they never replace other variables.
        ``chars`` is the length of messages and tools, counted as for ``MAX_GROWTH``; None: the
        messages have only content. Raises ``Refused``."""
        if chars is None:
            chars = sum(MESSAGE_CHARS + len(str(message["content"])) for message in messages)
        room = MAX_GROWTH * (_OWN_CHARS + chars)
        parts = []
        token = _budget.set(_Budget())
        try:
            for part in self._template.generate(
                **{
                    **(arguments or {}),
                    **special_tokens,
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            ):
                room -= len(part)
                if room < 0:
                    raise Refused("the rendered text is too long")
                parts.append(part)
        except Refused:
            raise
        except Exception as error:  # a template's code may raise any error
            own = isinstance(error, jinja2.TemplateError)
            raise Refused(_short(error) if own else _named(error)) from None
        finally:
            _budget.reset(token)
        return "".join(parts)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja with the features that chat templates need: whitespace and loop control, 3 helpers."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.filters["tojson"] = _to_json
        self.filters[_TICK] = _tick


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the model's own text for training. Here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - so the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tick_at(line: int) -> jinja2.nodes.Node:
    """A statement that counts one iteration: a filter, because a checked call takes 5 µs."""
    nothing = jinja2.nodes.Const(None)
    tick = jinja2.nodes.Filter(nothing, _TICK, [], [], None, None)
    return jinja2.nodes.ExprStmt(tick).set_lineno(line)


@jinja2.pass_context  # prevents a single evaluation at compile time
def _tick(context: jinja2.runtime.Context, value: None) -> None:
    """Count one loop iteration or macro call. Raises ``Refused``."""
    budget = _budget.get()
    budget.turns -= 1
    if budget.turns <= 0:
        budget.look()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {_short(error)}"


def _short(error: Exception) -> str:
    """An error's text, shortened: it may quote a whole message."""
    text = str(error)
    return text if len(text) <= _REASON_CHARS else f"{text[:_REASON_CHARS]}…"
