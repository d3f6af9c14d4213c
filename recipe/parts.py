"""Sections that have parts, whose keys are those of all subclasses.

`class Csv(Log): csv: bool = False` adds the key `log.csv`, and `isinstance(recipe.log, Csv)` holds.
"""

from typing import Any, ClassVar, Dict, List, Tuple, Type

from pydantic import create_model
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from recipe.kinds import JsonSchema, OpenSection


class Parts(OpenSection):
    """Base of sections that have parts, which add keys of their own to the section."""

    # The parts of the section, in the order of their definition.
    parts: ClassVar[List[Type["Parts"]]] = []
    # The class that inherits from all parts; made anew once another part is defined.
    whole: ClassVar[Type["Parts"]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if cls.is_section():
            cls.parts = []
        elif len(cls.__bases__) == 1:  # a part, and not the whole, which is made here
            section = cls.section()
            section.parts.append(cls)
            # pydantic takes the fields of bases from the last to the first: reversed, the keys are
            # in the order in which parts are defined.
            section.whole = create_model(
                section.__name__,
                __base__=(*reversed(section.parts), section),
                __module__=__name__,
                __doc__=section.__doc__,
            )

    @classmethod
    def section(cls) -> Type["Parts"]:
        """Return the section that this part belongs to; a section returns itself."""
        return next(base for base in cls.__mro__ if issubclass(base, Parts) and base.is_section())

    @classmethod
    def class_for(cls, values: Any) -> Type["Parts"]:
        """Return the class that has all parts, whatever `values` are."""
        return cls.section().whole

    @classmethod
    def fields(cls) -> Dict[str, FieldInfo]:
        """Return the keys in a file, of all parts."""
        return dict(cls.section().whole.model_fields)

    def __reduce__(self) -> Tuple[Any, ...]:
        # The class that has all parts cannot be imported by its name.
        return self.section().model_validate, (dict(self),)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: Any
    ) -> JsonSchema:
        return handler(cls.whole.__pydantic_core_schema__ if cls.is_section() else schema)
