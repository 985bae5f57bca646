"""Weights of our models by Hugging Face's names, as files have them and as transformers has them in
memory, where experts are fused.
"""

import torch

from titan_lite.models.huggingface import sources_of, to_hf


def in_files(model, config):
    """{name: tensor} of all parameters, as convert writes them."""
    return {
        name: tensor
        for fqn, parameter in model.named_parameters()
        for name, tensor in to_hf(fqn, parameter.detach(), config).items()
    }


def in_memory(files):
    """The same with the experts of a layer fused: gate above up, in dimension 1."""
    found = {}
    for name, tensor in files.items():
        prefix, experts, rest = name.partition(".mlp.experts.")
        if not experts:
            found[name] = tensor
        elif rest == "0.gate_proj.weight":
            start = f"{prefix}.mlp.experts"
            gate, up, down = (stacked(files, start, name) for name in ("gate", "up", "down"))
            found[f"{start}.gate_up_proj"] = torch.cat((gate, up), dim=1)
            found[f"{start}.down_proj"] = down
    return found


def stacked(files, start, name):
    count = sum(other.startswith(f"{start}.") for other in files) // 3
    return torch.stack([files[f"{start}.{number}.{name}_proj.weight"] for number in range(count)])


def in_ours(theirs, config):
    """{FQN: tensor in our layout}, from {name: tensor} of either form."""
    return {
        fqn: source.join(theirs.__getitem__, config, slice(None))
        for fqn, source in sources_of(config, theirs.keys()).items()
    }
