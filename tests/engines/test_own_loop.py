"""A recipe's optimizer and exchange for a module that is none of ours."""

import itertools

import pytest
import torch
from torch import nn

from common.errors import ConfigError
from engines.own_loop import DistributedOptimizer
from optim.lars import LARS
from tests import world
from tests.tensors import assert_bitwise_equal

LARS_KEYS = {
    "name": "lars",
    "momentum": 0.9,
    "weight_decay": 1e-3,
    "trust_coefficient": 0.01,
    "skip": ["bias"],
}
FLOAT32 = {"weights": "float32", "loss_scale": 128}
HALF = {"weights": "float16", "loss_scale": 128}
TOPK = {"method": "topk", "density": 0.05}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))


def loss_of(module, step, share=slice(None)):
    """Of eight images of noise that are learnt by heart."""
    generator = torch.Generator().manual_seed(step % 2)
    images = torch.randn(8, 3, 8, 8, generator=generator)[share]
    return nn.functional.cross_entropy(module(images), torch.arange(8)[share])


def train(module, sections, steps, share=slice(None), saved=None):
    """The optimizer after some updates, or after some more than were saved."""
    optimizer = DistributedOptimizer(module, sections)
    if saved is not None:
        optimizer.load_state_dict(saved)
    for _ in range(steps):
        optimizer.backward(loss_of(module, optimizer.steps, share))
        assert optimizer.step(lr=1.0)
    return optimizer


def test_one_replica_steps_as_the_torch_optimizer():
    """To float32 rounding: one updates flat buffers, the other a tensor at a time."""
    found = network()
    expected = network()
    vectors = [each for each in expected.parameters() if each.dim() == 1]
    others = [each for each in expected.parameters() if each.dim() > 1]
    groups = [
        {"params": others},
        {"params": vectors, "adapt": False, "weight_decay": 0.0, "lr_scale": 0.5},
    ]
    reference = LARS(groups, lr=1.0, momentum=0.9, weight_decay=1e-3, trust_coefficient=0.01)
    for step in range(4):
        reference.zero_grad()
        loss_of(expected, step).backward()
        reference.step()
    train(found, {"optimizer": {**LARS_KEYS, "skip_lr_scale": 0.5}, "precision": FLOAT32}, 4)
    for one, other in zip(found.parameters(), expected.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_muon_steps_the_weights_between_the_first_and_the_last_layer():
    """AdamW's average of squares shows which parameters it has stepped."""
    module = nn.Sequential(*network()[:3], nn.Linear(16 * 36, 20), nn.Linear(20, 10))
    optimizer = train(module, {"optimizer": {"name": "muon"}, "precision": FLOAT32}, 2)
    squares = optimizer.weights.state_dict()["exp_avg_sq"]
    assert [name for name, each in squares.items() if not each.any()] == ["3.weight"]


class Scaled(nn.Linear):
    def __init__(self, shape):
        super().__init__(6, 10)
        self.scale = nn.Parameter(torch.full(shape, 2.0))

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_single_number_is_skipped_as_a_vector():
    """By `skip: norm`: no decay and no trust ratio."""
    scales = []
    for shape in ((), (1,)):
        module = Scaled(shape)
        for parameter in (module.weight, module.bias):
            nn.init.constant_(parameter, 0.5)
        sections = {
            "optimizer": {**LARS_KEYS, "weight_decay": 0.3, "skip": ["norm"]},
            "precision": FLOAT32,
        }
        optimizer = DistributedOptimizer(module, sections)
        for _ in range(3):
            optimizer.backward(module(torch.ones(2, 6)).square().mean())
            optimizer.step(lr=0.01)
        scales.append(module.scale.detach().reshape(1))
    assert torch.equal(*scales)


def halves(rank, size, sections, steps):
    """The module's weights and the saved state, where each replica has another half of the
    images."""
    module = network(rank)
    optimizer = train(module, sections, steps, slice(4 * rank, 4 * rank + 4))
    return module.state_dict(), optimizer.state_dict(), loss_of(module, 0).item()


@pytest.mark.multiprocess
def test_two_replicas_learn_what_one_learns_of_all_images():
    """Other weights at first, but those of the first replica count.

    To rounding: sums are in another order.
    """
    sections = {"optimizer": LARS_KEYS, "precision": FLOAT32}
    (first, _, _), (second, nothing, _) = world.run(2, halves, sections, 4)
    assert_bitwise_equal(first, second)
    assert nothing == {}
    module = network()
    optimizer = DistributedOptimizer(module, sections, accumulation=2)
    for step in range(4):
        for half in (slice(0, 4), slice(4, 8)):
            optimizer.backward(loss_of(module, step, half))
        optimizer.step(lr=1.0)
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(first[name], weight, rtol=1e-4, atol=1e-6)


EXCHANGES = (TOPK, {"method": "local", "local_steps": 2}, {"bits": 4})


def resumed(rank, size):
    """For each exchange what six updates save, what three more save after three, and the loss."""
    found = []
    share = slice(4 * rank, 4 * rank + 4)
    for exchange in EXCHANGES:
        sections = {"optimizer": LARS_KEYS, "precision": HALF, "exchange": exchange}
        _, whole, loss = halves(rank, size, sections, 6)
        _, saved, _ = halves(rank, size, sections, 3)
        found.append((whole, train(network(7), sections, 3, share, saved).state_dict(), loss))
    return found


@pytest.mark.multiprocess
def test_sparse_local_and_few_bits_learn_and_go_on_bit_for_bit():
    """Half weights and LARS: what is sent of them is the update, which an engine's run does
    likewise."""
    for whole, again, loss in world.run(2, resumed)[0]:
        assert loss < loss_of(network(), 0).item()
        assert len(whole["replicas"]) == len(again["replicas"]) == 2
        assert whole.pop("steps") == again.pop("steps") == 6
        for one, other in zip((*whole.pop("replicas"), whole), (*again.pop("replicas"), again)):
            assert_bitwise_equal(one, other)


def test_a_loop_may_set_gradients_to_none_as_usual():
    """Before each backward pass; the second module's loop does not."""
    modules = [network(), network()]
    for module in modules:
        optimizer = DistributedOptimizer(module, {"optimizer": LARS_KEYS, "precision": HALF})
        for step in range(3):
            if module is modules[0]:
                module.zero_grad()
            optimizer.backward(loss_of(module, step))
            optimizer.step(lr=1.0)
    assert_bitwise_equal(modules[0].state_dict(), modules[1].state_dict())


class Fails(torch.autograd.Function):
    """Whose backward pass runs out of memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("no memory")


def forgetting(rank, size):
    """The weights after two updates, without and with backward passes, whole and failed ones, that
    are forgotten."""
    found = []
    for dtype, forgets in itertools.product((torch.float32, torch.float16), (False, True)):
        module = network().to(dtype)
        optimizer = DistributedOptimizer(
            module, {"optimizer": LARS_KEYS, "precision": HALF}, accumulation=2
        )
        images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for _ in range(2):
            if forgets:
                for failing in (None, 1, 0):
                    # the call that runs out of memory, on the last replica
                    for call in range(2):
                        hidden = module[:-1](images)
                        if call != failing:
                            optimizer.backward(module[-1](hidden).square().mean())
                            continue
                        with pytest.raises(torch.OutOfMemoryError):
                            optimizer.backward(
                                module[-1](
                                    Fails.apply(hidden) if rank == size - 1 else hidden
                                ).mean()
                            )
                            assert rank != size - 1
                            raise torch.OutOfMemoryError("as the other replica tells")
                    optimizer.zero_grad()
            for _ in range(2):
                optimizer.backward(module(images).sum())
            assert optimizer.step(lr=0.1)
        found.append(module.state_dict())
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [1, 2])
def test_backward_passes_that_are_forgotten_change_no_bit(size):
    """The exchange has begun within the last of them. Half gradients are no views of the buffer."""
    for found in world.run(size, forgetting) if size > 1 else [forgetting(0, 1)]:
        for expected, other in zip(found[::2], found[1::2]):
            assert_bitwise_equal(other, expected)


def test_an_update_without_a_pass_that_failed_is_refused():
    """The pass has left gradients of the last layers, and the exchange may have begun before the
    last pass."""
    module = network()
    optimizer = DistributedOptimizer(module, {}, accumulation=2)
    images = torch.randn(8, 3, 8, 8)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.backward(module[-1](Fails.apply(module[:-1](images))).mean())
    for _ in range(2):
        optimizer.backward(module(images).mean())
    with pytest.raises(ValueError, match="of 3 backward passes 2 came to their end"):
        optimizer.step(lr=0.1)
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.backward(module(images).mean())
    assert optimizer.step(lr=0.1)


def subgroups(rank, size, sections):
    """Two replicas train in each of two groups, and those of the second make an optimizer more; the
    weights, and whether there is a saved state."""
    groups = [torch.distributed.new_group(each) for each in ([0, 2], [1, 3])]
    with pytest.raises(ConfigError):
        DistributedOptimizer(network(), sections, groups[1 - rank % 2])
    if rank % 2:
        DistributedOptimizer(network(), sections, groups[1])
    module = network(rank)
    optimizer = DistributedOptimizer(module, sections, groups[rank % 2])
    for step in range(2):
        optimizer.backward(loss_of(module, step, slice(2 * rank, 2 * rank + 2)))
        optimizer.step(lr=1.0)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved or None)
    return module.state_dict(), bool(saved)


@pytest.mark.multiprocess
def test_a_group_may_be_a_part_of_all_processes():
    found = world.run(4, subgroups, {"optimizer": LARS_KEYS, "exchange": TOPK})
    assert [saves for _, saves in found] == [True, True, False, False]
    for one, other in ((0, 2), (1, 3)):
        assert_bitwise_equal(found[one][0], found[other][0])
    assert any(not torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])


class Remembering(nn.Module):
    """A layer with buffers of many dtypes and an extra state."""

    DTYPES = (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
    )

    def __init__(self, number):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.number = number
        for dtype in self.DTYPES:
            self.register_buffer(str(dtype).replace(".", "_"), torch.full((2, 3), number).to(dtype))
        self.register_buffer("count", torch.tensor(number))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("turned", torch.full((3, 2), float(number)).t())
        self.register_buffer("conjugate", torch.full((2,), complex(number, number)).conj())
        self.register_buffer("own", torch.tensor(number), persistent=False)

    def get_extra_state(self):
        return {"number": self.number}

    def set_extra_state(self, state):
        self.number = state["number"]


class WithoutSetter(nn.Linear):
    def get_extra_state(self):
        return 1


class Unpicklable(WithoutSetter):
    def get_extra_state(self):
        return lambda: 1

    def set_extra_state(self, state): ...


def frozen(rank):
    module = network()
    module[0].bias.requires_grad_(rank == 0)
    return module


def with_buffer(buffer):
    module = network()
    module.register_buffer("table", buffer)
    return module


# Of a name: what each rank gives, and what all are told.
DIFFERENT = {
    "name": (lambda rank: nn.Sequential(*[nn.ReLU()] * rank, nn.Linear(4, 3)), "0.weight is float32 [3, 4], trained"),
    "shape": (lambda rank: nn.Linear(4 + rank, 3), "weight is float32 [3, 4], trained on replica 0 and float32 [3, 5]"),
    "dtype": (lambda rank: nn.Linear(4, 3, dtype=(torch.float32, torch.float16)[rank]), "weight is float32 [3, 4]"),
    "buffer": (lambda rank: with_buffer(torch.zeros(2, dtype=(torch.int16, torch.int32)[rank])), "table is int16 [2]"),
    "frozen": (frozen, "0.bias is float32 [16], trained on replica 0 and float32 [16], not trained on replica 1"),
    "refused": (lambda rank: nn.Linear(4, 3).requires_grad_(rank == 0), "no parameter of the module requires"),
    "settings": (lambda rank: (network(), {"accumulation": 1 + rank}), "accumulation is 1 on replica 0 and 2 on"),
    "sections": (
        lambda rank: (network(), {"sections": {"optimizer": {"momentum": 0.5 + rank / 4}}}),
        "optimizer.momentum is 0.5 on replica 0 and 0.75 on replica 1; make the same module with the same settings",
    ),
    "setter": (lambda rank: WithoutSetter(4, 3), "the module does not take its extra state (_extra_state): "),
    "pickle": (lambda rank: Unpicklable(4, 3), "_extra_state: the extra state of a module must be picklable"),
    "sparse": (lambda rank: with_buffer(torch.eye(3).to_sparse()), "table is a tensor that is sparse"),
    "expanded": (lambda rank: with_buffer(torch.zeros(1).expand(3)), "table is an expanded tensor"),
}  # fmt: skip


def in_bytes(module):
    """The dtypes and bytes of a module's tensors: torch's pickles do not know all dtypes."""
    tensors = {
        name: each.resolve_conj()
        for name, each in module.state_dict().items()
        if name != "_extra_state"
    }
    return {
        name: (str(each.dtype), each.reshape(-1).view(torch.uint8).tolist())
        for name, each in tensors.items()
    }


def begins(rank, size):
    """The state of a module that both take, and why the others are refused."""
    module = Remembering(1 + rank)
    DistributedOptimizer(module, {})
    reasons = {}
    for name, (make, _) in DIFFERENT.items():
        made = make(rank)
        other, settings = made if isinstance(made, tuple) else (made, {})
        try:
            DistributedOptimizer(other, **{"sections": {}, **settings})
        except ConfigError as error:
            reasons[name] = str(error)
    return in_bytes(module), module.number, int(module.own), reasons


@pytest.mark.multiprocess
def test_replicas_begin_with_the_first_ones_state_of_any_dtype_or_are_told_what_differs():
    (first, _, _, reasons), (second, number, own, others) = world.run(2, begins)
    assert first == second
    buffers = {
        name: value
        for name, value in in_bytes(Remembering(1)).items()
        if not name.startswith("layer.")
    }
    assert len(buffers) == len(Remembering.DTYPES) + 4
    assert {name: second[name] for name in buffers} == buffers
    assert (number, own) == (1, 2), "buffers that are not persistent remain each replica's own"
    for name, (_, words) in DIFFERENT.items():
        assert words in reasons[name], name
        assert words in others[name], name


def test_an_update_with_an_infinite_gradient_is_left_out():
    module = network()
    sections = {"optimizer": LARS_KEYS, "precision": {**HALF, "dynamic_loss_scale": True}}
    optimizer = DistributedOptimizer(module, sections)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    optimizer.backward(loss_of(module, 0) * float("inf"))
    assert not optimizer.step(lr=1.0)
    assert_bitwise_equal(module.state_dict(), before)
    assert optimizer.state_dict()["loss_scale"]["scale"] == 64
    optimizer.backward(loss_of(module, 0))
    assert optimizer.step(lr=1.0)


def same(module):
    return module


@pytest.mark.parametrize(
    ("sections", "change", "words"),
    [
        ({"model": {}}, same, "model is none of the sections"),
        ({"optimizer": "lars"}, same, "dictionary of dictionaries"),
        ({"optimizer": {"momentum": torch.tensor(0.9)}}, same, "as in YAML"),
        ({"exchange": {"order": "tree"}}, same, "order=fast"),
        ({"exchange": {"desnity": 0.1}}, same, "desnity"),
        ({"exchange": {"method": "auto"}}, same, "name a method"),
        (
            {"exchange": {**TOPK, "density_warmup": [0.25]}},
            same,
            "count epochs; give steps_per_epoch=",
        ),
        (
            {"exchange": {"method": "local", "dense_epochs": 0.5}},
            same,
            "count epochs; give steps_per_epoch=",
        ),
        ({"precision": {"compute": "bfloat16"}}, same, "leave it out"),
        (
            {"optimizer": {"name": "adamw"}, "exchange": {**TOPK, "compress": "update"}},
            same,
            "compress=gradient",
        ),
        ({}, lambda module: module[0].double(), "one dtype"),
        ({}, lambda module: module.double(), "float64"),
        ({}, lambda module: module.requires_grad_(False), "requires a gradient"),
    ],
)
def test_sections_and_modules_that_cannot_be(sections, change, words):
    module = network()
    change(module)
    with pytest.raises(ConfigError, match=words):
        DistributedOptimizer(module, sections)


def test_epochs_have_the_updates_that_are_given():
    """Without a key that counts them none are needed."""
    sections = {"exchange": {**TOPK, "density_warmup": [1.0]}, "precision": FLOAT32}
    module = network()
    optimizer = DistributedOptimizer(module, sections, steps_per_epoch=1)
    moved = []
    for _ in range(2):
        before = module[3].weight.clone()
        optimizer.backward(loss_of(module, 0))
        optimizer.step(lr=1.0)
        moved.append((module[3].weight != before).float().mean().item())
    assert moved[0] > 0.5 > moved[1] > 0


def test_what_is_called_wrongly():
    module = network()
    with pytest.raises(ConfigError, match="whole number"):
        DistributedOptimizer(module, {}, accumulation=1.5)
    optimizer = DistributedOptimizer(module, {}, accumulation=2)
    optimizer.backward(loss_of(module, 0))
    with pytest.raises(ValueError, match="needs 2 backward passes, there were 1; zero_grad"):
        optimizer.step(lr=1.0)
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.backward(loss_of(module, 0))
    for lr in (float("nan"), -1.0):
        with pytest.raises(ValueError, match="learning rate"):
            optimizer.step(lr)
    assert optimizer.step(lr=1.0)
    saved = optimizer.state_dict()
    del saved["loss_scale"]
    with pytest.raises(ValueError, match="loss_scale is missing"):
        optimizer.load_state_dict(saved)
