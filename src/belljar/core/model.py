"""The base class of all data that crosses boundaries: frozen, and unknown fields are refused."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64", defer_build=True
    )
