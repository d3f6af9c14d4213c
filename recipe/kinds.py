"""Sections that come in kinds, and the registry of what implements them; parts.py has those with parts.

A section that comes in kinds has a base class with the keys common to all of them, and a class for
each kind with its own keys, ranges and defaults. To add one, write the class, here or in a file of
your own::

    class Adagrad(Optimizer):
        name: Literal["adagrad"] = "adagrad"
        eps: float = Field(1e-10, gt=0, description="added to the divisor of the step")

Then `optimizer: {name: adagrad, eps: 1e-8}` is a valid recipe, whose `recipe.optimizer` is an
`Adagrad`; JSON Schema, suggestions and errors know it. The first kind is the default.
`Optimizer(name="sgd", momentum=0.8)` makes an `Sgd`.

The implementation registers itself for the class, in a file of its own::

    OPTIMIZERS = Registry("optimizer")     # one for each room, beside its users

    @OPTIMIZERS.implements(Adagrad)
    def build(section: Adagrad, ...): ...  # or a class, or any other object

    OPTIMIZERS.of(recipe.optimizer)        # that of the section's class, else of its nearest base
    LOGGERS.all_of(recipe.log)             # all that fit, in order: for sections with parts

Ask the object that `of` returns for whatever depends on the kind; do not compare names.
"""

import functools
from typing import (
    Any,
    Callable,
    ClassVar,
    Dict,
    Generic,
    Iterable,
    List,
    Optional,
    Tuple,
    Type,
    TypeVar,
    get_args,
)

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, core_schema

from common.text import either
from recipe.section import Section

T = TypeVar("T")
JsonSchema = Dict[str, Any]


@functools.lru_cache(maxsize=None)  # each override asks for every kind of its section
def _is_section(cls: type) -> bool:
    """Return whether a class is a direct subclass of Kind or of Parts."""
    # Kind and Parts are known by their grandparent, Section: pydantic asks as it makes
    # OpenSection, which has no name yet.
    families = [base for base in cls.__bases__ if issubclass(base, Section)]
    parents = [parent for family in families for parent in family.__bases__]
    return any(Section in parent.__bases__ for parent in parents)


class OpenSection(Section):
    """Base of `Kind` and `Parts`: the class of such a section is chosen when a recipe is read.

    A discriminated union of pydantic would be fixed once `Recipe` is defined. Here classes that are
    defined later, in files of users, count like any other.
    """

    @classmethod
    def is_section(cls) -> bool:
        """Return whether this is a section of a recipe, such as Optimizer: a direct subclass of
        Kind or of Parts.
        """
        return _is_section(cls)

    @classmethod
    def class_for(cls, values: Any) -> Type["OpenSection"]:
        """Return the class that a section's keys stand for.

        Args:
            values: the keys with their values, as a recipe gives them.

        Raises:
            ValidationError: there is no such class.
        """
        raise NotImplementedError

    def __new__(cls, **values: Any) -> "OpenSection":
        """Make an object of the class that `values` stand for, where a section itself is called."""
        # Python calls __init__ on what comes of this only where it is an instance of `cls`: a kind
        # is one of its section.
        return super().__new__(cls.class_for(values) if cls.is_section() else cls)

    @classmethod
    def _validated(cls, value: Any) -> "OpenSection":
        """Make a section of its keys; one that is made already stays as it is."""
        return value if isinstance(value, cls) else cls.class_for(value).model_validate(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        # pydantic calls this as it makes the class; a field of a section's type is then validated
        # by our function.
        if cls.is_section():
            return core_schema.no_info_plain_validator_function(cls._validated)
        return handler(source)


class Kind(OpenSection):
    """Base of sections that come in kinds: subclasses whose `tag` is a Literal, under each of its
    names.
    """

    # The key that names the kind.
    tag: ClassVar[str] = "name"
    # Whether a recipe that changes the kind drops the keys that only the kind before it had.
    resets: ClassVar[bool] = True
    # The kinds of the section, by name, in the order of their definition: the first is the default.
    kinds: ClassVar[Dict[str, Type["Kind"]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if cls.is_section():
            cls.kinds = {}  # each section has a table of its own, which its kinds inherit
        # The tag of a section is a plain str, which has no arguments and so registers nothing.
        for name in get_args(cls.model_fields[cls.tag].annotation):
            if name in cls.kinds:
                raise TypeError(
                    f"{cls.tag} {name} is taken by {cls.kinds[name].__qualname__}; choose another"
                )
            cls.kinds[name] = cls

    @classmethod
    def section(cls) -> Type["Kind"]:
        """Return the section that this kind belongs to; a section returns itself."""
        return next(base for base in cls.__mro__ if issubclass(base, Kind) and base.is_section())

    @classmethod
    def default_name(cls) -> str:
        """Return the name of this kind; of a section, or of a kind with several, the default."""
        kind = next(iter(cls.kinds.values())) if cls.is_section() else cls
        return kind.model_fields[cls.tag].default

    @classmethod
    def own_keys(cls) -> List[str]:
        """Return the keys of this kind that are not common to all."""
        common = cls.section().model_fields
        return [name for name in cls.model_fields if name not in common]

    @classmethod
    def fields(cls) -> Dict[str, FieldInfo]:
        """Return the keys in a file; of a section those of all kinds, as the first that has one
        describes it.
        """
        # Described as in the section, not as by one kind: all kinds have this key.
        fields = super().fields()
        fields[cls.tag] = cls.section().model_fields[cls.tag]
        if cls.is_section():
            for kind in cls.kinds.values():
                for key, field in kind.fields().items():
                    fields.setdefault(key, field)
        return fields

    def defaults(self) -> Dict[str, Any]:
        """Return the default of each key for a recipe with this kind, whose name is no default if
        others come first.
        """
        return {**super().defaults(), self.tag: self.section().default_name()}

    @classmethod
    def foreign(cls, key: str, value: Any) -> Optional[str]:
        """Return why this kind refuses a key that only other kinds have; None where the key is
        ignored.

        Args:
            key: of another kind.
            value: what the recipe gives it.
        """
        owner = next(name for name, kind in cls.kinds.items() if key in kind.model_fields)
        known = ", ".join(cls.own_keys()) or "none of its own"
        return f"{key} belongs to {owner}, not to {cls.default_name()} (its keys: {known}); remove {key}"

    @classmethod
    def changed(cls, before: Dict[str, Any], after: Dict[str, Any]) -> bool:
        """Return whether a layer changes the kind, so that only keys common to all kinds stay.

        Args:
            before: the section's keys of lower layers.
            after: those of the layer.
        """
        # By class, not by name: several names can stand for one kind, as sizes of a model.
        old = before.get(cls.tag) or cls.default_name()
        new = after.get(cls.tag)
        if not cls.resets or new is None:
            return False
        return cls.kinds.get(str(new)) is not cls.kinds.get(str(old))

    @classmethod
    def implied(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        """Return the keys that the kind fills in by names among its keys, as files have them.

        Args:
            values: the section's keys, with those names.

        Raises:
            ConfigError: there is nothing of such a name.
        """
        return {}

    @classmethod
    def class_for(cls, values: Any) -> Type["Kind"]:
        """Return the kind that `values` name, or the default. Raises ValidationError for an unknown
        name.
        """
        name = cls.default_name()
        if isinstance(values, dict):
            name = values.get(cls.tag, name)
        if isinstance(name, str) and name in cls.kinds:
            return cls.kinds[name]
        # A kind of the user's own is known only while the file that adds it is imported.
        known = either([repr(kind) for kind in cls.kinds])
        expected = f"{known} (one of your own: --import FILE.py)"
        # The same fault as pydantic's own for a wrong Literal, so that errors of all keys read alike.
        fault: InitErrorDetails = {
            "type": "literal_error",
            "loc": (cls.tag,),
            "input": name,
            "ctx": {"expected": expected},
        }
        raise ValidationError.from_exception_data(cls.__name__, [fault])

    @model_validator(mode="before")
    @classmethod
    def _only_own_keys(cls, values: Any) -> Any:
        """Null stands for the default of a kind's own key, and for nothing at another kind's."""
        if not isinstance(values, dict):
            return values
        keys = {key for kind in cls.kinds.values() for key in kind.model_fields}
        others = keys.difference(cls.model_fields)
        for key in others.intersection(values):
            if values[key] is not None:
                cls._check_foreign(key, values[key])
        # Left out, so that the kind's default applies: null is no valid value of most keys.
        defaulted = {key for key in cls.own_keys() if values.get(key) is None}
        return {
            key: value
            for key, value in values.items()
            if key not in others and key not in defaulted
        }

    @classmethod
    def _check_foreign(cls, key: str, value: Any) -> None:
        """Raise ValueError where the kind refuses the key, ValidationError for a value that no
        owner of it takes.
        """
        fault = cls.foreign(key, value)
        if fault:
            raise ValueError(fault)
        # An ignored key is checked all the same: a typing error must not wait for another override.
        for kind in cls.kinds.values():
            if key not in kind.model_fields:
                continue
            try:
                kind.model_validate({key: value})
                return
            except ValidationError as error:
                refusal = error
        raise refusal

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: Any
    ) -> JsonSchema:
        """Describe a section by its kinds: by one of them, or where it ignores keys of others by
        all keys at once.
        """
        if not cls.is_section():
            return handler(schema)
        references = {kind: handler(kind.__pydantic_core_schema__) for kind in cls.kinds.values()}
        # The definitions themselves, not copies: what is changed below, the references show.
        properties = {
            kind: handler.resolve_ref_schema(reference)["properties"]
            for kind, reference in references.items()
        }
        nodes = _nodes_by_key(properties.values())
        # Null is a value of every key but the common ones; see `_only_own_keys`.
        for kind, of_kind in properties.items():
            for key in kind.own_keys():
                _allow_null(of_kind[key])
            for key in nodes:
                of_kind.setdefault(key, {"type": "null"})
        if cls.resets and len(references) > 1:
            return {"description": cls.__doc__, "anyOf": list(references.values())}
        # Keys of another kind are often ignored: one object with all keys is as exact, and much
        # shorter.
        return cls._one_object(nodes)

    @classmethod
    def _one_object(cls, nodes: Dict[str, List[JsonSchema]]) -> JsonSchema:
        """Return the JSON Schema of an object with the keys of all kinds.

        Args:
            nodes: the JSON Schemas of each key, one from each kind that has it.
        """
        merged = {key: _any_of(options) for key, options in nodes.items()}
        merged[cls.tag] = {
            "enum": list(cls.kinds),
            "default": cls.default_name(),
            "description": cls.model_fields[cls.tag].description,
        }
        return {
            "description": cls.__doc__,
            "additionalProperties": False,
            "type": "object",
            "properties": merged,
        }


def _nodes_by_key(properties: Iterable[JsonSchema]) -> Dict[str, List[JsonSchema]]:
    """Return the JSON Schemas of each key, one from each kind that has it."""
    nodes: Dict[str, List[JsonSchema]] = {}
    for of_kind in properties:
        for key, node in of_kind.items():
            nodes.setdefault(key, []).append(node)
    return nodes


def _any_of(options: List[JsonSchema]) -> JsonSchema:
    """Return a schema that any of `options` fits: the one that all are, where they are the same."""
    first = options[0]
    if all(option == first for option in options):
        return first
    return {"anyOf": options}


def _allow_null(node: JsonSchema) -> None:
    """Add null to the values of a key, in place."""
    if any(option.get("type") == "null" for option in node.get("anyOf", ())):
        return
    # What describes the key stays beside the options: editors show nothing of an option.
    described: JsonSchema = {}
    for keyword in ("title", "default", "description"):
        if keyword in node:
            described[keyword] = node.pop(keyword)
    options = node.pop("anyOf", None) or [dict(node)]
    node.clear()
    node.update(described, anyOf=[*options, {"type": "null"}])


class Registry(Generic[T]):
    """Implementations of section classes, registered by decorator; `noun` names one in errors."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._implementations: Dict[Type[Section], T] = {}

    def implements(self, *sections: Type[Section]) -> Callable[[T], T]:
        """Return a decorator that registers what it decorates for `sections`, each of which has one
        implementation.
        """

        def register(implementation: T) -> T:
            """Register an `implementation`, and return it."""
            for section in sections:
                known = self._implementations.setdefault(section, implementation)
                if known is not implementation:
                    raise TypeError(
                        f"{section.__name__} has an implementation as {self._noun}: {known}"
                    )
            return implementation

        return register

    def of(self, section: Section) -> T:
        """Return the implementation of the class of `section`, or of its nearest base class.

        Raises:
            TypeError: there is none.
        """
        for cls in type(section).__mro__:
            if issubclass(cls, Section) and cls in self._implementations:
                return self._implementations[cls]
        raise TypeError(
            f"nothing implements {type(section).__name__} as {self._noun}; import the file that does"
        )

    def all_of(self, section: Section) -> List[T]:
        """Return every implementation for a class of which `section` is an instance, in the order
        of registration.
        """
        return [made for cls, made in self._implementations.items() if isinstance(section, cls)]

    def items(self) -> List[Tuple[Type[Section], T]]:
        """Return each class with its implementation."""
        return list(self._implementations.items())
