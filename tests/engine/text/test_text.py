# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from moe_lora.core.errors import ConfigError
from moe_lora.engine.text.text import IncrementalDetokenizer, StopMatcher, TextStream, load_tokenizer
from moe_lora.engine.text.tokenizer_files import read_eos_token_ids
from tests.small_tokenizers import TEMPLATE, byte_fallback, byte_level, characters, wrapped, write_dir

BYTE_LEVEL, BYTE_FALLBACK, CHARACTERS = (wrapped(make()) for make in (byte_level, byte_fallback, characters))
TOKENIZERS = {"byte_level": BYTE_LEVEL, "byte_fallback": BYTE_FALLBACK, "characters": CHARACTERS}


def stream(tokenizer, token_ids, prompt=()):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("name", ["byte_level", "characters"])
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_streamed_text_equals_the_whole_for_any_tokens(name, data):
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=80))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(deadline=None, max_examples=100)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_streamed_text_equals_the_whole_for_any_text(name, text):
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(text.replace("\ufffd", ""))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@settings(deadline=None, max_examples=50)
@given(prompt=st.text(alphabet="the quick 日é", min_size=1), text=st.text(alphabet="the fox 🙂日é"))
def test_text_after_a_prompt_goes_on_where_the_prompt_stops(prompt, text):
    prompt_ids, token_ids = BYTE_LEVEL.encode(prompt), BYTE_LEVEL.encode(text)
    assert "".join(stream(BYTE_LEVEL, token_ids, prompt_ids)) == text


@pytest.mark.parametrize("prompt", ["a 😀", "a 😀😀", "a 👩‍👧", "😀" * 9])
def test_the_first_space_stays_after_a_prompt_of_byte_tokens(prompt):
    the = BYTE_FALLBACK.encode("\u2581the")
    assert "".join(stream(BYTE_FALLBACK, the, BYTE_FALLBACK.encode(prompt))) == " the"


def test_a_prompt_of_half_a_character_gives_no_context():
    half = BYTE_FALLBACK.encode("😀")[:2]
    assert "".join(stream(BYTE_FALLBACK, BYTE_FALLBACK.encode("ab"), half)) == "ab"


def test_a_character_of_several_tokens_comes_whole():
    token_ids = BYTE_LEVEL.encode("🙃")
    assert len(token_ids) > 1
    assert stream(BYTE_LEVEL, token_ids) == [""] * (len(token_ids) - 1) + ["🙃", ""]


def test_an_incomplete_character_is_shown_at_the_end():
    assert stream(BYTE_LEVEL, BYTE_LEVEL.encode("🙃")[:2])[-1] == "\ufffd"


def test_an_endless_run_of_invalid_bytes_does_not_grow_the_window():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    lone_byte = (
        BYTE_LEVEL.encode("é")[-1:] if len(BYTE_LEVEL.encode("é")) > 1 else BYTE_LEVEL.encode("ß")[-1:]
    )
    pieces = [detokenizer.push(lone_byte[0]) for _ in range(500)]
    assert len(detokenizer._window) < 100
    assert "".join(pieces) + detokenizer.flush() == BYTE_LEVEL.decode(lone_byte * 500)


@pytest.mark.parametrize("kind", ["unknown", "empty"])
@pytest.mark.parametrize("start", ["the", "", "cut"])
def test_ids_without_text_take_a_few_decodes_each_and_change_no_text(kind, start):
    tokenizer = wrapped(byte_level())
    tokenizer.backend.add_tokens([AddedToken("\u200b", normalized=False)])
    tokenizer.backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\u200b", "")])
    silent = tokenizer.vocab_size - (kind == "empty")
    assert tokenizer.decode([silent]) == ""
    around = tokenizer.encode("é")[:1] if start == "cut" else tokenizer.encode(start)
    token_ids = [*around, *[silent] * 2000, *tokenizer.encode("é")[-1:], *tokenizer.encode(" fox")]
    num_decoded = itertools.count()

    def counted(ids):
        assert all(next(num_decoded) < 100 * len(token_ids) for _ in ids)
        return tokenizer.backend.decode(ids)

    tokenizer.decode = counted
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.backend.decode(token_ids)


def test_a_leading_space_is_kept_only_after_a_prompt():
    the, quick = (BYTE_FALLBACK.backend.token_to_id(word) for word in ("▁the", "▁quick"))
    assert "".join(stream(BYTE_FALLBACK, [the, quick])) == "the quick"
    assert "".join(stream(BYTE_FALLBACK, [quick], [the])) == " quick"


@settings(deadline=None, max_examples=300)
@given(
    text=st.text(alphabet="ab\n", max_size=30),
    stop=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_stop_strings_cut_the_same_however_the_text_is_cut(text, stop, cuts):
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    want = text[: min(ends)[1]] if ends else text
    bounds = sorted({0, *[cut for cut in cuts if cut < len(text)], len(text)})
    matcher, got, stopped = StopMatcher(stop), "", None
    for begin, end in itertools.pairwise(bounds):
        for character in text[begin:end] if len(cuts) % 2 else [text[begin:end]]:
            if stopped is None:
                piece, stopped = matcher.push(character)
                got += piece
    if stopped is None:
        got += matcher.flush()
    assert (got, stopped) == (want, min(ends)[2] if ends else None)


def test_long_stop_strings_with_a_common_letter_are_few_looks_a_token():
    num_looks = itertools.count()

    class Watched(str):
        def __getitem__(self, place):
            next(num_looks)
            return super().__getitem__(place)

        def startswith(self, *given):
            next(num_looks)
            return super().startswith(*given)

    others = [Watched("a" + chr(98 + number) * 1000) for number in range(8)]
    matcher = StopMatcher([*others, Watched("a" * 1000 + "z")])
    text = "a" * 3000
    pieces = [matcher.push(letter)[0] for letter in text]
    assert "".join(pieces) + matcher.flush() == text
    assert next(num_looks) <= 2 * len(text) * 9


def test_a_stop_string_over_several_tokens_ends_the_text_before_it():
    texts = TextStream(CHARACTERS, stop=["wor"])
    deltas = [texts.push([token_id]) for token_id in CHARACTERS.encode("hello world")[1:]]
    stopped = [delta.stop for delta in deltas].index("wor")
    assert "".join(delta.text for delta in deltas[: stopped + 1]) == "hello "
    assert stopped == len("hello wor") - 1


def test_tokens_after_a_stop_string_in_the_same_step_are_not_counted():
    texts = TextStream(CHARACTERS, stop=["ll"])
    delta = texts.push(CHARACTERS.encode("hello")[1:])
    assert (delta.text, delta.num_tokens, delta.stop) == ("he", 4, "ll")


def test_stop_strings_before_min_tokens_do_not_count():
    texts = TextStream(CHARACTERS, stop=["e"], min_tokens=4)
    delta = texts.push(CHARACTERS.encode("hello there")[1:])
    assert (delta.text, delta.stop) == ("hello th", "e")


@pytest.mark.parametrize("min_tokens", range(13))
@pytest.mark.parametrize("at_once", [True, False])
def test_a_stop_string_counts_if_it_ends_from_min_tokens_on(min_tokens, at_once):
    """A stop string wholly before, also as part of another, does not count."""
    ids, ends = CHARACTERS.encode("hello there")[1:], {"e": (2, 9, 11), "llo": (5,), "lo the": (9,)}
    want = min(((end, stop) for stop in ends for end in ends[stop] if end >= min_tokens), default=None)
    if want == (9, "e"):
        want = (9, "lo the")  # begins earlier
    texts, text, num, stopped = TextStream(CHARACTERS, stop=list(ends), min_tokens=min_tokens), "", 0, None
    for part in [ids] if at_once else [[one] for one in ids]:
        if stopped is None:
            delta = texts.push(part)
            text, num, stopped = text + delta.text, num + delta.num_tokens, delta.stop
    if want is None:
        assert (text + texts.flush().text, stopped) == ("hello there", None)
    else:
        end, stop = want
        assert (text, num, stopped) == ("hello there"[: end - len(stop)], end, stop)


def test_a_held_back_beginning_of_a_stop_string_comes_at_the_end():
    texts = TextStream(CHARACTERS, stop=["rest"])
    assert texts.push(CHARACTERS.encode("hello there")[1:]).text == "hello the"
    assert texts.flush().text == "re"


def test_tokenizer_dir_gives_text_ids_template_and_end_tokens(tmp_path):
    folder = write_dir(tmp_path, characters(), chat_template=TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != 1
    assert tokenizer.eos_token_ids == (2,)
    assert read_eos_token_ids(folder) == (7, 2, 9)
    assert read_eos_token_ids(folder, with_generation_config=False) == (9,)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "[user]hi\n[assistant]"
    assert tokenizer.render_chat([], variables={"loud": True}) == "LOUD [assistant]"


@pytest.mark.parametrize("value", ["2", [2, "3"], [[2]], 2.0, True, {}])
def test_an_end_token_that_is_no_id_is_refused_with_its_file(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id=.* must be a token id"):
        read_eos_token_ids(tmp_path)


def test_truncation_and_padding_stored_in_the_file_do_not_apply(tmp_path):
    backend = characters()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = load_tokenizer(write_dir(tmp_path, backend))
    assert len(tokenizer.encode("hello there")) == 1 + len("hello there")


def test_template_file_goes_before_the_one_in_the_config(tmp_path):
    folder = write_dir(tmp_path, characters(), chat_template=[{"name": "default", "template": "old"}])
    assert load_tokenizer(folder).render_chat([]) == "old"
    (folder / "chat_template.jinja").write_text("new {{ bos_token }}")
    assert load_tokenizer(folder).render_chat([]) == "new <s>"


def test_what_a_template_refuses_is_a_value_error(tmp_path):
    source = "{{ raise_exception('roles must alternate') }}"
    tokenizer = load_tokenizer(write_dir(tmp_path, characters(), chat_template=source))
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_templates_run_in_a_sandbox(tmp_path):
    source = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = load_tokenizer(write_dir(tmp_path, characters(), chat_template=source))
    with pytest.raises(ValueError, match="chat template"):
        tokenizer.render_chat([])


def test_directories_without_or_with_broken_tokenizer_files(tmp_path):
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(write_dir(tmp_path / "plain", characters())).render_chat([])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_older_tokenizer_files_are_converted(tmp_path):
    backend = byte_level()
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello 日本")) == "hello 日本"


def test_a_long_text_is_tokenized_as_a_short_one_while_other_threads_go_on():
    turns, over = [], threading.Event()

    def turn():
        while not over.wait(0.001):
            turns.append(1)

    thread = threading.Thread(target=turn)
    thread.start()
    before = len(turns)
    found = CHARACTERS.encode("hello world" * 100_000, add_special_tokens=False)
    during = len(turns) - before
    over.set()
    thread.join()
    assert found == CHARACTERS.encode("hello world", add_special_tokens=False) * 100_000
    assert during > 5
