"""Whether NEW is a valid OpenAPI document, and OLD with nothing but additions: judged by others' parsers.

Scalars are compared as they are written, and members in their order.
"""

import json
import sys

import yaml
from openapi_spec_validator import validate


class Written(yaml.SafeLoader):
    """Keeps scalars as text with their style, and mappings as pairs."""


def scalar(loader, node):
    return (node.style, loader.construct_scalar(node))


Written.yaml_implicit_resolvers = {}
Written.add_constructor(None, scalar)
Written.add_constructor("tag:yaml.org,2002:str", scalar)
Written.add_constructor("tag:yaml.org,2002:null", scalar)
Written.add_constructor(
    "tag:yaml.org,2002:map",
    lambda loader, node: [
        (loader.construct_object(key, deep=True), loader.construct_object(value, deep=True)) for key, value in node.value
    ],
)
Written.add_constructor(
    "tag:yaml.org,2002:seq", lambda loader, node: {"items": [loader.construct_object(item, deep=True) for item in node.value]}
)


def written(text, is_json):
    if is_json:
        keep = lambda text: ("number", text)
        return json.loads(text, object_pairs_hook=list, parse_float=keep, parse_int=keep)
    return yaml.load(text, Loader=Written)


def within(old, new):
    """Whether everything of OLD is in NEW, in the same order."""
    if type(old) is not type(new):
        return False
    if isinstance(old, dict):
        return within(old["items"], new["items"])
    if isinstance(old, list):
        rest = iter(new)
        return all(any(within(one, other) for other in rest) for one in old)
    if isinstance(old, tuple) and len(old) == len(new) == 2 and isinstance(old[1], (dict, list, tuple)):
        return old[0] == new[0] and within(old[1], new[1])
    return old == new


old, new = (open(path, encoding="utf-8").read() for path in sys.argv[1:3])
is_json = sys.argv[1].endswith(".json")
if not within(written(old, is_json), written(new, is_json)):
    sys.exit("something of the old document is lost")
document = json.loads(new) if is_json else yaml.safe_load(new)
validate(document)
print(json.dumps(document, default=str))
