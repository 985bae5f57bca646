"""The weights of a model in one process, for tests of graphs.

compile_model(TraceableModel(model, PlainWeights(model), model.layers), schedule)
"""

from contextlib import ExitStack, contextmanager

from titan_lite.compile.model_parts import entries_replaced


class PlainWeights:
    """ModelWeights (compile/model_parts.py) of a model whose parameters are not sharded."""

    variant = None
    kept = None

    def __init__(self, model):
        self.fqns = {parameter: fqn for fqn, parameter in model.named_parameters()}
        self.modules = list(model.modules())

    def graph_inputs(self):
        return {fqn: (parameter,) for parameter, fqn in self.fqns.items()}

    def described(self, modules):
        return {
            self.fqns[parameter]: None
            for module in modules
            for parameter in module._parameters.values()
            if parameter is not None
        }

    @contextmanager
    def reading(self, inputs):
        with ExitStack() as stack:
            for module in self.modules:
                read = {
                    name: inputs[self.fqns[parameter]][0]
                    for name, parameter in module._parameters.items()
                    if parameter is not None and self.fqns[parameter] in inputs
                }
                stack.enter_context(entries_replaced(module._parameters, read))
            yield
