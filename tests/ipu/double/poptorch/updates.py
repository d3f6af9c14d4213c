"""What the device does to one parameter in an update: LAMB, SGD, RMSprop, and rounding to float16.

All take a float32 gradient from which loss scale and counts are already gone, change the weight and the state in
place, and compute in float32 but where PopART holds a result in float16.

Sources: PopART 3.4, willow/include/popart/adam.hpp, sgd.hpp, adaptive.hpp; willow/src/popx/op/adamupdaterx.cpp,
adamvarupdatex.cpp, accumulatex.cpp, rmspropupdaterx.cpp.
"""

import torch

# Of state tensors, before the parameter's name (willow/include/popart/tensornames.hpp).
PREFIXES = ("Accl1___", "Accl2___", "Accl3___", "Step___")


def nearest(values, dtype):
    """Rounds float32 to the nearest of dtype, ties to even."""
    return values.to(dtype)


def stochastic(values, dtype):
    """Rounds float32 to one of the two neighbours in float16, right on average; torch's generator draws."""
    if dtype == torch.float32:
        return values.clone()
    _, exponent = torch.frexp(values)
    # Eleven significant bits; below 2^-14 the spacing of float16 stays 2^-24.
    spacing = torch.ldexp(torch.ones_like(values), (exponent - 11).clamp(min=-24))
    return ((values / spacing + torch.rand_like(values)).floor() * spacing).to(dtype)


def new_state(kind, values, settings, weight):
    """{prefix: tensor} of a parameter's state before the first update."""
    first, second = _state_types(settings)
    momentum, constant = values.get("momentum", (0.0, True))
    has_momentum = momentum != 0 or not constant
    if kind.startswith("LAMB"):
        state = {
            "Accl1___": torch.zeros(weight.shape, dtype=first),
            "Accl2___": torch.zeros(weight.shape, dtype=second),
        }
        if kind == "LAMB":
            state["Step___"] = torch.zeros(())
        return state
    if kind.startswith("SGD"):
        return {"Accl1___": torch.zeros(weight.shape, dtype=first)} if has_momentum else {}
    initial = 1.0 if settings.globals["use_tf_variant"] else 0.0
    state = {"Accl1___": torch.full(weight.shape, initial, dtype=first)}
    if kind == "RMSPROP_CENTERED":
        state["Accl2___"] = torch.zeros(weight.shape, dtype=second)
    if has_momentum:
        state["Accl3___"] = torch.zeros(weight.shape)
    return state


def _state_types(settings):
    types = settings.globals
    if "velocity_accum_type" in types:
        return types["velocity_accum_type"], torch.float32
    return types["first_order_momentum_accum_type"], types["second_order_momentum_accum_type"]


def apply(settings, values, weight, gradient, state, rounded):
    """One update of one parameter.

    Args:
        settings: attributes.Settings.
        values: {name: (value, constant)} of the parameter's group.
        weight: float16 or float32; changed in place.
        gradient: float32, of weight's shape.
        state: as of new_state; changed in place.
        rounded: nearest or stochastic.
    """
    values = {name: value for name, (value, _) in values.items()}
    if settings.kind.startswith("LAMB"):
        _lamb(settings.kind == "LAMB", values, weight, gradient, state, rounded)
    elif settings.kind == "SGD2":
        _sgd(values, weight, gradient, state, settings.loss_scaling[0], rounded)
    elif settings.kind.startswith("RMSPROP"):
        _rmsprop(settings.globals["use_tf_variant"], values, weight, gradient, state, rounded)
    else:
        raise NotImplementedError(f"the double does not compute {settings.kind}")


def _set(target, values, rounded):
    target.copy_(rounded(values, target.dtype))


def _lamb(bias_correction, values, weight, gradient, state, rounded):
    first, second = state["Accl1___"], state["Accl2___"]
    beta1, beta2 = values["beta1"], values["beta2"]
    _set(first, beta1 * first.float() + (1.0 - beta1) * gradient, rounded)
    _set(second, beta2 * second.float() + (1.0 - beta2) * gradient * gradient, rounded)
    mean, square = first.float(), second.float()
    if bias_correction:
        state["Step___"] += 1
        mean = mean / (1.0 - beta1 ** state["Step___"])
        square = square / (1.0 - beta2 ** state["Step___"])
    # The first moment takes the second's type, then the quotient, the decay and their sum the weight's.
    mean = rounded(mean, second.dtype).float()
    update = rounded(mean / (square.sqrt() + values["eps"]), weight.dtype).float()
    if values["weight_decay"]:
        decay = rounded(values["weight_decay"] * weight.float(), weight.dtype).float()
        update = rounded(update + decay, weight.dtype).float()
    _set(weight, weight.float() - values["lr"] * _trust(values["max_weight_norm"], weight, update) * update, rounded)


def _trust(max_weight_norm, weight, update):
    """min(||w||, max) / ||u||; 1 where any of the three is 0."""
    weight_square, update_square = weight.float().square().sum(), update.square().sum()
    if max_weight_norm == 0 or weight_square == 0 or update_square == 0:
        return 1.0
    return weight_square.sqrt().clamp(max=max_weight_norm) / update_square.sqrt()


def _sgd(values, weight, gradient, state, loss_scaling, rounded):
    damped = 1.0 - values["dampening"]
    decayed = gradient + values["weight_decay"] * weight.float()
    if "Accl1___" not in state:
        _set(weight, weight.float() - values["lr"] * damped * decayed, rounded)
        return
    # The velocity is kept a factor loss_scaling larger than torch's.
    velocity = state["Accl1___"]
    _set(velocity, velocity.float() * values["momentum"] + damped * loss_scaling * decayed, rounded)
    step = velocity.float() / loss_scaling
    if values["nesterov"]:
        step = decayed + values["momentum"] * step
    _set(weight, weight.float() - values["lr"] * step, rounded)


def _rmsprop(tensorflow, values, weight, gradient, state, rounded):
    gradient = gradient + values["weight_decay"] * weight.float()
    alpha, square = values["alpha"], state["Accl1___"]
    _set(square, alpha * square.float() + (1.0 - alpha) * gradient * gradient, rounded)
    variance = square.float()
    if "Accl2___" in state:
        mean = state["Accl2___"]
        _set(mean, alpha * mean.float() + (1.0 - alpha) * gradient, rounded)
        variance = variance - mean.float().square()
    if tensorflow:
        update = gradient / (variance + values["eps"]).sqrt()
    else:
        update = gradient / (variance.sqrt() + values["eps"])
    if "Accl3___" not in state:
        update = values["lr"] * update
    else:
        momentum = state["Accl3___"]
        momentum.copy_(values["momentum"] * momentum + (values["lr"] * update if tensorflow else update))
        update = momentum if tensorflow else values["lr"] * momentum
    _set(weight, weight.float() - update, rounded)
