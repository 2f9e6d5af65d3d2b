"""Turns what a guest printed and how it ended into `{error_type, message, suggestion, context}`."""

from __future__ import annotations

from belljar.models import ErrorType, Failure, Limits, Result, Status


def diagnose(result: Result, *, language: str, limits: Limits, backend: str) -> Failure:
    return Failure(error_type=ErrorType.RUNTIME_ERROR, message="", suggestion="", context={})
