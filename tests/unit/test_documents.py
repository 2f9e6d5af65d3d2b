"""Documents that people write: JSON, TOML and YAML are read alike, and none of them can mean more than it holds."""

from __future__ import annotations

import pytest

from belljar.host import documents

LAUGHS = b"a: &a [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
    f"{one}: &{one} [{','.join([f'*{before}'] * 10)}]\n".encode()
    for before, one in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (
            ".json",
            b'{"container": {"engine": "docker", "capabilities": [], "cpu_shares": 100, "network_mode": "none"}}',
        ),
        (".toml", b'[container]\nengine = "docker"\ncapabilities = []\ncpu_shares = 100\nnetwork_mode = "none"\n'),
        (".yaml", b"container:\n  engine: docker\n  capabilities: []\n  cpu_shares: 100\n  network_mode: none\n"),
        (".YML", b"\xef\xbb\xbfcontainer: {engine: docker, capabilities: [], cpu_shares: 100, network_mode: none}"),
    ],
)
def test_a_document_says_the_same_in_each_format(suffix: str, text: bytes) -> None:
    said = {"engine": "docker", "capabilities": [], "cpu_shares": 100, "network_mode": "none"}
    assert documents.parse(text, suffix) == {"container": said}


@pytest.mark.parametrize(
    ("suffix", "text", "said"),
    [
        (".json", b'{"a": 1, "a": 2}', "'a' is there twice"),
        (".json", b'{"x": [{"a": 1, "a": 1}]}', "'a' is there twice"),
        (".yaml", b"x:\n  a: 1\n  a: 2\n", "'a' is there twice"),
        (".toml", b"a = 1\na = 2\n", "Cannot overwrite"),
        (".yaml", b"3: x", "the key '3' is no text"),
        (".yaml", b"? [a]\n: x", "is no text"),
        (".yaml", b"a: &x {b: 1}\nc:\n  <<: *x\n", r"merge keys \(<<\) are not read"),
        (".yaml", b"a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        (".yaml", b"&a [*a]", "nested too deeply"),
        (".yaml", b"[" * 3000, "nested too deeply"),
        (".json", b"[" * 100_000, "nested too deeply"),
        (".json", b"[" * 100 + b"]" * 100, "nested too deeply"),
        (".yaml", LAUGHS, "too many values"),
        (".yaml", b" " * 300_000, "more than 256 KiB"),
        (".json", b" " * (5 << 20), "more than 4096 KiB"),
        (".json", b"\xff\xfe", "codec"),
        (".yaml", b"a: [", "expected"),
        (".ini", b"a=1", r"must end in one of .toml, .yaml, .yml, .json"),
    ],
)
def test_what_is_no_document_or_means_too_much_is_refused_with_the_reason(suffix: str, text: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        documents.parse(text, suffix)


def test_what_others_say_twice_in_their_document_is_their_affair() -> None:
    document = documents.parse(b'{"scripts": {"a": 1, "a": 2}, "sandbox": {"b": 1}}', ".json", foreign=True)
    documents.refuse_twice(document, only=["sandbox"])
    documents.refuse_twice(document["sandbox"])
    with pytest.raises(ValueError, match="'a' is there twice"):
        documents.refuse_twice(document)
