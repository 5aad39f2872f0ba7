"""The graph pass of :func:`fused_norm.compile_options`: additions that the norms' kernels take in.
It sees the forward and the backward graph as Inductor has them, after autograd:

- ``total = a + b`` and ``norm(total)`` become a norm of ``a`` with the residual ``b``, which gives
  total too;
- ``dx + g``, with ``dx`` of ``norm_backward``, becomes the ``dx`` of one that is given ``g`` too;
- ``a @ b + c @ d``, of which ``norm_backward`` is to be given the sum, becomes a matrix product and
  one that adds to its result, in place.

An addition stays where the operators have no such form, and where one of its operands is computed
in the same kernel as the sum, as a dropout's output is: that would have to be stored first. A node
is less than another one that stands behind it in the graph.
"""

import dataclasses
import itertools
import operator

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import fallbacks, lowerings, make_fallback, require_contiguous
from torch._prims_common import make_contiguous_strides_for
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.utils.flop_counter import flop_registry

from fused_norm import _ops

_ADD = torch.ops.aten.add.Tensor
_CLONE = torch.ops.aten.clone.default
_MM = torch.ops.aten.mm.default
_MM_ADDING = torch.ops.aten.addmm_.default
_RESHAPE = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
_CONVERT = torch.ops.prims.convert_element_type.default
make_fallback(_MM_ADDING, require_contiguous, warn=False)  # Inductor calls it as it is


@dataclasses.dataclass(frozen=True)
class FuseResiduals(CustomGraphPass):
    """The pass. All its instances are equal, so that code is not compiled anew for another one."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.target is _ops.norm_forward:
                _fuse_forward(node)
            elif node.target is _ADD:
                _fuse_backward(node)
        if not (config.max_autotune or config.max_autotune_gemm):  # products are chosen one by one
            for node in list(graph.nodes):
                if node.target is _ADD and _is_dy(node):
                    _fuse_products(node)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def _arguments(node: fx.Node) -> dict:
    """All arguments of an operator's node, in the order of its schema."""
    return _ops.call_type(node.target)(*node.args, **node.kwargs)._asdict()


def _same(a, b) -> bool:
    """Of sizes or strides, symbols among them."""
    return statically_known_true(sym_eq(tuple(a), tuple(b)))


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "is_view", False)


def _is_opaque(node: fx.Node) -> bool:
    """Whether Inductor calls it as it is, or it is no operator: what it reads and gives is in
    memory. Others Inductor computes where they are read."""
    if node.target is operator.getitem:
        return _is_opaque(node.args[0])
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return target not in lowerings or target in fallbacks or target.overloadpacket in flop_registry


def _is_stored(node: fx.Node) -> bool:
    """Whether the tensor is in memory in any case."""
    while _is_view(node):
        node = node.args[0]
    return _is_opaque(node) or _is_read_by_opaque(node)


def _is_read_by_opaque(node: fx.Node) -> bool:
    return any(_is_opaque(u) or (_is_view(u) and _is_read_by_opaque(u)) for u in node.users)


def _is_copy(node: fx.Node) -> bool:
    if node.target is not _CLONE or len(node.users) > 1:
        return False
    return _same(node.meta["val"].stride(), node.args[0].meta["val"].stride())


def _addends(total) -> list[fx.Node]:
    """The two operands of a plain sum, if they are tensors of its shape and device; else none. A
    copy for the sum alone, as dropout makes one that drops nothing, is what it copies."""
    if not isinstance(total, fx.Node) or total.target is not _ADD or len(total.args) != 2:
        return []
    if total.kwargs or not all(isinstance(operand, fx.Node) for operand in total.args):
        return []
    operands = [operand.args[0] if _is_copy(operand) else operand for operand in total.args]
    sum_, *values = (node.meta.get("val") for node in (total, *operands))
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.device != sum_.device or not _same(value.shape, sum_.shape):
            return []
    return operands


def _erase(total: fx.Node) -> None:
    """A sum, and the copies that were made for it."""
    operands = set(total.all_input_nodes)
    total.graph.erase_node(total)
    for operand in operands:
        if not operand.users and operand.target is _CLONE:
            total.graph.erase_node(operand)


def _narrow(node: fx.Node) -> fx.Node:
    """The 16-bit tensor that the node converts to fp32, if it does nothing else, or the node."""
    if node.target is _CONVERT and node.args[1] is torch.float32:
        source = node.args[0].meta["val"]
        if source.dtype in (torch.float16, torch.bfloat16):
            return node.args[0]
    return node


def _input_and_residual(total, out_dtype: torch.dtype) -> tuple[fx.Node, fx.Node] | None:
    """The operands of a sum as a norm's kernel adds them: one of the output's dtype to one of the
    sum's."""
    for input, residual in itertools.permutations(_addends(total), 2):
        if input.meta["val"].dtype != out_dtype:
            input = _narrow(input)
        if (
            input.meta["val"].dtype == out_dtype
            and residual.meta["val"].dtype == total.meta["val"].dtype
            and _is_stored(input)
            and _is_stored(residual)
        ):
            return input, residual
    return None


def _fuse_forward(norm: fx.Node) -> None:
    arguments = _arguments(norm)
    total = arguments["input"]
    output, *statistics = norm.meta["val"]
    if arguments["residual"] is not None:
        return
    addends = _input_and_residual(total, output.dtype)
    if addends is None or not _is_contiguous(total):
        return
    if any(user.target is not operator.getitem for user in norm.users):
        return
    # The new node takes the place of the sum.
    if any(node > total for node in norm.all_input_nodes):
        return
    arguments |= {"input": addends[0], "residual": addends[1], "out_dtype": None}  # the input's
    graph = norm.graph
    with graph.inserting_before(total):
        both = graph.call_function(norm.target, tuple(arguments.values()))
        residual_out = graph.call_function(operator.getitem, (both, 1))
    both.meta = {**norm.meta, "val": [output, total.meta["val"], *statistics]}
    both.meta.pop("eager_input_vals", None)  # the strides of other inputs
    residual_out.meta = dict(total.meta)
    for result in list(norm.users):
        index = result.args[1]
        result.args = (both, index if index == 0 else index + 1)
    graph.erase_node(norm)
    total.replace_all_uses_with(residual_out)
    _erase(total)


def _fuse_backward(total: fx.Node) -> None:
    for dx, gradient in itertools.permutations(_addends(total), 2):
        if dx.target is not operator.getitem or dx.args[1] != 0 or len(dx.users) != 1:
            continue
        norm = dx.args[0]
        if norm.target is not _ops.norm_backward or gradient > norm:
            continue
        arguments = _arguments(norm)
        same_dtype = dx.meta["val"].dtype == gradient.meta["val"].dtype
        if arguments["dresidual"] is not None or not same_dtype or not _is_stored(gradient):
            continue
        norm.args, norm.kwargs = tuple((arguments | {"dresidual": gradient}).values()), {}
        norm.meta.pop("eager_input_vals", None)
        total.replace_all_uses_with(dx)
        _erase(total)
        return


def _is_dy(total: fx.Node) -> bool:
    """Whether a norm's backward is given the sum, or further sums of it."""
    while not any(u.target is _ops.norm_backward and u.args[0] is total for u in total.users):
        user, *others = total.users
        if others or user.target not in (_ADD, *_RESHAPE):
            return False
        total = user
    return True


def _additions(product: fx.Node) -> list[fx.Node]:
    """What adds to it in place."""
    return [u for u in product.users if u.target is _MM_ADDING and u.args[0] is product]


def _product(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The matrix product that the node has the elements of in the same order, if nothing else reads
    it, and the views between them."""
    views = []
    while node.target in _RESHAPE:
        views.append(node)
        node = node.args[0]
    readers = len(node.users) - len(_additions(node))
    if node.target is not _MM or readers > 1 or any(len(view.users) > 1 for view in views):
        return None
    return node, views


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta["val"]
    return _same(value.stride(), make_contiguous_strides_for(value.shape))


def _fuse_products(total: fx.Node) -> None:
    products = [_product(addend) for addend in _addends(total)]
    if len(products) != 2 or None in products:
        return
    # The one that something was added to already takes in the other, or the earlier the later.
    products.sort(key=lambda found: (not _additions(found[0]), found[0]))
    (sum_, views), (added, others) = products
    if sum_ is added or _additions(added):
        return
    # Inductor would copy operands that are not contiguous.
    if not all(_is_contiguous(node) for node in (sum_, *added.args)):
        return
    values = [node.meta["val"] for node in (total, sum_, added)]
    if len({value.dtype for value in values}) > 1 or not _same(values[1].shape, values[2].shape):
        return
    graph = total.graph
    last = max((added, *_additions(sum_)))
    with graph.inserting_after(last):
        adding = graph.call_function(_MM_ADDING, (sum_, *added.args))
    adding.meta = dict(added.meta)
    adding.meta.pop("eager_input_vals", None)
    for view in views:  # the outermost first
        adding.append(view)
    total.replace_all_uses_with(views[0] if views else sum_)
    _erase(total)
    for node in (*others, added):
        graph.erase_node(node)
