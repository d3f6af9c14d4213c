"""The update of one parameter on the device: LAMB, SGD, RMSprop, and rounding to float16.

Gradients are without loss scale and counts. Weights and state change in place; arithmetic has the gradient's dtype
(float32 on a device) but where PopART holds a result in the weight's or the state's.

Sources: PopART 3.4, willow/include/popart/adam.hpp, sgd.hpp, adaptive.hpp; willow/src/popx/op/adamupdaterx.cpp,
adamvarupdatex.cpp, accumulatex.cpp, rmspropupdaterx.cpp. State is named as in willow/include/popart/tensornames.hpp.
"""

import torch

PREFIXES = ("Accl1___", "Accl2___", "Accl3___", "Step___")


def nearest(values, dtype):
    """Rounds to the nearest of dtype, ties to even."""
    return values.to(dtype)


def stochastic(values, dtype):
    """Rounds float32 to one of the two neighbours in float16, right on average; torch's generator draws."""
    if dtype == torch.float32:
        return values.clone()
    _, exponent = torch.frexp(values)
    # Eleven significant bits; below 2^-14 the spacing of float16 stays 2^-24.
    spacing = torch.ldexp(torch.ones_like(values), (exponent - 11).clamp(min=-24))
    return ((values / spacing + torch.rand_like(values)).floor() * spacing).to(dtype)


def new_state(kind, values, types, correction, weight):
    """{prefix: tensor} of a parameter's state before the first update.

    Args: kind: name of the optimizer's class. values: {name: number} of the parameter's group. types: {argument of the
    constructor: dtype}. correction: whether LAMB corrects its averages' bias.
    """
    first, second = (types[f"{order}_order_momentum_accum_type"] for order in ("first", "second"))
    if kind == "SGD":
        return {"Accl1___": torch.zeros_like(weight, dtype=types["velocity_accum_type"])} if values["momentum"] else {}
    if kind == "RMSprop":
        wide = torch.promote_types(weight.dtype, torch.float32)
        momentum = {"Accl3___": torch.zeros_like(weight, dtype=wide)} if values["momentum"] else {}
        return {"Accl1___": torch.ones_like(weight, dtype=first), **momentum}
    count = {"Step___": torch.zeros(())} if correction else {}
    moments = {"Accl1___": torch.zeros_like(weight, dtype=first), "Accl2___": torch.zeros_like(weight, dtype=second)}
    return {**moments, **count}


def apply(kind, values, weight, gradient, state, rounded, loss_scaling=1.0):
    """One update of one parameter; weight and state change in place. Args: kind, values: as of new_state. gradient: in
    the dtype of the arithmetic. rounded: nearest or stochastic. loss_scaling: by which SGD's velocity is larger."""
    if kind == "SGD":
        values = {**values, "loss_scaling": loss_scaling}
    {"LAMB": _lamb, "SGD": _sgd, "RMSprop": _rmsprop}[kind](values, weight, gradient, state, rounded)


def _set(target, values, rounded):
    target.copy_(rounded(values, target.dtype))


def _lamb(values, weight, gradient, state, rounded):
    wide, narrow = gradient.dtype, weight.dtype
    first, second = state["Accl1___"], state["Accl2___"]
    beta1, beta2 = values["betas"]
    _set(first, beta1 * first.to(wide) + (1.0 - beta1) * gradient, rounded)
    _set(second, beta2 * second.to(wide) + (1.0 - beta2) * gradient * gradient, rounded)
    mean, square = first.to(wide), second.to(wide)
    if "Step___" in state:
        state["Step___"] += 1
        mean = mean / (1.0 - beta1 ** state["Step___"])
        square = square / (1.0 - beta2 ** state["Step___"])
    # The first moment takes the second's type, then the quotient, the decay and their sum the weight's.
    mean = rounded(mean, second.dtype).to(wide)
    update = rounded(mean / (square.sqrt() + values["eps"]), narrow).to(wide)
    if values["weight_decay"]:
        decay = rounded(values["weight_decay"] * weight.to(wide), narrow).to(wide)
        update = rounded(update + decay, narrow).to(wide)
    step = values["lr"] * _trust(values["max_weight_norm"], weight.to(wide), update)
    _set(weight, weight.to(wide) - step * update, rounded)


def _trust(max_weight_norm, weight, update):
    """min(||w||, max) / ||u||; 1 where any of the three is 0 (willow/src/patterns/adamdecompose.cpp)."""
    weight_square, update_square = weight.square().sum(), update.square().sum()
    if max_weight_norm == 0 or weight_square == 0 or update_square == 0:
        return 1.0
    return weight_square.sqrt().clamp(max=max_weight_norm) / update_square.sqrt()


def _sgd(values, weight, gradient, state, rounded):
    wide, loss_scaling = gradient.dtype, values["loss_scaling"]
    step = gradient + values["weight_decay"] * weight.to(wide)
    if "Accl1___" in state:
        velocity = state["Accl1___"]
        _set(velocity, velocity.to(wide) * values["momentum"] + loss_scaling * step, rounded)
        step = velocity.to(wide) / loss_scaling
    _set(weight, weight.to(wide) - values["lr"] * step, rounded)


def _rmsprop(values, weight, gradient, state, rounded):
    wide = gradient.dtype
    gradient = gradient + values["weight_decay"] * weight.to(wide)
    alpha, square = values["alpha"], state["Accl1___"]
    _set(square, alpha * square.to(wide) + (1.0 - alpha) * gradient * gradient, rounded)
    update = values["lr"] * (gradient / (square.to(wide) + values["eps"]).sqrt())
    if "Accl3___" in state:
        update = state["Accl3___"].copy_(values["momentum"] * state["Accl3___"] + update)
    _set(weight, weight.to(wide) - update, rounded)
