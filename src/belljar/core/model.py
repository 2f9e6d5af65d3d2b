"""The base class of all data that crosses boundaries: frozen, and unknown fields are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64", defer_build=True
    )


def fields_at(model: type[BaseModel], steps: Iterable[object]) -> tuple[str, ...]:
    """Returns the fields that may stand where `steps`, a path into the data of a model, leads."""
    for step in steps:
        if step in model.model_fields:
            model = _model_in(model.model_fields[str(step)].annotation) or model
    return tuple(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of an annotation such as `Limits | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
