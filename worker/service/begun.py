"""Continues a text that another worker began, or finds it complete."""

import msgspec

from protocol import End, FinishReason, ModelCard, Sampling, Submit
from worker.text import TextStream, Tokenizer


def checked_part(message: Submit) -> Sampling:
    """The job's sampling for checks: a complete text has ``max_tokens`` 0, which counts as 1."""
    if message.begun_tokens and not message.sampling.max_tokens:
        return msgspec.structs.replace(message.sampling, max_tokens=1)
    return message.sampling


def begun_text(tokenizer: Tokenizer, message: Submit) -> TextStream:
    """A job's text stream, not yet fed with what was generated before."""
    if not message.begun_tokens:
        return tokenizer.stream_for(message.sampling)
    return tokenizer.stream_for(message.sampling, message.stop_after_tokens)


def end_of_complete(text: TextStream, message: Submit, card: ModelCard) -> End | None:
    """Feed what was generated before, whose text has been sent; returns how the job ends if only
    its end is missing, else None.

    A worker may die between its last token and the job's end, and what it held back (a possible
    stop string, half a character) is the end's ``tail``.
    """
    begun, sampling = message.begun, message.sampling
    if not begun:
        return None
    stopped = text.feed(begun).stopped_at is not None
    is_over = (
        stopped
        or text.stop_token_id is not None
        or (not sampling.ignore_eos and begun[-1] in card.eos_token_ids)
    )
    if not is_over and sampling.max_tokens > 0:
        return None
    tail, stopped_by_tail = ("", False) if stopped else text.flush()
    has_stopped = is_over or stopped_by_tail
    return End(
        handle=message.handle,
        reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
        prompt_tokens=len(message.token_ids),
        completion_tokens=0,
        wait_ms=0.0,
        prefill_ms=0.0,
        decode_ms=0.0,
        left_ms=message.budget_ms,
        tail=tail,
        stop=text.stop if has_stopped else "",
        stop_token_id=text.stop_token_id,
    )
