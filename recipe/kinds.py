"""Sections that come in kinds, sections that have parts, and the registry of what implements them.

A section that comes in kinds has a base class with the keys common to all of them, and a class for each kind with its
own keys, ranges and defaults. To add one, write the class, here or in a file of your own::

    class Adagrad(Optimizer):
        name: Literal["adagrad"] = "adagrad"
        eps: float = Field(1e-10, gt=0, description="added to the divisor of the step")

Then `optimizer: {name: adagrad, eps: 1e-8}` is a valid recipe, whose `recipe.optimizer` is an `Adagrad`; JSON Schema,
suggestions and errors know it. The first kind is the default. `Optimizer(name="sgd", momentum=0.8)` makes an `Sgd`.

A section that has parts (`Log`) has the keys of all its subclasses: `class Csv(Log): csv: bool = False` adds `log.csv`,
and `isinstance(recipe.log, Csv)` holds.

The implementation registers itself for the class, in a file of its own::

    OPTIMIZERS = Registry("optimizer")             # one for each room, beside its users

    @OPTIMIZERS.implements(Adagrad)
    def build(section: Adagrad, ...): ...          # or a class, or any other object

    OPTIMIZERS.of(recipe.optimizer)                # that of the section's class, else of its nearest base class
    LOGGERS.all_of(recipe.log)                     # all that fit, in the order of registration: for sections with parts

Ask the object that `of` returns for whatever depends on the kind; do not compare names.
"""

from typing import Any, Callable, ClassVar, Dict, Generic, List, Optional, Tuple, Type, TypeVar, get_args

from pydantic import ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from recipe.section import Section

T = TypeVar("T")


class _Open(Section):
    """A section whose classes are looked up when a recipe is read, so that those defined after `Recipe` count."""

    @classmethod
    def section(cls) -> Type["_Open"]:  # the class below Kind or Parts
        return cls.__mro__[cls.__mro__.index(_Open) - 2]  # type: ignore[return-value]

    def __new__(cls, **values: Any) -> "_Open":
        return super().__new__(cls._class_for(values) if cls is cls.section() else cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        if cls.__mro__[2].__name__ != "_Open":
            return handler(source)
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls._class_for(value).model_validate(value)
        )


class Kind(_Open):
    """Base of sections that come in kinds: subclasses whose `tag` is a Literal, under each of its names."""

    tag: ClassVar[str] = "name"
    kinds: ClassVar[Dict[str, Type["Kind"]]] = {}  # of the section, by name
    # Whether a recipe that changes the kind drops the keys that only the kind before it had.
    resets: ClassVar[bool] = True

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


class Parts(_Open):
    """Base of sections that have parts, which add keys of their own to the section."""

    parts: ClassVar[List[Type["Parts"]]] = []
    _whole: ClassVar[Dict[int, Type["Parts"]]] = {}  # the class of all parts, by how many there were

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if cls is cls.section():
            cls.parts, cls._whole = [], {}
        elif len(cls.__bases__) == 1:
            cls.parts.append(cls)

    @classmethod
    def _class_for(cls, values: Any) -> Type["Parts"]:
        count, section = len(cls.parts), cls.section()
        if count not in cls._whole:
            bases, doc = (*reversed(cls.parts), section), section.__doc__
            cls._whole[count] = create_model(section.__name__, __base__=bases, __module__=__name__, __doc__=doc)
        return cls._whole[count]

    @classmethod
    def fields(cls) -> Dict[str, FieldInfo]:
        """The keys in a file, of all parts."""
        return dict(cls._class_for({}).model_fields)

    def __reduce__(self) -> tuple:
        return self.section().model_validate, (dict(self),)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: core_schema.CoreSchema, handler: Any) -> Dict[str, Any]:
        return handler(cls._class_for({}).__pydantic_core_schema__ if cls is cls.section() else schema)


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

    def all_of(self, section: Section) -> List[T]:
        """Every implementation for a class that `section` is an instance of, in the order of registration."""
        return [found for cls, found in self._found.items() if isinstance(section, cls)]

    def items(self) -> List[Tuple[type, T]]:
        """Each class with its implementation."""
        return list(self._found.items())
