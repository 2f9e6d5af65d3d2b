"""A result is readable when it is printed, rich in a notebook, and what a guest wrote is shown, never obeyed."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from belljar.cli.run import _pictures
from belljar.core.result import ErrorType, Failure, File, Result, Status

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n rest").decode()
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
FAILED = Result(
    status=Status.ERROR, exit_code=1, stdout="out\n", stderr="Traceback\n", duration_ms=35.2, backend="native",
    error=Failure(error_type=ErrorType.RUNTIME_ERROR, message="it broke", suggestion="mend it"),
    reasons=("native chosen",), denied=("example.org: not listed",), left_out=("a: link",), warnings=("slow",),
)  # fmt: skip


class Tags(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_a_printed_result_says_how_it_ended_what_it_printed_and_what_to_do() -> None:
    assert str(FAILED).splitlines() == [
        "error (exit code 1) on native in 35 ms", "out", "[stderr]", "Traceback", "RUNTIME_ERROR: it broke",
        "Suggestion: mend it", "[denied] example.org: not listed", "[left out] a: link", "[warning] slow",
    ]  # fmt: skip
    assert str(Result(status=Status.TIMEOUT, truncated=True)) == "timeout in 0 ms\n[warning] the output was cut"
    assert str(Result(status=Status.SUCCESS, results=({"text/plain": "42"},))).endswith("\n[result] 42")


def test_its_repr_stays_exact() -> None:
    assert repr(FAILED).startswith("Result(status=<Status.ERROR: 'error'>, exit_code=1, stdout='out\\n', ")
    assert "reasons=('native chosen',)" in repr(FAILED)


def test_no_escape_sequence_of_a_guest_reaches_the_terminal_by_print() -> None:
    hostile = "\x1b[2J\x9b31m\r\u202eevil"
    shown = str(FAILED.model_copy(update={"stdout": hostile, "stderr": hostile, "denied": (hostile,)}))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)


def test_a_notebook_gets_text_and_html_with_a_red_error_and_its_suggestion() -> None:
    bundle = FAILED._repr_mimebundle_()
    assert bundle["text/plain"] == str(FAILED)
    page = bundle["text/html"]
    assert re.search(r"color:#c62828.*<b>RUNTIME_ERROR</b>: it broke<br><i>mend it</i>", page)
    assert "example.org: not listed" in page


def test_figures_are_shown_as_images_and_tables_in_a_frame_that_runs_no_script() -> None:
    table = "<table><tr><td>1</td></tr></table>"
    drawing = "<svg onload='alert(1)'/>"
    results = (
        {"image/png": PNG, "text/plain": "x"},
        {"text/html": table},
        {"image/svg+xml": drawing},
        {"text/plain": "7"},
    )
    seen = Tags(Result(status=Status.SUCCESS, results=results)._repr_html_()).seen
    images = [attrs["src"] for tag, attrs in seen if tag == "img"]
    encoded = base64.b64encode(drawing.encode()).decode()
    assert images == [f"data:image/png;base64,{PNG}", f"data:image/svg+xml;base64,{encoded}"]
    frame = next(attrs for tag, attrs in seen if tag == "iframe")
    assert frame["sandbox"] == "" and "default-src 'none'" in str(frame["srcdoc"]) and table in str(frame["srcdoc"])
    assert "table" not in [tag for tag, _ in seen]


def test_what_only_calls_itself_an_image_is_none() -> None:
    for fake in (f'{PNG}" onerror="alert(1)', base64.b64encode(b"<svg/>").decode(), 7, "é"):
        page = Result(status=Status.SUCCESS, results=({"image/png": fake, "text/plain": "instead"},))._repr_html_()
        assert "img" not in [tag for tag, _ in Tags(page).seen]
        assert "instead" in page


texts = st.text() | st.just(EVIL) | st.just("</pre></div>" + EVIL)
bundles = st.dictionaries(
    st.sampled_from(["text/plain", "text/html", "image/png", "image/jpeg", "image/svg+xml"]), texts | st.integers()
)


@given(texts, texts, texts, st.lists(bundles, max_size=3))
def test_whatever_a_guest_writes_the_page_has_no_tag_but_ours(
    out: str, err: str, told: str, shown: list[object]
) -> None:
    failure = Failure(error_type=ErrorType.RUNTIME_ERROR, message=told, suggestion=told)
    changes = {"stdout": out, "stderr": err, "results": tuple(shown), "error": failure, "denied": (told,)}
    for tag, attrs in Tags(FAILED.model_copy(update=changes)._repr_html_()).seen:
        assert tag in ("div", "pre", "b", "i", "br", "small", "img", "iframe")
        assert attrs.keys() <= {"style", "src", "sandbox", "srcdoc"}
        assert str(attrs.get("src", "data:image/")).startswith("data:image/")


def test_figures_are_saved_under_names_that_no_collected_file_has() -> None:
    png = base64.b64encode(b"\x89PNG\r\n\x1a\nrest").decode()
    result = Result(
        status=Status.SUCCESS, files=(File(path="figure-1.png", content=b"own"),),
        results=({"image/png": png}, {"text/plain": "5"}, {"image/png": "bm8gcGljdHVyZQ=="}, {"image/png": png}),
    )  # fmt: skip
    assert [file.path for file in _pictures(result)] == ["figure-2.png", "figure-3.png"]
    assert _pictures(result)[0].content == b"\x89PNG\r\n\x1a\nrest"
