"""What every part of a configuration is made of: keys that belong together, an unknown one refused.

A module of its own, so that the options of a stage can stand beside the stage and still be nested in a whole study's.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Keys that belong together; an unknown one is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_word_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads `yes`, `on` and `true` as true, which would be taken for 1."""
        field = cls.model_fields[str(info.field_name)]
        section = isinstance(field.annotation, type) and issubclass(
            field.annotation, Section
        )  # has a message of its own
        if isinstance(value, bool) and field.annotation is not bool and not section:
            raise PydanticCustomError("word", "give a value that is not yes or no; quote it if it is text")
        return value
