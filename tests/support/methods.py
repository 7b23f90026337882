"""The positional methods, for tests that go through all of them."""

from megatron.model.positional import method_class, registered_names


def one_name_each() -> tuple[str, ...]:
    """The `pos-emb` names without those that are another's alias, sorted."""
    names = {method_class(name): name for name in sorted(registered_names(), key=lambda name: -len(name))}
    return tuple(sorted(names.values()))
