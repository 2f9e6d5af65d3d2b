"""Bad input is refused with a message that names the field and the remedy; good input survives a round trip."""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from belljar.core import capabilities, errors, plan, request, result
from belljar.core.capabilities import Capabilities, Guarantees, Isolation, LanguageSupport
from belljar.core.languages import BUILTIN, Language
from belljar.core.model import Model, ours
from belljar.core.plan import Command, Plan
from belljar.core.request import Egress, Limits, RunRequest, Workspace
from belljar.core.result import Event, Failure, File, Result, Status
from belljar.core.values import GIB, KIB, MIB, format_size, guest_path, parse_size

patient = trials(deadline=None)  # a machine that is busy with other things is not a failure

EVERY_MODEL = [
    model
    for module in (request, plan, result, capabilities)
    for model in vars(module).values()
    if isinstance(model, type) and issubclass(model, Model) and model is not Model
]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def refusal(model: type[BaseModel], **fields: Any) -> errors.InvalidRequest:
    with pytest.raises(ValidationError) as caught:
        model(**fields)
    return errors.from_validation(caught.value)


# --- every model ---


@pytest.mark.parametrize("model", EVERY_MODEL)
def test_a_model_refuses_a_field_it_does_not_know(model: type[BaseModel]) -> None:
    assert "no_such_field: " in refusal(model, no_such_field=1).message


@pytest.mark.parametrize("model", EVERY_MODEL)
@patient
@given(data=st.data())
def test_a_model_takes_any_value_or_refuses_it_by_its_field_s_name(model: type[BaseModel], data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(sorted(model.model_fields)))
    value = data.draw(anything)
    try:
        model.model_validate({field: value})
    except ValidationError as error:
        problem = errors.from_validation(error)
        wrong = problem.context["fields"]
        assert problem.message and all(name.split(".")[0] in (*model.model_fields, "") for name in wrong)
        assert all(name.split(".")[0] in problem.message for name in wrong)


@pytest.mark.parametrize(
    "value",
    [
        Limits(memory=GIB), Egress(mode="listed", hosts=frozenset({"example.org"})), Workspace(path="/a"),
        RunRequest(code="x"), Plan(), Command(argv=("a",), stdin=b"\xff"),
        Failure(error_type="TIMEOUT", message="m", suggestion="s", context={"a": 1}), Guarantees(isolation="kernel"),
        File(path="a", content=b"\xff"), Result(status=Status.ERROR, files=(File(path="a"),)),
        Event(run="r", seq=1, kind="stdout"), LanguageSupport(name="go", available=False),
        Capabilities(backend="x", available=True),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_model_is_frozen_and_survives_json(value: BaseModel) -> None:
    assert type(value).model_validate_json(value.model_dump_json()) == value
    name = next(iter(type(value).model_fields))
    with pytest.raises(ValidationError):
        setattr(value, name, None)


# --- sizes ---


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 * MIB), ("4G", 4 * GIB), ("4g", 4 * GIB), ("1.5k", 1536), ("10 MiB", 10 * MIB), ("7", 7), ("7b", 7),
    ("1T", 2**40)],
)  # fmt: skip
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1M", "1X", "1e3", "1 2", "0x10", "inf", "nan", "9" * 400, "1,5G", "٣M"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"512M|larger than any machine"):
        parse_size(text)


@patient
@given(st.integers(0, 2**62))
def test_a_size_that_is_shown_can_be_read_again_and_is_nearly_the_same(size: int) -> None:
    again = parse_size(format_size(size).replace(" bytes", ""))
    assert isinstance(again, int)
    assert math.isclose(again, size, rel_tol=0.001)


@patient
@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        assert 0 <= parse_size(text) < 2**63  # type: ignore[operator]
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 bytes"), (1023, "1023 bytes"), (KIB, "1K"), (512 * MIB, "512M"), (2**40, "1T")]
)
def test_a_size_is_shown_short(size: int, shown: str) -> None:
    assert format_size(size) == shown


# --- paths ---


@pytest.mark.parametrize(
    ("given_path", "plain"),
    [("a", "a"), ("./a", "a"), ("a//b/./c", "a/b/c"), ("/workspace/a", "a"), ("a/", "a"),
    (PurePosixPath("x/y"), "x/y"), ("é ü", "é ü")],
)  # fmt: skip
def test_a_path_inside_the_sandbox_is_made_plain(given_path: Any, plain: str) -> None:
    assert guest_path(given_path) == plain


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "1 to 1024"), (".", "names no file"), ("/", "outside /workspace"), ("/workspace", "names no file"),
        ("..", "climbs out"), ("a/../../b", "climbs out"), ("/workspace/../etc", "climbs out"),
        ("/etc/passwd", "outside"),
        ("/workspaces/x", "outside"), ("a\0b", "control character"), ("a\nb", "control character"), ("\x7f", "control"),
        ("a\\b", "backslash"), ("\ud800", "surrogate"), ("x" * 256, "over 255"), ("a/" * 33 + "b", "more than 32"),
        ("é" * 600, "1 to 1024"), (3, "must be a string"), (None, "must be a string"), (b"a", "must be a string"),
    ],
)  # fmt: skip
def test_a_path_that_is_not_plain_is_refused_saying_why(path: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        guest_path(path)


@patient
@given(
    st.text(max_size=60) | st.lists(st.sampled_from(["..", ".", "", "a", "/", "workspace", "\0", "é"])).map("/".join)
)
def test_no_text_becomes_a_path_that_leaves_the_workspace(text: str) -> None:
    try:
        path = guest_path(text)
    except ValueError as error:
        assert str(error)
        return
    assert guest_path(path) == path
    parts = path.split("/")
    assert not path.startswith("/") and ".." not in parts and "." not in parts and "" not in parts
    assert path.isprintable() or all(ord(c) >= 32 for c in path)
    assert len(path.encode()) <= 1024


# --- limits, egress, requests ---


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("cpus", [0, -1, math.inf, math.nan, 2000, "many"]), ("memory", [0, "1M", "lots", -5, 2**50]),
        ("disk", [0, "1k", 2**50]), ("pids", [0, -1, 2**23, 1.5, "x"]),
        ("grace", [-1, 601, math.inf, math.nan, "soon"]),
        ("timeout", [0, -1, math.inf, math.nan, 10**9, "soon"]),
        ("output", [-1, "2G", "x"]), ("io_bps", [1, "x"]), ("io_iops", [0, -1]),
    ],
)  # fmt: skip
def test_a_limit_outside_its_range_is_refused_by_name_with_what_was_given(field: str, values: list[Any]) -> None:
    for value in values:
        problem = refusal(Limits, **{field: value})
        assert problem.message.startswith(f"{field}: ")
        assert "(got " in problem.message


def test_only_the_limits_that_were_named_count() -> None:
    assert Limits().named() == {}
    assert Limits(memory="1G", timeout=3).named() == {"memory": GIB, "timeout": 3}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mode": "listed"}, "at least one host"),
        ({"mode": "none", "hosts": {"example.org"}}, "hosts go with mode"),
        ({"mode": "open", "hosts": {"example.org"}}, "hosts go with mode"),
        ({"mode": "listed", "hosts": {"10.0.0.1"}}, "is an address"),
        ({"mode": "listed", "hosts": {"0177.1"}}, "is an address"),
        ({"mode": "listed", "hosts": {"ftp://example.org"}}, "not a host name"),
        ({"mode": "listed", "hosts": {"example.org/x"}}, "not a host name"),
        ({"mode": "listed", "hosts": {"a b"}}, "not a host name"),
        ({"mode": "listed", "hosts": {"example.org:0"}}, "no port"),
        ({"mode": "listed", "hosts": {"192.0.2.1/24:443"}}, "has host bits set"),
        ({"mode": "listed", "hosts": {"user@example.org"}}, "not a host name"),
        ({"mode": "listed", "hosts": {"*"}}, "any host is mode"),
        ({"mode": "listed", "hosts": {"a.*.org"}}, "not a host name"),
        ({"mode": "listed", "hosts": {"::1"}}, "not a host name"),
        ({"mode": "listed", "hosts": {""}}, "not a host name"),
        ({"mode": "all"}, "mode"),
    ],
)  # fmt: skip
def test_an_egress_that_could_be_misread_is_refused(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(Egress, **fields).message


def test_hosts_are_compared_in_lower_case_without_a_final_dot() -> None:
    assert Egress(mode="listed", hosts={"Example.ORG.", "*.Example.org"}).hosts == {"example.org", "*.example.org"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"code": "x", "command": ("a",)}, "`code` or `command`, not both"),
        ({"command": ()}, "command: "),
        ({"command": ("",)}, "needs a program"),
        ({"command": ("a\0b",)}, "command.0: must not hold a NUL"),
        ({"code": "\0"}, "code: must not hold a NUL"),
        ({"code": "\ud800"}, "code: "),
        ({"language": "py thon"}, "language: "),
        ({"language": ""}, "language: "),
        ({"files": {"../x": b""}}, "climbs out"),
        ({"files": {"a": b"", "a/b": b""}}, "a file and a folder"),
        ({"files": {"a": 3}}, "files.a: "),
        ({"files": {str(i): b"" for i in range(300)}}, "files: "),
        ({"env": {"A=B": "x"}}, "is not a variable name"),
        ({"env": {"1A": "x"}}, "is not a variable name"),
        ({"env": {"A": "x\0y"}}, "env.A: must not hold a NUL"),
        ({"env": {"A\n": "x"}}, "is not a variable name"),
        ({"collect": ("../*",)}, "collect: "),
        ({"workdir": "/etc"}, "workdir: "),
        ({"workdir": "../x"}, "workdir: "),
        ({"isolation": "some"}, "isolation: "),
        ({"limits": {"memory": "x"}}, "limits.memory: "),
        ({"egress": {"mode": "x"}}, "egress.mode: "),
        ({"workspace": {}}, "workspace.path: is required"),
        ({"backend": ""}, "backend: "),
    ],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused_by_field(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(RunRequest, **fields).message


@pytest.mark.parametrize(
    ("workdir", "seen"),
    [("/workspace", "/workspace"), (".", "/workspace"), ("a/b", "/workspace/a/b"), ("/workspace/a", "/workspace/a")],
)
def test_a_working_directory_is_always_below_the_workspace(workdir: str, seen: str) -> None:
    assert RunRequest(workdir=workdir).workdir == seen


@patient
@given(st.dictionaries(st.text(min_size=1, max_size=12), st.binary(max_size=8), max_size=6))
def test_files_that_are_accepted_have_plain_names_that_do_not_clash(files: dict[str, bytes]) -> None:
    try:
        names = [PurePosixPath(name) for name in RunRequest(files=files).files]
    except ValidationError as error:
        assert "files" in errors.from_validation(error).message or "file and a folder" in str(error)
        return
    assert all(parent not in names for name in names for parent in name.parents)


@patient
@given(st.text(min_size=1, max_size=8).filter(lambda text: ": " not in text * 2))
def test_a_long_input_is_shortened_in_the_refusal(text: str) -> None:
    for model, fields in (
        (Limits, {"memory": text * 1000 + "!"}),
        (RunRequest, {"env": {text * 1000 + "!": ""}}),
        (Egress, {"mode": "listed", "hosts": [text * 1000 + "!"]}),
    ):
        message = refusal(model, **fields).message.split(": ", 1)[1]
        assert len(message.removeprefix(text * 1000)) < 1500


def test_isolation_is_ordered_from_weakest_to_strongest() -> None:
    levels = (Isolation.NONE, Isolation.WASM, Isolation.NAMESPACE, Isolation.KERNEL)
    assert [level.rank for level in levels] == [0, 1, 2, 3]


def test_a_default_is_not_shared_between_requests() -> None:
    assert RunRequest().files is not RunRequest().files


@given(st.dictionaries(st.sampled_from(["a.txt", "b/c.bin"]), st.binary(max_size=50)), st.binary(max_size=50))
def test_a_request_survives_its_own_json_whatever_bytes_it_holds(files: dict[str, bytes], stdin: bytes) -> None:
    asked = RunRequest(code="print(1)", files=files, stdin=stdin)
    assert RunRequest.model_validate_json(asked.model_dump_json()) == asked


def test_in_json_text_is_text_and_other_bytes_are_base64() -> None:
    asked = RunRequest(code="", files={"a": "hé", "b": b"\xff"}, stdin={"base64": "AAE="})
    assert asked.stdin == b"\0\1"
    assert asked.model_dump(mode="json")["files"] == {"a": "hé", "b": {"base64": "/w=="}}


@pytest.mark.parametrize("wrong", [{"base64": "*"}, {"base64": 1}, {"text": "a"}, {}, {"base64": "", "more": 1}])
def test_a_mapping_that_is_no_base64_is_refused_with_what_to_write(wrong: object) -> None:
    with pytest.raises(ValidationError, match="base64"):
        RunRequest(code="", stdin=wrong)


def test_every_built_in_language_is_valid() -> None:
    for name, language in BUILTIN.items():
        assert Language.model_validate(language.model_dump()) == language
        assert name == language.name


def test_what_is_ours_is_made_without_a_check_and_is_equal_to_what_is_checked() -> None:
    made = ours(Event)(run="bj-1", seq=1, kind="stdout", at=1.5, text="a")
    assert made == Event(run="bj-1", seq=1, kind="stdout", at=1.5, text="a")
    assert made.model_dump_json() == Event.model_validate_json(made.model_dump_json()).model_dump_json()
    assert made.model_fields_set == {"run", "seq", "kind", "at", "text"}
    assert made.model_copy(update={"seq": 2}).seq == 2
    assert ours(Limits)() == Limits() and hash(ours(Limits)()) == hash(Limits())
    assert list(vars(ours(Result)(stdout="a", status=Status.SUCCESS))) == list(Result.model_fields)  # as JSON has them
    with pytest.raises(ValidationError, match="frozen"):
        made.seq = 2  # type: ignore[misc]


def test_what_is_ours_has_its_own_defaults_and_no_unknown_or_missing_field() -> None:
    one, other = (ours(Plan)() for _ in range(2))
    assert one.id != other.id and one.files is not other.files
    with pytest.raises(TypeError, match="sequence"):
        ours(Event)(run="bj-1", seq=1, kind="stdout", sequence=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="kind"):
        ours(Event)(run="bj-1", seq=1)  # type: ignore[call-arg]
