"""What a prompt's special tokens become."""

from collections.abc import Callable

from tokenizers import Tokenizer as Library

from tests.support.cases import for_each
from tests.support.tokenizers import SPECIAL, byte_level, sentencepiece
from worker.text import Tokenizer


@for_each("make", [byte_level, sentencepiece])
def test_special_tokens_in_prompts_are_tokens_or_text_as_set(make: Callable[[], Library]) -> None:
    library = make()
    end, source = library.token_to_id(SPECIAL), library.to_str().encode()
    tokens = Tokenizer(source, {}, "")
    text = Tokenizer(source, {}, "", special_in_prompts=False)
    prompt = f"the fox{SPECIAL}stop"
    assert end in tokens.encode(prompt)
    assert end not in text.encode(prompt)
    assert library.decode(text.encode(prompt), skip_special_tokens=False).strip() == prompt
    assert tokens.encode("the quick fox") == text.encode("the quick fox")
