"""Where ONNX Runtime computes several operators in one pass: a cut there is correct, but rounds differently and costs time.

These are hints that make cuts bit-exact in practice; the proof of the chain, not this module, decides whether a cut is right.
"""

from __future__ import annotations

from controller.models.graph import Graph

_FUSED_WITH_BEFORE = frozenset(
    [
        "Add",
        "BatchNormalization",
        "Clip",
        "Div",
        "Elu",
        "Erf",
        "Gelu",
        "GlobalAveragePool",
        "HardSigmoid",
        "HardSwish",
        "LayerNormalization",
        "LeakyRelu",
        "Mul",
        "ReduceMean",
        "Relu",
        "Sigmoid",
        "SkipLayerNormalization",
        "Softmax",
        "Sub",
        "Tanh",
    ]
)
"""The runtime computes these in the same pass as what they read, or in its memory layout, if nothing else reads it."""


def fused_values(graph: Graph, order: tuple[int, ...]) -> frozenset[str]:
    """Values that the optimised whole model never makes: all their readers are computed together with their producer.

    A cut there is correct, but it rounds differently and costs a pass over memory.
    """
    readers: dict[str, list[int]] = {}
    for at in order:
        for name in graph.reads[at]:
            readers.setdefault(name, []).append(at)
    fused: set[str] = set()

    def joins(at: int) -> bool:
        node = graph.nodes[at]
        return node.op_type in _FUSED_WITH_BEFORE or (node.op_type == "Identity" and not fused.isdisjoint(node.output))

    for at in reversed(order):
        fused.update(name for name in graph.nodes[at].output if name in readers and all(map(joins, readers[name])))
    return frozenset(fused)


def fused_activations(graph: Graph) -> frozenset[str]:
    """Results of HardSwish, as one operator or as x * HardSigmoid(x).

    The runtime computes them inside the convolution before, but not where they leave a graph: there they cost two more passes.
    """
    gates = {node.output[0]: node.input[0] for node in graph.nodes if node.op_type == "HardSigmoid"}
    found = {node.output[0] for node in graph.nodes if node.op_type == "HardSwish"}
    for node in graph.nodes:
        if node.op_type == "Mul" and any(gates.get(gate) == x for x, gate in (node.input, list(node.input)[::-1])):
            found.add(node.output[0])
    return frozenset(found)


def behind_fused(graph: Graph, order: tuple[int, ...], edge: int) -> int:
    """The first position from `edge` on where the value made last is not read by a single node that the runtime fuses with it.

    For instance behind the final normalisation of a tower instead of before it.
    """
    while 0 < edge < len(order):
        made = set(graph.nodes[order[edge - 1]].output)
        readers = [position for position, at in enumerate(order) if not made.isdisjoint(graph.reads[at])]
        if made.intersection(graph.outputs) or readers != [edge]:
            break
        if graph.nodes[order[edge]].op_type not in _FUSED_WITH_BEFORE:
            break
        edge += 1
    return edge


def convolution_residuals(graph: Graph, order: tuple[int, ...], constants: frozenset[str]) -> frozenset[str]:
    """Values that are added to the result of a convolution: the runtime adds them in the same pass, in a layout of its own."""
    renames: dict[str, str] = {}
    convolved: set[str] = set()
    """Results of convolutions, perhaps with a constant added."""
    found: set[str] = set()
    for at in order:
        node, reads = graph.nodes[at], graph.reads[at]
        if node.op_type == "Identity":
            renames[node.output[0]] = renames.get(reads[0], reads[0])
        continues = node.op_type in ("Identity", "Add", "BatchNormalization") and reads[0] in convolved
        if node.op_type == "Conv" or (continues and constants.issuperset(reads[1:])):
            convolved.update(node.output)
        elif node.op_type == "Add" and len(reads) == 2:
            for one, other in (reads, reads[::-1]):
                if other in convolved and one not in constants:
                    found.update((one, renames.get(one, one)))
    return frozenset(found)
