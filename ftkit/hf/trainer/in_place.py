"""Whether the engine that was asked for will be in place: the order of base classes, and who reads the arguments.

A mixin behind the class that it should extend overrides nothing, and a stock Trainer ignores a field that it does not know:
both would train by plain DDP without a word. The first is seen when the class is made. For the second, a Trainer on the
engine says so while it builds itself, and the arguments, whose `place_model_on_device` every Trainer reads once, listen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ftkit.errors import UserError

_building: ContextVar[bool] = ContextVar("building a Trainer on ftkit's engine", default=False)


def check_order(cls: type, mixin: type, base: type) -> None:
    """Raise where a class stands between `mixin` and the subclass `cls` that the mixin should come before.

    Args:
        cls: the new class.
        mixin: ftkit's mixin.
        base: the class of transformers that the mixin extends.

    Raises:
        UserError: naming the class, and the order that is right.
    """
    order = cls.__mro__
    before = order[: order.index(mixin)]
    wrong = next((each for each in before if issubclass(each, base) and not issubclass(each, mixin)), None)
    if wrong is not None:
        others = ", ".join(each.__name__ for each in cls.__bases__ if not issubclass(each, mixin))
        raise UserError(
            f"class {cls.__name__}({', '.join(each.__name__ for each in cls.__bases__)}): {wrong.__name__} comes before "
            f"{mixin.__name__}, whose methods would not be called: ftkit's engine would not be in place. Write class "
            f"{cls.__name__}(ftkit.{mixin.__name__}, {others})"
        )


@contextmanager
def engine_trainer() -> Iterator[None]:
    """Let arguments know that a Trainer on the engine is built in the body."""
    token = _building.set(True)
    try:
        yield
    finally:
        _building.reset(token)


def check_reader(arguments: str) -> None:
    """Raise unless a Trainer on the engine is being built.

    Args:
        arguments: name of the arguments' class.

    Raises:
        UserError: a Trainer without the engine has read them.
    """
    if not _building.get():
        raise UserError(
            f"{arguments}(ftkit=...) asks for ftkit's engine, and the Trainer that was given it does not know the engine: "
            "it would train by plain DDP. Use ftkit.Trainer, or class T(ftkit.TrainerMixin, SFTTrainer); ftkit=None trains "
            "without the engine"
        )
