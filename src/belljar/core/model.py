"""The base class of all data that crosses boundaries: frozen, and unknown fields are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar, ParamSpec, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

P = ParamSpec("P")
M = TypeVar("M", bound=BaseModel)
_set = object.__setattr__  # models are frozen


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


def ours(model: Callable[P, M]) -> Callable[P, M]:
    """Returns a constructor of a model that checks no value and builds no validator: `ours(Event)(run=id, seq=1, …)`.

    It is for values of our own, each of its field's type already. What is left out has its default.

    Raises:
        TypeError: by the constructor, where a field is unknown, or one without a default is missing.
    """
    return cast(Callable[P, M], _constructor(cast(type[BaseModel], model)))


@cache
def _constructor(model: type[BaseModel]) -> Callable[..., BaseModel]:
    fields = model.model_fields
    blank = {name: field.default for name, field in fields.items()}
    made = tuple((name, field.default_factory) for name, field in fields.items() if field.default_factory)
    required = {name for name, field in fields.items() if field.is_required()}

    def construct(**values: Any) -> BaseModel:
        content = blank | values
        if len(content) > len(blank) or not required <= values.keys():
            wrong = ", ".join(sorted((required - values.keys()) | (values.keys() - blank.keys())))
            raise TypeError(f"{model.__name__} has no such field, or needs it: {wrong}")
        for name, make in made:
            if name not in values:
                content[name] = cast(Callable[[], Any], make)()
        built = model.__new__(model)
        _set(built, "__dict__", content)
        _set(built, "__pydantic_fields_set__", set(values))
        _set(built, "__pydantic_extra__", None)
        _set(built, "__pydantic_private__", None)
        return built

    return construct


class Apart:
    """Of a field whose type is a model: its validator is built when a value is checked, not along with the whole's.

    Most runs set few of all that can be set. Errors name the fields as they would without this.
    """

    def __get_pydantic_core_schema__(self, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: object) -> BaseModel:
            return value if isinstance(value, source) else source.model_validate(value)

        return core_schema.no_info_plain_validator_function(check)
