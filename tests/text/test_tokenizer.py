import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import tiny_models
from budget import examples
from text.texts import TEXTS
from turnstile.text import Tokenizer, TokenizerError


def tiny(tmp_path: Path) -> Tokenizer:
    tiny_models.write_tokenizer(tmp_path)
    return Tokenizer.from_directory(tmp_path)


def tiny_metadata() -> dict[str, object]:
    """The tiny tokenizer as a GGUF file would carry it, arrays as a reader would give them."""
    backend = tiny_models.make_tokenizer()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [3 if token in tiny_models.SPECIAL_TOKENS else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tiny_models.MERGES],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
    }


def test_a_directory_and_a_gguf_file_of_one_tokenizer_agree(tmp_path: Path) -> None:
    directory, gguf = tiny(tmp_path), Tokenizer.from_gguf(tiny_metadata())
    for text in TEXTS:
        assert directory.encode(text) == gguf.encode(text)
        assert directory.decode(directory.encode(text)) == text
    assert directory.vocabulary.bytes_of == gguf.vocabulary.bytes_of
    assert (directory.bos_id, directory.eos_id, directory.stop_ids) == (1, 2, {0, 2})
    assert (gguf.bos_id, gguf.eos_id, gguf.stop_ids) == (1, 2, {0, 2})


def test_control_text_is_a_control_token_only_where_asked(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path)
    text = "a<|im_end|>b"
    parsed = tokenizer.encode(text)
    plain = tokenizer.encode(text, parse_special=False)
    assert tiny_models.TURN_END in parsed
    assert not tokenizer.control_ids & set(plain)
    assert tokenizer.decode(plain) == text


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "|>", "the", " ", "é", "<"])))
@settings(max_examples=examples(200))
def test_plain_text_never_yields_a_control_token(parts: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(tiny_metadata())
    text = "".join(parts)
    ids = tokenizer.encode(text, parse_special=False, add_special_tokens=False)
    assert not tokenizer.control_ids & set(ids)
    assert tokenizer.decode(ids) == text


def test_a_whole_word_in_the_vocabulary_does_not_smuggle_in_a_control_token() -> None:
    metadata = tiny_metadata()
    metadata["tokenizer.ggml.pre"] = "llama-bpe"  # takes whole words from the vocabulary
    tokens = [*metadata["tokenizer.ggml.tokens"], "END"]  # type: ignore[misc]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [3, 3, 3, *[1] * (len(tokens) - 4), 3]
    metadata["tokenizer.ggml.add_bos_token"] = False
    tokenizer = Tokenizer.from_gguf(metadata)
    control = len(tokens) - 1
    assert tokenizer.encode("END") == [control]
    ids = tokenizer.encode("END END", parse_special=False)
    assert control not in ids
    assert tokenizer.decode(ids) == "END END"
    many = "END " * 3000  # as many as Python has levels of recursion, and more
    ids = tokenizer.encode(many, parse_special=False)
    assert control not in ids
    assert tokenizer.decode(ids) == many


def test_begin_and_end_tokens_come_as_the_metadata_says() -> None:
    metadata = tiny_metadata() | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    bare = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [1, *bare, 2]
    assert tokenizer.encode("the", parse_special=False) == [1, *bare, 2]
    assert tokenizer.encode("") == [1, 2]


def test_end_of_turn_ids_come_from_every_file_that_names_one(tmp_path: Path) -> None:
    tiny_models.write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9999]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_directory(tmp_path).stop_ids == {0, 2, 5, 7}


@given(st.text(max_size=200))
@settings(max_examples=examples(200))
def test_the_bound_on_tokens_is_a_lower_bound(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(tiny_metadata() | {"tokenizer.ggml.pre": "qwen2"})
    data = text.encode("utf-8", "surrogatepass")
    assert tokenizer.min_tokens(len(data)) <= len(tokenizer.encode(text))
    assert tokenizer.min_tokens(10_000_000) > 100_000


def test_lone_surrogates_are_replaced_not_fatal(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokenizer.ggml.model": "bert"}, "not supported"),
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.tokens": []}, "empty"),
        ({"tokenizer.ggml.tokens": "abc"}, "not an array"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "array of strings"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 entries"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "damaged merge"),
        ({"tokenizer.ggml.merges": []}, "needs tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["q absent"]}, "inconsistent"),
        ({"tokenizer.ggml.eos_token_id": 100_000}, "outside the vocabulary"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "needs a number"),
        ({"tokenizer.ggml.eos_token_id": float("nan")}, "nan where .* needs an integer"),
        ({"tokenizer.ggml.token_type": np.full(273, np.inf)}, "inf where .* needs an integer"),
        ({"tokenizer.ggml.add_bos_token": "false"}, "add_bos_token is 'false', which is no"),
        ({"tokenizer.ggml.add_bos_token": np.ones(2)}, "add_bos_token is array"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "1 entries"),
    ],
)
def test_damaged_metadata_is_refused_in_words(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(TokenizerError, match=complaint):
        Tokenizer.from_gguf(tiny_metadata() | change)


def test_a_piece_too_long_to_be_cut_at_every_place_is_refused() -> None:
    metadata = sentencepiece_metadata()
    pieces = metadata["tokenizer.ggml.tokens"]
    assert isinstance(pieces, list)
    pieces[-1] = "w" * 100_000
    with pytest.raises(TokenizerError, match=r"tokens\[271\] has 100000 characters; at most 1024"):
        Tokenizer.from_gguf(metadata)


def test_an_id_no_table_has_room_for_is_refused(tmp_path: Path) -> None:
    tiny_models.write_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["model"]["vocab"]["far"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(TokenizerError, match="token id 4294967295; at most 2097151"):
        Tokenizer.from_directory(tmp_path)


def test_an_unknown_pre_tokenizer_warns_and_serves(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_gguf(tiny_metadata() | {"tokenizer.ggml.pre": "from-the-future"})
    assert "from-the-future" in caplog.text
    assert tokenizer.decode(tokenizer.encode("the end")) == "the end"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "cannot read tokenizer.json"),
        ("tokenizer_config.json", "{", "cannot read tokenizer_config.json"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("generation_config.json", "[" * 100_000, "cannot read generation_config.json: .* deeply"),
        ("chat_template.jinja", b"\xff", "cannot read chat_template.jinja"),
    ],
)
def test_damaged_files_are_refused_in_words(
    tmp_path: Path, name: str, content: str | bytes | None, complaint: str
) -> None:
    tiny_models.write_tokenizer(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=complaint):
        Tokenizer.from_directory(tmp_path)


def sentencepiece_metadata() -> dict[str, object]:
    pieces = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "hel", "▁hel", "▁hello", "w", "▁w"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_falls_back_to_bytes_and_minds_its_first_space() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    names = [tokenizer.token_string(i) for i in tokenizer.encode("hello wé")]
    assert names == ["<s>", "▁hello", "▁w", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello wé", add_special_tokens=False)) == "hello wé"
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert tokenizer.decode(ids) == text
        assert not {1, 2} & set(ids)


def test_added_tokens_with_holes_in_their_ids_keep_them(tmp_path: Path) -> None:
    backend = tiny_models.make_tokenizer()
    saved = json.loads(backend.to_str())
    entry = dict(saved["added_tokens"][0])
    saved["added_tokens"].append({**entry, "id": 300, "content": "<far>"})
    saved["added_tokens"].append({**entry, "id": 310, "content": "<further>", "special": False})
    tiny_models.write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    reference = Backend.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    text = "x<far>y<further>z"
    assert tokenizer.encode(text) == reference.encode(text).ids
    plain = tokenizer.encode(text, parse_special=False)
    far, further = reference.token_to_id("<far>"), reference.token_to_id("<further>")
    assert far not in plain
    assert further in plain
    assert tokenizer.token_bytes(far) == b"<far>"


def test_a_segment_inside_a_chat_gets_no_second_first_space(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "▁": 2, "a": 3, "▁a": 4, "b": 5}
    backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("a<s>a") == [4, 1, 3]
    assert tokenizer.encode_segment("a", first=True) == [4]
    assert tokenizer.encode_segment("a", first=False) == [3]
    assert tokenizer.decode([4, 3]) == "aa"
