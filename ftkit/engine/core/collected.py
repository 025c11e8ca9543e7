"""The gradient of a parameter whose weights are whole: the engine collects it, and `.grad` says so.

As autograd finishes a gradient, the engine takes it from the parameter and adds it to its flat parameter. `.grad` is None
then, and `torch.nn.utils.clip_grad_norm_`, a callback that adds up norms, or an optimizer of torch would take that for no
gradient. A parameter of this class raises instead while its gradient is with the engine. Before a backward and after
`zero_grad` None is true, and `.grad` is None. A copy, and what is pickled (`torch.save`), is a plain parameter with the
values, which knows nothing of the engine. Parameters whose weights are in shards have a class of their own
(resharded.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ftkit.errors import UserError

GRADIENT: Any = Tensor.grad
"""torch's own attribute, a getter and setter of C."""


class Collecting:
    """What is added to the class of a parameter."""

    ftkit_name: str
    ftkit_collected: Callable[[], bool] | None = None

    @property
    def grad(self) -> Any:
        """The gradient while autograd has it, else None.

        Raises:
            UserError: while the engine has it.
        """
        own = GRADIENT.__get__(self)
        if own is None and self.ftkit_collected is not None and self.ftkit_collected():
            raise UserError(
                f"{self.ftkit_name}: its gradient is with ftkit's engine, and .grad would be None: "
                "torch.nn.utils.clip_grad_norm_, a sum of norms or an optimizer of torch would do nothing. Use "
                "clip_grad_norm_ and grad_norm() of the sharded optimizer (trainer.sharded_optimizer), "
                "accelerator.clip_grad_norm_, and the grad_norm that the Trainer logs; to clear it, optimizer.zero_grad()"
            )
        return own

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            raise UserError("the .grad of a sharded model's parameter cannot be set: the engine collects gradients itself")
        GRADIENT.__set__(self, None)

    def ftkit_plain(self) -> nn.Parameter:
        """Return a plain parameter with a copy of the values and the user's attributes."""
        assert isinstance(self, Tensor)
        plain = nn.Parameter(self.detach().clone(), self.requires_grad)
        plain.__dict__.update({key: value for key, value in self.__dict__.items() if not key.startswith("ftkit_")})
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.ftkit_plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.ftkit_plain()
        return memo[id(self)]


@functools.cache
def collecting_class(plain: type) -> type:
    """Return the class of a parameter whose class is `plain` outside the engine."""
    return type(plain.__name__, (Collecting, plain), {"__module__": plain.__module__})


def collect(parameter: nn.Parameter, name: str, collected: Callable[[], bool]) -> None:
    """Let `parameter.grad` raise while its gradient is with the engine.

    Args:
        parameter: a trained parameter that is whole on every rank.
        name: name of the parameter in the model.
        collected: whether the engine has a gradient of it.
    """
    parameter.__class__ = collecting_class(type(parameter))
    parameter.ftkit_name = name  # type: ignore[attr-defined]  # tensors take attributes
    parameter.ftkit_collected = collected  # type: ignore[attr-defined]  # as above
