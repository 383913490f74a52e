"""A YAML file as Python values, strictly: a key that stands twice in one mapping is refused, not overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from data.errors import BadInput


class _Loader(yaml.SafeLoader):
    """Looks at mappings as they are written: once merges (`<<`) are done, a key may rightly have stood in two."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if (first := seen.get((key.tag, key.value))) is not None:
                raise BadInput(
                    f"{self.name}: line {line}: `{key.value}` is given a second time, after line {first}: "
                    "put both into one, or delete one"
                )
            seen[key.tag, key.value] = line
        return node


def read_yaml(path: Path) -> Any:
    """What the file says.

    Raises BadInput, in one line, when it cannot be read, is not YAML, or gives a key twice.
    """
    try:
        with path.open(encoding="utf-8") as file:
            loader = _Loader(file)
            try:
                return loader.get_single_data()
            finally:
                loader.dispose()
    except OSError as error:
        raise BadInput(f"{path}: cannot read the run file: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadInput(f"{path}: not a YAML file: {' '.join(str(error).split())[:300]}") from None
