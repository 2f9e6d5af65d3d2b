"""Entries of allowlists: what they stand for, what covers what, and which hosts named sets come to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.core import errors
from belljar.core.net_entries import NAMED_SETS, covers, net_entry
from belljar.core.policy import check_reach
from belljar.core.request import Egress
from belljar.core.settings import EgressSettings, Settings
from belljar.host.egress.judgement import judge
from belljar.host.egress.named_sets import hosts_of


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("Example.ORG.", "example.org"), ("https://example.org/", "example.org"), ("example.org:443", "example.org"),
        ("example.org:8443", "example.org:8443"), ("HTTP://example.org", "http://example.org"),
        ("http://example.org:80", "http://example.org"), ("http://*.example.org:8080", "http://*.example.org:8080"),
        ("192.0.2.1:443", "192.0.2.1:443"), ("192.0.2.0/24:443", "192.0.2.0/24:443"),
        ("[2001:DB8::/32]:443", "[2001:db8::/32]:443"), ("http://[::1]:80", "http://[::1]:80"),
    ],
)  # fmt: skip
def test_an_entry_is_written_in_one_way(text: str, written: str) -> None:
    assert net_entry(text).text == written == net_entry(written).text


@pytest.mark.parametrize(
    "text",
    ["", "a b", "a.*.org", "example.org:0", "example.org:70000", "192.0.2.1", "192.0.2.1/24:443", "ftp://a", "a/b",
     "a\0b", "user@a.example", "2001:db8::1:443", "[2001:db8::1]", "*", "http://", "a..b",
     "*.192.0.2.1:443:1", "999.1.1.1:443"],
)  # fmt: skip
def test_what_could_be_misread_is_no_entry(text: str) -> None:
    with pytest.raises(ValueError):
        net_entry(text)


@given(st.text(max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        found = net_entry(text)
    except ValueError:
        return
    assert net_entry(found.text) == found


@pytest.mark.parametrize(
    ("pattern", "asked", "holds"),
    [
        ("*", "anything.example", True), ("*", "http://a.example", True), ("*", "*", True), ("a.example", "*", False),
        ("*.a.example", "b.a.example", True), ("*.a.example", "*.b.a.example", True),
        ("*.a.example", "a.example", False),
        ("a.example", "a.example:8443", False), ("a.example", "http://a.example", False),
        ("a.example:8443", "a.example:8443", True), ("192.0.2.0/24:443", "192.0.2.7:443", True),
        ("192.0.2.0/24:443", "192.0.0.0/16:443", False), ("192.0.2.0/24:443", "192.0.2.7:444", False),
        ("192.0.2.0/24:443", "[2001:db8::1]:443", False), ("python-packages", "python-packages", True),
        ("python-packages", "a.example", False), ("a.example", "python-packages", False), ("*", "git-hosts", True),
    ],
)  # fmt: skip
def test_one_entry_covers_another_only_where_all_of_it_is_within(pattern: str, asked: str, holds: bool) -> None:
    assert covers(pattern, asked) is holds


def test_a_list_stands_for_no_network_some_hosts_or_all() -> None:
    assert Egress.of([]).mode == "none"
    assert Egress.of(["a.example"]).entries == ("a.example",)
    assert Egress.of(["a.example", "*"]).mode == "open"
    assert Egress.of(["*"]).entries == ("*",)


def test_administrators_set_the_most_that_may_be_asked_for() -> None:
    some = Settings(egress=EgressSettings(hosts=("*.a.example", "python-packages"), open=False))
    check_reach(Egress.of(["x.a.example", "python-packages"]), some)
    for asked in (["b.example"], ["x.a.example:8443"], ["git-hosts"], ["http://x.a.example"]):
        with pytest.raises(errors.PolicyDenied, match="may not be reached from here"):
            check_reach(Egress.of(asked), some)
    with pytest.raises(errors.PolicyDenied, match=r"egress\.open is false"):
        check_reach(Egress.of(["*"]), some)
    with pytest.raises(errors.PolicyDenied, match="no host"):
        check_reach(Egress.of(["a.example"]), Settings(egress=EgressSettings(hosts=())))
    check_reach(Egress(), Settings(egress=EgressSettings(hosts=())))
    check_reach(Egress.of(["*"]), Settings())


@given(st.binary(max_size=200), st.booleans())
def test_an_open_network_and_ranges_never_allow_what_is_denied(target: bytes, plain: bool) -> None:
    denied = ["a.example", "http://a.example", "192.0.2.0/24:443"]
    for asked in (target, b"a.example:443", b"A.EXAMPLE.:80", b"192.0.2.7:443"):
        for allowed in (Egress.of(["*"], denied), Egress.of(["a.example", "192.0.2.0/24:443"], denied)):
            found = judge(asked, allowed, plain=plain)
            assert found.objection or (found.host, found.port) not in {("a.example", 443), ("a.example", 80)}
            assert found.objection or not (found.host.startswith("192.0.2.") and found.port == 443)


# --- named sets ---

PROGRAMS = {
    "python3": """#!/bin/sh
echo "global.index-url='https://me:secret@index.example:8443/simple'"
echo ":env:.extra-index-url='http://more.example/simple https://other.example/x file:///opt'"
echo "global.cert='/etc/x'" """,
    "npm": """#!/bin/sh
echo '{"registry": "https://npm.example/", "@team:registry": "https://team.example/npm", "cache": "https://no.example"}'""",
    "go": """#!/bin/sh
echo https://go.example,direct; echo sum.example""",
    "git": """#!/bin/sh
[ "$2" = --global ] && echo url.https://git.example/.insteadof""",
}


@pytest.fixture
def clients(tmp_path: Path) -> Settings:
    """Stand-ins of the clients, and a home with their files."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    cargo = tmp_path / ".cargo" / "config.toml"
    cargo.parent.mkdir()
    cargo.write_text('[registries.own]\nindex = "sparse+https://crates.example/index/"\n')
    return Settings(
        home=str(tmp_path), path=str(programs), egress=EgressSettings(sets_file=str(tmp_path / "none.toml"))
    )


def test_a_named_set_is_what_the_clients_are_configured_for(clients: Settings) -> None:
    assert {name: hosts_of(name, clients) for name in NAMED_SETS} == {
        "python-packages": {"index.example:8443", "http://more.example", "other.example"},
        "javascript-packages": {"npm.example", "team.example"},
        "go-modules": {"go.example", "sum.example"},
        "rust-crates": {"crates.example"},
        "git-hosts": {"git.example"},
    }


def test_where_pip_names_no_index_it_is_pips_own_that_counts(clients: Settings) -> None:
    said = '#!/bin/sh\n[ "$1" = -c ] && echo https://own.example/ https://files.example/ || echo "global.extra-index-url=\'file:///opt\'"'
    Path(clients.path, "python3").write_text(said)
    assert hosts_of("python-packages", clients) == {"own.example", "files.example"}


def test_the_administrators_file_says_more_and_only_if_it_is_theirs(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    settings = Settings(home=str(tmp_path), path="", egress=EgressSettings(sets_file=str(file)))
    with pytest.raises(errors.InvalidRequest, match="no host of rust-crates is known here"):
        hosts_of("rust-crates", settings)
    file.write_text('rust-crates = ["crates.example", "http://plain.example"]')
    file.chmod(0o666)
    with pytest.raises(errors.InvalidRequest, match="can be written by others"):
        hosts_of("rust-crates", settings)
    file.chmod(0o644)
    assert hosts_of("rust-crates", settings) == {"crates.example", "http://plain.example"}
    if os.geteuid() == 0:
        os.chown(file, 12345, 0)
        other = settings.model_copy(update={"home": str(tmp_path / "x")})
        with pytest.raises(errors.InvalidRequest, match="can be written by others"):
            hosts_of("rust-crates", other)
    for wrong in ('rust-crates = "crates.example"', 'rust-crates = ["not a host"]', "rust-crates = ["):
        bad = tmp_path / f"{len(wrong)}.toml"
        bad.write_text(wrong)
        bad.chmod(0o644)
        with pytest.raises(errors.InvalidRequest, match="cannot be used"):
            hosts_of("rust-crates", Settings(home="/", path="", egress=EgressSettings(sets_file=str(bad))))
