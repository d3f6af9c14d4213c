"""Sections that come in kinds, and the registry of what implements them.

A section that comes in kinds has a base class with the keys common to all of them, and a class for each kind with its
own keys, ranges and defaults. To add one, write the class, here or in a file of your own::

    class Adagrad(Optimizer):
        name: Literal["adagrad"] = "adagrad"
        eps: float = Field(1e-10, gt=0, description="added to the divisor of the step")

    @OPTIMIZERS.implements(Adagrad)                # a Registry, one for each room
    def build(section: Adagrad, ...): ...          # or a class, or any other object

Then `optimizer: {name: adagrad, eps: 1e-8}` is a valid recipe, whose `recipe.optimizer` is an `Adagrad`; JSON Schema,
suggestions and errors know it. `OPTIMIZERS.of(recipe.optimizer)` returns what implements it: ask that object for
whatever depends on the kind; do not compare names. The first kind is the default.
"""

from typing import Any, Callable, ClassVar, Dict, Generic, List, Optional, Tuple, Type, TypeVar, get_args

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from recipe.section import Section

T = TypeVar("T")


class Kind(Section):
    """Base of sections that come in kinds: subclasses whose `tag` is a Literal, under each of its names.

    Its classes are looked up when a recipe is read, so that those defined after `Recipe` count.
    """

    tag: ClassVar[str] = "name"
    kinds: ClassVar[Dict[str, Type["Kind"]]] = {}  # of the section, by name
    # Whether a recipe that changes the kind drops the keys that only the kind before it had.
    resets: ClassVar[bool] = True

    @classmethod
    def section(cls) -> Type["Kind"]:  # the class below Kind
        return cls.__mro__[cls.__mro__.index(Kind) - 1]  # type: ignore[return-value]

    def __new__(cls, **values: Any) -> "Kind":
        return super().__new__(cls._class_for(values) if cls is cls.section() else cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        if cls.__mro__[1].__name__ != "Kind":  # which is not there yet when its own schema is made
            return handler(source)
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls._class_for(value).model_validate(value)
        )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if cls is cls.section():
            cls.kinds = {}
        for name in get_args(cls.model_fields[cls.tag].annotation):
            if name in cls.kinds:
                raise TypeError(f"{cls.tag} {name} is taken by {cls.kinds[name].__qualname__}; choose another")
            cls.kinds[name] = cls

    @classmethod
    def default_name(cls) -> str:
        """Name of this kind; of a section or a kind with several, the default."""
        kind = next(iter(cls.kinds.values())) if cls is cls.section() else cls
        return kind.model_fields[cls.tag].default

    @classmethod
    def own_keys(cls) -> List[str]:
        """The keys of this kind that are not common to all."""
        return [name for name in cls.model_fields if name not in cls.section().model_fields]

    @classmethod
    def fields(cls) -> Dict[str, FieldInfo]:
        """The keys in a file; of the whole section those of all kinds, as the first that has one describes it."""
        section = cls.section()
        found = {**super().fields(), cls.tag: section.model_fields[cls.tag]}
        for kind in cls.kinds.values() if cls is section else ():
            found = {**found, **{key: field for key, field in kind.fields().items() if key not in found}}
        return found

    def defaults(self) -> Dict[str, Any]:
        return {**super().defaults(), self.tag: self.section().default_name()}

    @classmethod
    def foreign(cls, key: str, value: Any) -> Optional[str]:
        """Reason why this kind refuses `key`, which another kind has; None: the key is ignored."""
        owner = next(name for name, kind in cls.kinds.items() if key in kind.model_fields)
        own = ", ".join(cls.own_keys()) or "none of its own"
        return f"{key} belongs to {owner}, not to {cls.default_name()} (its keys: {own}); remove {key}"

    @classmethod
    def changed(cls, before: Dict[str, Any], after: Dict[str, Any]) -> bool:
        """Whether the layer `after` names another kind than `before`, of which only keys common to all stay."""
        old, new = before.get(cls.tag) or cls.default_name(), after.get(cls.tag)
        return cls.resets and new is not None and cls.kinds.get(str(new)) is not cls.kinds.get(str(old))

    @model_validator(mode="before")
    @classmethod
    def _only_own_keys(cls, values: Any) -> Any:
        """Null stands for the default of a kind's own key, and for nothing at another kind's."""
        if not isinstance(values, dict):
            return values
        others = {key for kind in cls.kinds.values() for key in kind.model_fields}.difference(cls.model_fields)
        for key in others.intersection(values):
            if values[key] is not None:
                cls._check_foreign(key, values[key])
        absent = {*others, *(key for key in cls.own_keys() if values.get(key) is None)}
        return {key: value for key, value in values.items() if key not in absent}

    @classmethod
    def _check_foreign(cls, key: str, value: Any) -> None:
        """Raises ValueError where the kind refuses the key, ValidationError for a value that no owner of it takes."""
        fault = cls.foreign(key, value)
        if fault:
            raise ValueError(fault)
        for owner in [kind for kind in cls.kinds.values() if key in kind.model_fields]:
            try:
                owner.model_validate({key: value})
                return
            except ValidationError as error:
                invalid = error
        raise invalid

    @classmethod
    def _class_for(cls, values: Any) -> Type["Kind"]:
        """The kind that `values` name. Raises ValidationError for an unknown name."""
        name = values.get(cls.tag, cls.default_name()) if isinstance(values, dict) else cls.default_name()
        if isinstance(name, str) and name in cls.kinds:
            return cls.kinds[name]
        *names, last = map(repr, cls.kinds)
        expected = f"{', '.join(names)} or {last}" if names else last
        fault = {"type": "literal_error", "loc": (cls.tag,), "input": name, "ctx": {"expected": expected}}
        raise ValidationError.from_exception_data(cls.__name__, [fault])

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: core_schema.CoreSchema, handler: Any) -> Dict[str, Any]:
        if cls is not cls.section():
            return handler(schema)
        references = {kind: handler(kind.__pydantic_core_schema__) for kind in cls.kinds.values()}
        properties = {kind: handler.resolve_ref_schema(found)["properties"] for kind, found in references.items()}
        every = {
            key: [own[key] for own in properties.values() if key in own] for each in properties.values() for key in each
        }
        for kind, own in properties.items():
            for key in kind.own_keys():
                _allow_null(own[key])
            for key in every:
                own.setdefault(key, {"type": "null"})
        if cls.resets and len(references) > 1:
            return {"description": cls.__doc__, "anyOf": list(references.values())}
        # Keys of another kind are often ignored: one object with all keys is as exact, and much shorter.
        merged = {key: each[0] if each.count(each[0]) == len(each) else {"anyOf": each} for key, each in every.items()}
        described = cls.model_fields[cls.tag].description
        merged[cls.tag] = {"enum": list(cls.kinds), "default": cls.default_name(), "description": described}
        return {"description": cls.__doc__, "additionalProperties": False, "type": "object", "properties": merged}


def _allow_null(node: Dict[str, Any]) -> None:
    if not any(option.get("type") == "null" for option in node.get("anyOf", ())):
        described = {key: node.pop(key) for key in ("title", "default", "description") if key in node}
        options = node.pop("anyOf", None) or [dict(node)]
        node.clear()
        node.update(described, anyOf=[*options, {"type": "null"}])


class Registry(Generic[T]):
    """Implementations of section classes, registered by decorator; `noun` names one in errors."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._found: Dict[type, T] = {}

    def implements(self, *sections: Type[Section]) -> Callable[[T], T]:
        """A decorator that registers what it decorates for these classes, each of which has one implementation."""

        def register(implementation: T) -> T:
            for section in sections:
                if self._found.setdefault(section, implementation) is not implementation:
                    raise TypeError(f"{section.__name__} has an implementation as {self._noun}: {self._found[section]}")
            return implementation

        return register

    def of(self, section: Section) -> T:
        """The implementation of the section's class, or of its nearest base class. Raises TypeError without one."""
        for cls in type(section).__mro__:
            if cls in self._found:
                return self._found[cls]
        raise TypeError(f"nothing implements {type(section).__name__} as {self._noun}; import the file that does")

    def items(self) -> List[Tuple[type, T]]:
        """Each class with its implementation."""
        return list(self._found.items())
