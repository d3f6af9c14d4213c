"""The frozen, typed store under every group of options (PopTorch 3.4, python/_options_impl.py)."""

import copy


class OptionValues:
    """Public names are options, typed by their first value; private names are the class's own.

    An option unknown to the class is an AttributeError on reading; once frozen, so is any change.
    """

    def __init__(self, **default_values):
        self.__dict__["_values"] = default_values
        self.__dict__["_is_frozen"] = False

    def set(self, **values):
        """Changes options that exist, keeping their type; AssertionError for others."""
        self.checkIsFrozen()
        for name, value in values.items():
            assert self.exists(name), f"Invalid option {name}, valid options are {self._values.keys()}"
            kind = type(self._values[name])
            assert isinstance(value, kind), f"Unexpected type {type(value)} for option {name}. Expected {kind}"
            self._values[name] = value

    def createOrSet(self, **values):
        """Like set, but options may be new."""
        self.checkIsFrozen()
        for name, value in values.items():
            self._values.setdefault(name, value)
            self.set(**{name: value})

    def exists(self, option):
        """Whether the option has a value."""
        return option in self._values

    def checkIsFrozen(self, option=None):
        """AttributeError where the options were handed to a model or a loader before."""
        if option != "_is_frozen" and self._is_frozen:
            raise AttributeError("Can't modify frozen Options")

    def clone(self):
        """An independent copy that can be changed."""
        copied = copy.deepcopy(self)
        copied._unfreeze()
        return copied

    def toDict(self):
        """The options of this group."""
        return dict(self._values)

    def _freeze(self):
        self._set_frozen(True)

    def _unfreeze(self):
        self._set_frozen(False)

    def _set_frozen(self, frozen):
        self.__dict__["_is_frozen"] = frozen
        for part in self.__dict__.values():
            if isinstance(part, OptionValues):
                part._set_frozen(frozen)

    def __setattr__(self, name, value):
        self.checkIsFrozen(name)
        if name.startswith("_"):
            if name not in self.__dict__:
                raise AttributeError(f"Invalid private attribute {name}.")
            self.__dict__[name] = value
        else:
            self.set(**{name: value})

    def __getattr__(self, name):
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"Invalid attribute {name}.")
        return self._values[name]

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"
