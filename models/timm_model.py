"""Any model of timm as a list of named blocks.

timm's models are modules with a `forward` of their own, which calls their parts in turn. torch.fx
writes down these calls, and the list is cut between two of them wherever a single tensor is all
that is passed on. So a model that timm adds tomorrow needs nothing here.

What would make a run inexact is replaced or refused: stochastic depth and dropout draw by key, and
batch normalisation keeps its statistics as ours does.
"""

from __future__ import annotations

import functools
import operator
import re
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Set, Tuple

import torch
from timm.layers import drop as timm_drop
from torch import fx, nn

from common.errors import ConfigError
from models import timm_creation, timm_depth
from models.base import FAMILIES, BlockList, Family
from models.meta import without_memory
from models.normalization import BatchNormAct
from models.preprocess import Preprocess
from models.shapes import BlockShape
from models.stochastic import Draws, Dropout
from recipe import network, timm_models
from recipe.randomness import key
from recipe.settled import image_size

# Blocks of several of timm's modules; a block of one module has that module's name.
OPENING = "opening"
CLOSING = "closing"
JOINT = "joint"
WHOLE = "whole"  # a model that cannot be cut
_PREFIX = re.compile(rf"(?:{OPENING}|{CLOSING}|{WHOLE}|{JOINT}\.\d+)\.")
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_MODEL = "model"  # its name in `_Called`


@FAMILIES.implements(network.Timm)
class TimmFamily(Family):
    """Blocks: `preprocess`, then parts of timm's model under timm's names, as `layer1.0` of a
    ResNet or `stages.2` of a ConvNeXt, and between them what timm's `forward` does itself:
    `opening`, `joint.2`, `closing`.

    Parameters have timm's names; in the blocks between parts, behind the block's name.
    """

    @staticmethod
    def build(section: network.Timm, seed: int) -> BlockList:
        """Build timm's model, with weights by timm's rules, drawn by `seed`: see `Family`.

        Raises:
            ConfigError: timm's model does not take a key of the section, or has layers that draw
                by themselves or keep state.
        """
        draws = Draws(seed)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key("weights", seed) >> 1)
            model = _exact_model(section, draws)
        blocks: List[Tuple[str, nn.Module]] = []
        blocks.append(("preprocess", Preprocess(section.mean, section.std)))
        blocks += _cut(model, _plan(section))
        for _, block in blocks:
            timm_depth.begin_passes(block)
        result = BlockList(blocks)
        result.draws = draws
        return result

    @staticmethod
    def timm_name(name: str) -> str:
        """Return timm's `name` of a parameter or buffer."""
        return _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name

    @classmethod
    def depths(cls, section: network.Timm) -> Dict[str, int]:
        """Return the numbers of timm's groups of parameters, by which timm decays rates."""
        from timm.models import group_parameters

        with without_memory():
            # `group_matcher` is of timm's models alone.
            model: Any = _exact_model(section, Draws(0))
        groups = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
        return {name: groups[cls.timm_name(name)] for name in super().depths(section)}

    @staticmethod
    def classifier(section: network.Timm) -> str:
        """Return timm's name of the classifier: see `Family.classifier`."""
        return timm_models.architecture(section.architecture).classifier


def shapes(section: network.Timm, pixels: int) -> Dict[str, BlockShape]:
    """Return the blocks of a model as numbers: see `models.shapes.blocks`.

    Operations are counted by torch, saved elements by what autograd asks to keep, on a device
    without memory.

    Args:
        section: of the model.
        pixels: a side of the images.

    Raises:
        ConfigError: see `TimmFamily.build`; or the model does not take images of this size.
    """
    return dict(_shapes(section.model_dump_json(), pixels))


@functools.lru_cache(maxsize=None)
def _shapes(text: str, pixels: int) -> Dict[str, BlockShape]:
    """Return `shapes` of the section that is this JSON: a start asks for them several times."""
    section = network.Timm.model_validate_json(text)
    with without_memory():
        model = TimmFamily.build(section, seed=0)
    x = torch.empty(timm_creation.TRACED_IMAGES, 3, pixels, pixels, device="meta")
    numbers = {"preprocess": BlockShape(0, 0, 0, 0, output=3 * pixels**2)}
    for name in model.names[1:]:
        try:
            numbers[name], x = _count(model.block(name), x)
        except Exception as error:  # timm's models fail in many ways where a size does not fit
            raise timm_creation.wrong_size(section, pixels, error) from None
    return numbers


def _exact_model(section: network.Timm, draws: Draws) -> nn.Module:
    """Return timm's model without draws and statistics of its own: see `_make_exact`."""
    model = timm_creation.create(section)
    _make_exact(model, section, draws)
    return model


# What makes a model exact --------------------------------------------------------------------


class _BatchNorm(BatchNormAct):
    """Batch normalisation in the place of timm's, which may be followed by layers of its own."""

    def __init__(self, norm: nn.BatchNorm2d, momentum: float):
        """Take over the parameters, statistics and layers of timm's `norm`."""
        super().__init__(norm.num_features, norm.eps, momentum, apply_act=False)
        # The very tensors: timm has filled them.
        self._parameters.update(norm._parameters)
        self._buffers.update(
            running_mean=norm._buffers["running_mean"],
            running_var=norm._buffers["running_var"],
        )
        self.drop = getattr(norm, "drop", nn.Identity())
        self.act = getattr(norm, "act", nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised and activated `x`, [N, C, H, W]."""
        return self.act(self.drop(super().forward(x)))


class _DroppedLinear(nn.Linear):
    """A classifier behind dropout, with the parameters of timm's classifier."""

    def __init__(self, linear: nn.Linear, dropout: Dropout):
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, [N, classes], for `x`, [N, features]."""
        return super().forward(self.dropout(x))


def _make_exact(model: nn.Module, section: network.Timm, draws: Draws) -> None:
    """Replace layers that draw from torch's generator or keep statistics, or refuse them.

    Args:
        model: timm's, which is changed.
        section: of the recipe.
        draws: of the model.

    Raises:
        ConfigError: names a layer that cannot be made exact.
    """
    # Counted only where something is dropped: it takes a second model, and a pass of it.
    calls: Mapping[str, int] = {}
    if any(_drop_path_rate(module) for module in model.modules()):
        calls = timm_depth.calls(section)
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            name = f"{parent_name}.{child_name}".lstrip(".")
            rate = _drop_path_rate(child)
            if rate:
                layer = timm_depth.layer(rate, name, draws, calls.get(name, 1))
                setattr(parent, child_name, layer)
            elif isinstance(child, nn.BatchNorm2d) and child.affine:
                assert section.norm_momentum is not None  # filled in by the architecture
                setattr(parent, child_name, _BatchNorm(child, section.norm_momentum))
    for module in model.modules():
        # A block that begins by changing its input would change what the block before it keeps.
        if vars(module).get("inplace"):
            vars(module)["inplace"] = False
    if section.dropout:
        _drop_before_classifier(model, section, draws)
    for fault in _inexact(model):
        raise ConfigError(f"model.architecture {section.architecture}: {fault}; use another model")


def _drop_path_rate(module: nn.Module) -> float:
    """Return the rate of a module that is timm's stochastic depth, else 0."""
    if isinstance(module, timm_drop.DropPath):
        return module.drop_prob or 0.0
    return 0.0


def _drop_before_classifier(model: nn.Module, section: network.Timm, draws: Draws) -> None:
    name = timm_models.architecture(section.architecture).classifier
    classifier = model.get_submodule(name)
    if not isinstance(classifier, nn.Linear):
        kind = type(classifier).__name__
        fault = f"the classifier of timm's {section.architecture} is no Linear but a {kind}"
        raise ConfigError(f"model.dropout {section.dropout:g}: {fault}; use model.dropout=0")
    parent, _, last = name.rpartition(".")
    dropout = Dropout(section.dropout, "classifier", draws, per_row=classifier.in_features)
    setattr(model.get_submodule(parent), last, _DroppedLinear(classifier, dropout))


def _inexact(model: nn.Module) -> Iterator[str]:
    """Yield what would make a run inexact: draws without a key, and state that moves by itself."""
    persistent = model.state_dict().keys() - {name for name, _ in model.named_parameters()}
    for module_name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _DROPOUTS) and module.p:
            yield f"{module_name} ({kind}) drops activations by torch's generator"
        if isinstance(module, (timm_drop.DropPath, timm_drop.DropBlock2d)) and module.drop_prob:
            yield f"{module_name} ({kind}) drops activations by torch's generator"
        # Ours moves its statistics in a way that engines know and can repeat.
        if isinstance(module, BatchNormAct):
            continue
        for buffer in module._buffers:
            name = f"{module_name}.{buffer}".lstrip(".")
            if name in persistent:
                yield f"{module_name} ({kind}) keeps {buffer}, which may change as it runs"


# Cutting ------------------------------------------------------------------------------------


class _Called(nn.Module):
    """Calls a model with images alone, so that its other arguments have their defaults."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's logits for `x`, [N, 3, H, W]."""
        return self.model(x)


class _Tracer(fx.Tracer):
    """Writes down the calls of a model's own `forward`, and of its lists; all else is a leaf."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        """Return whether the calls within `module` stay unknown."""
        return name != _MODEL and type(module) is not nn.Sequential


class _Kinds(fx.Interpreter):
    """Runs a graph, and takes note of the nodes whose value is one tensor."""

    def __init__(self, model: nn.Module, graph: fx.Graph):
        super().__init__(fx.GraphModule(model, graph))
        self.tensors: Set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Run the node `n`."""
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.tensors.add(n.name)
        return value


class _Segment(NamedTuple):
    """Nodes of a graph that follow one another.

    part: the part of the model that they call, if they are a single call of one, else "".
    """

    nodes: List[fx.Node]
    part: str


def _plan(section: network.Timm) -> List[_Segment]:
    """Return the segments of a section's model; none where it cannot be cut.

    They are found on a copy without memory, as the model may be large and its images, too.
    """
    with torch.device("meta"):
        model = _exact_model(section, Draws(0))
        graph = _trace(model)
        if graph is None:
            return []
        pixels = image_size(section)
        try:
            tensors = _tensors(model, graph, pixels)
        except Exception:
            # Either the model does not take this size, or what torch.fx has written down cannot be
            # called, as where it passes lists (HRNet): then the model stays whole.
            _check_takes(model, section, pixels)
            return []
    images = next(node for node in graph.nodes if node.op == "placeholder")
    segments = _joined(model, _segments(model, graph), images, tensors)
    return segments if len(segments) > 1 else []


def _cut(model: nn.Module, segments: Sequence[_Segment]) -> List[Tuple[str, nn.Module]]:
    """Return the blocks of a model, (name, block), in running order.

    Args:
        model: timm's, made exact.
        segments: of such a model, from `_plan`.
    """
    if not segments:
        return [(WHOLE, model)]
    blocks = []
    for number, segment in enumerate(segments):
        if segment.part:
            blocks.append((segment.part, model.get_submodule(segment.part)))
            continue
        name = f"{JOINT}.{number}"
        if number == 0:
            name = OPENING
        if number == len(segments) - 1:
            name = CLOSING
        blocks.append((name, _module_of(model, segment)))
    return blocks


def _trace(model: nn.Module) -> fx.Graph | None:
    """Return the calls of a model's `forward`; None where they depend on the input's values, or
    differ between training and evaluation.
    """
    called = _Called(model)
    try:
        evaluated = _Tracer().trace(called.eval())
        trained = _Tracer().trace(called.train())
    except Exception:  # what torch.fx cannot follow fails in many ways
        return None
    finally:
        model.train()
    if str(trained) != str(evaluated):
        return None
    # Blocks are made of the model itself, which does not know the name within the wrapper.
    for node in trained.nodes:
        if node.op in ("call_module", "get_attr"):
            node.target = node.target[len(f"{_MODEL}.") :]
    return trained


def _segments(model: nn.Module, graph: fx.Graph) -> List[_Segment]:
    """Divide the graph of a model into calls of its parts, and what lies between them."""
    segments: List[_Segment] = []
    for node in graph.nodes:
        # Reads of parameters are copied to where they are used: see `_module_of`.
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if _calls_part(model, node):
            segments.append(_Segment([node], str(node.target)))
        elif segments and not segments[-1].part:
            segments[-1].nodes.append(node)
        else:
            segments.append(_Segment([node], ""))
    return segments


def _calls_part(model: nn.Module, node: fx.Node) -> bool:
    """Return whether a node calls a part of a model, with one argument.

    Parts are members of lists, as `blocks.3`, and modules that are made of others.
    """
    if node.op != "call_module":
        return False
    name = str(node.target)
    if len(node.args) != 1 or any(value is not None for value in node.kwargs.values()):
        return False
    if name.rpartition(".")[2].isdigit():
        return True
    layers = model.get_submodule(name).children()
    return any(next(layer.parameters(), None) is not None for layer in layers)


def _check_takes(model: nn.Module, section: network.Timm, pixels: int) -> None:
    """Raise ConfigError where a model does not take images of so many pixels a side."""
    images = torch.zeros(timm_creation.TRACED_IMAGES, 3, pixels, pixels, device="meta")
    try:
        with torch.no_grad():
            model(images)
    except Exception as error:  # timm's models fail in many ways where a size does not fit
        raise timm_creation.wrong_size(section, pixels, error) from None


def _tensors(model: nn.Module, graph: fx.Graph, pixels: int) -> Set[str]:
    """Return the names of the nodes whose value is one tensor."""
    images = torch.zeros(timm_creation.TRACED_IMAGES, 3, pixels, pixels, device="meta")
    kinds = _Kinds(model, graph)
    with torch.no_grad():
        kinds.run(images)
    return kinds.tensors


def _joined(
    model: nn.Module,
    segments: List[_Segment],
    images: fx.Node,
    tensors: Set[str],
) -> List[_Segment]:
    """Join segments between which more than one tensor is passed, or that share weights."""
    segment_of = {}
    for number, segment in enumerate(segments):
        for node in segment.nodes:
            segment_of[node] = number
    # By segment, the values that enter it or pass it by.
    crossed: List[Set[fx.Node]] = [set() for _ in segments]
    for node in (images, *segment_of):
        # A parameter that is read is no value that is passed on.
        last = max((segment_of.get(user, len(segments)) for user in node.users), default=-1)
        for number in range(segment_of.get(node, -1) + 1, min(last, len(segments) - 1) + 1):
            crossed[number].add(node)
    shared = _shared(model, segments, segment_of)

    # The model can be cut where the last value before is a tensor, and all that passes.
    joined = [segments[0]]
    for number in range(1, len(segments)):
        passed = segments[number - 1].nodes[-1]
        is_alone = crossed[number] == {passed}
        if is_alone and passed.name in tensors and number not in shared:
            joined.append(segments[number])
        else:
            joined[-1] = _Segment([*joined[-1].nodes, *segments[number].nodes], "")
    return joined


def _shared(
    model: nn.Module,
    segments: Sequence[_Segment],
    segment_of: Dict[fx.Node, int],
) -> Set[int]:
    """Return the segments that cannot be cut off from those before, which use a module or a
    parameter of them.
    """
    # By the identity of modules and parameters: tied weights have several names.
    users: Dict[int, List[int]] = {}
    for segment in segments:
        for node in segment.nodes:
            used: List[object] = []
            if node.op == "call_module":
                module = model.get_submodule(str(node.target))
                used = [module, *module.parameters()]
            for read in node.all_input_nodes:
                if read.op == "get_attr":
                    used.append(operator.attrgetter(str(read.target))(model))
            for each in used:
                users.setdefault(id(each), []).append(segment_of[node])
    shared: Set[int] = set()
    for numbers in users.values():
        shared.update(range(min(numbers) + 1, max(numbers) + 1))
    return shared


def _module_of(model: nn.Module, segment: _Segment) -> fx.GraphModule:
    """Return a segment as a module, which shares what it calls with the model.

    Args:
        model: of the graph.
        segment: of the graph; all that enters it from outside is one value.
    """
    graph = fx.Graph()
    entering = graph.placeholder("x")
    copies: Dict[fx.Node, fx.Node] = {}

    def copied(used: fx.Node) -> fx.Node:
        """Return the segment's node for a node of the model's graph."""
        if used.op == "get_attr" and used not in copies:
            copies[used] = graph.node_copy(used)
        # What is neither read nor computed here is the one value that enters.
        return copies.get(used, entering)

    for node in segment.nodes:
        for used in node.all_input_nodes:
            copied(used)  # what is read must come before the node that reads it
        copies[node] = graph.node_copy(node, copied)
    graph.output(copies[segment.nodes[-1]])
    return fx.GraphModule(model, graph)


# Counting -------------------------------------------------------------------------------------


def _count(block: nn.Module, x: torch.Tensor) -> Tuple[BlockShape, torch.Tensor]:
    """Count a block's numbers for one image.

    Args:
        block: on the meta device.
        x: its input, [timm_creation.TRACED_IMAGES, ...].

    Returns:
        The numbers, and the block's output.
    """
    # Not in torch 2.0: see `timm_creation.create`.
    from torch.utils.flop_counter import FlopCounterMode

    from models.costs import saved_bytes

    x = x.detach().requires_grad_()
    counter = FlopCounterMode(display=False)
    with saved_bytes(block) as saved, counter:
        output = block(x)
    parameters = list(block.parameters())
    vectors = [parameter.numel() for parameter in parameters if parameter.dim() <= 1]
    # Operations become multiply-adds, and bytes of float32 elements; all of one image.
    shape = BlockShape(
        multiply_adds=counter.get_total_flops() // 2 // timm_creation.TRACED_IMAGES,
        parameters=sum(parameter.numel() for parameter in parameters),
        vectors=sum(vectors),
        saved=sum(saved.values()) // 4 // timm_creation.TRACED_IMAGES,
        output=output.numel() // timm_creation.TRACED_IMAGES,
        layers=len(parameters) - len(vectors),
    )
    return shape, output
