"""When typed lines of Python are a whole statement, and how the next line is indented. Nothing is run here."""

from __future__ import annotations

import ast
import codeop
import re
import sys
import warnings


def is_whole(source: str, *, typed: bool = True, language: str = "python") -> bool:
    """Says whether text can be run: a command, a statement that is complete, or one that never will be.

    What is wrong with the latter says the guest's interpreter. A block ends with a line that is not indented, and what
    begins with `%%bash` with an empty one.

    Args:
        source: all lines so far.
        language: Of the text.
        typed: by a person, whose editor indents lines: then one of white space ends a block, and what this Python does
            not understand is whole only if it ends no line with a colon, since the guest's Python may be a newer one.
    """
    if not source.strip() or (source.startswith(":") and "\n" not in source):
        return True
    if language != "python":
        return _is_closed(source, language)
    lines = source.split("\n")
    if source.startswith("%%"):  # a cell for another program: an empty line ends it
        return not lines[-1].strip()
    indented = lines[-1].startswith((" ", "\t")) and not (typed and not lines[-1].strip())
    try:
        with warnings.catch_warnings(action="ignore"):
            made = _compiler()(source, symbol="single" if len(lines) == 1 else "exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return not (typed and (indented or lines[-1].rstrip().endswith(":")))
    return made is not None and (len(lines) == 1 or not indented)


_UNQUOTED = re.compile(r"""\\.|"(?:\\.|[^"\\])*"|'[^']*'|`(?:\\.|[^`\\])*`|(?:^|\s)#.*$|//.*$""", re.MULTILINE)
_OPEN = {"bash": r"\b(?:do|then|case|select)\b|[{(]", "javascript": r"[{(\[]"}
_SHUT = {"bash": r"\b(?:done|fi|esac)\b|[})]", "javascript": r"[})\]]"}
_GOES_ON = {"bash": r"(?:\\|\||&&|\bin)$", "javascript": r"(?:[=+*/,.&|?:-]|=>)$"}


def _is_closed(source: str, language: str) -> bool:
    """Says so of other languages: what was opened is shut, and the last line wants no other. An empty line ends it."""
    if source.endswith("\n\n"):
        return True
    bare = _UNQUOTED.sub(" ", source).rstrip()
    if re.search(_GOES_ON[language], source.rstrip()) or bare.count("'") % 2 or bare.count('"') % 2:
        return False
    if language == "bash":
        bare = re.sub(r"\belif\b[^\n;]*[\n;]\s*then\b|^\s*[^\s()]+\)", " ", bare, flags=re.MULTILINE)
    return len(re.findall(_OPEN[language], bare)) <= len(re.findall(_SHUT[language], bare))


def _compiler() -> codeop.CommandCompiler:
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compiler


def indentation(before: str) -> str:
    """Returns the white space with which the line after this text begins."""
    line = before.rpartition("\n")[2]
    space = line[: len(line) - len(line.lstrip())]
    return space + "    " if line.rstrip().endswith(":") else space


def read_lines(language: str = "python") -> str | None:
    """Reads lines of stdin, which is no terminal, until they are a whole statement; None at the end."""
    lines: list[str] = []
    while True:
        line = sys.stdin.readline() if sys.stdin else ""
        if not line:
            return "\n".join(lines) if lines else None
        lines.append(line.removesuffix("\n"))
        if len(lines) == 1 and lines[0].startswith(":"):
            return lines[0].strip()
        if is_whole("\n".join(lines), typed=False, language=language):
            return "\n".join(lines)
