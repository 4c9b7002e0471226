#!/usr/bin/env python3
"""Writes src/aws/table.rs: the request of EC2's RunInstances, from the model in botocore.

    python3 generate/aws.py [--botocore DIRECTORY] [--output FILE | --stdout]

botocore is taken from DIRECTORY (which holds the package `botocore`) or from the installed packages. Only names, types,
enums and requirements are taken, no documentation. Exits with 3 if there is no botocore.
"""

import argparse
import gzip
import json
import pathlib
import re
import sys

NO_BOTOCORE = 3

# An enum that grows every month is no help: a new value would be refused until the next release.
MAX_ENUM = 100

WIDTH = 120


def load_model(directory):
    if directory:
        sys.path.insert(0, directory)
    try:
        import botocore
    except ImportError:
        print("botocore cannot be imported", file=sys.stderr)
        sys.exit(NO_BOTOCORE)
    models = pathlib.Path(botocore.__file__).parent / "data" / "ec2"
    newest = max(path for path in models.iterdir() if path.is_dir())
    packed, plain = newest / "service-2.json.gz", newest / "service-2.json"
    if packed.exists():
        return botocore.__version__, json.loads(gzip.decompress(packed.read_bytes()))
    return botocore.__version__, json.loads(plain.read_text())


def constant(name):
    """`IamInstanceProfileSpecification` to `IAM_INSTANCE_PROFILE_SPECIFICATION`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).upper()


def wire_name(name, member):
    """What botocore's serializer of the ec2 protocol writes."""
    if "queryName" in member:
        return member["queryName"]
    location = member.get("locationName", name)
    return location[0].upper() + location[1:]


def reach(shapes, name, found):
    """All shapes below `name`, those that others are made of first."""
    if name in found:
        return
    shape = shapes[name]
    found[name] = None  # keeps a cycle from going on for ever
    members = [member["shape"] for member in shape.get("members", {}).values()]
    if shape["type"] == "list":
        members.append(shape["member"]["shape"])
    for member in members:
        reach(shapes, member, found)
    del found[name]
    found[name] = shape


def plain(shape):
    """The Rust of a shape that needs no static of its own."""
    kind = shape["type"]
    if kind == "string":
        values = shape.get("enum", [])
        return None if 0 < len(values) <= MAX_ENUM else "Shape::String"
    if kind == "integer":
        low = shape.get("min", -(2**31))
        high = shape.get("max", 2**31 - 1)
        is_plain = (low, high) == (-(2**31), 2**31 - 1)
        return "INTEGER" if is_plain else f"Shape::Integer {{ min: {low}, max: {high:_} }}"
    return {"boolean": "Shape::Bool", "timestamp": "Shape::Timestamp"}.get(kind)


def reference(shapes, name):
    text = plain(shapes[name])
    return f"&{text or constant(name)}"


def member_line(shapes, structure, name, member):
    shape, wire = reference(shapes, member["shape"]), wire_name(name, member)
    text = f'Member::new("{name}", {shape})' if wire == name else f'Member::wire("{name}", "{wire}", {shape})'
    if name in structure.get("required", []):
        text += ".required()"
    if member.get("deprecated"):
        text += ".deprecated()"
    return f"    {text},"


def definition(shapes, name, shape):
    kind, static = shape["type"], constant(name)
    if plain(shape):
        return None
    if kind == "string":
        values = ", ".join(f'"{value}"' for value in shape["enum"])
        return f"pub static {static}: Shape = Shape::Enum(&[{values}]);"
    if kind == "list":
        return f"pub static {static}: Shape = Shape::List({reference(shapes, shape['member']['shape'])});"
    if kind == "structure":
        lines = [member_line(shapes, shape, key, member) for key, member in shape["members"].items()]
        return f"pub static {static}: Shape = Shape::Struct(&[\n" + "\n".join(lines) + "\n]);"
    sys.exit(f"{name} is a {kind}, which this generator does not know")


def table(version, model):
    shapes, protocol = model["shapes"], model["metadata"]["protocol"]
    if protocol != "ec2":
        sys.exit(f"the protocol is {protocol}, whose names and lists are spelled in another way")
    root = model["operations"]["RunInstances"]["input"]["shape"]
    found = {}
    reach(shapes, root, found)
    out = [
        "//! The request of EC2's RunInstances: names, types, enums.",
        "//!",
        "//! Made by generate/aws.py from botocore's model of EC2 (Apache-2.0); do not edit. A name is what people write in",
        "//! `args`, a wire name what the query says. The EC2 protocol writes lists flat: `Name.1`, `Name.2`.",
        "",
        "use crate::shape::{Member, Shape};",
        "",
        f'pub const API_VERSION: &str = "{model["metadata"]["apiVersion"]}";',
        "",
        "/// Version of botocore.",
        f'pub const MADE_FROM: &str = "{version}";',
        "",
        "static INTEGER: Shape = Shape::Integer { min: -2_147_483_648, max: 2_147_483_647 };",
        "",
        "/// Every key of the request.",
        "pub static RUN_INSTANCES: &[Member] = &[",
    ]
    request = found.pop(root)
    required = {**request, "required": []}  # those are all set by Nstance
    out += [member_line(shapes, required, key, member) for key, member in request["members"].items()]
    out.append("];")
    for name, shape in sorted(found.items()):
        text = definition(shapes, name, shape)
        if text:
            out += ["", text]
    return "\n".join(out) + "\n"


def main():
    here = pathlib.Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--botocore", help="directory that holds the package botocore")
    parser.add_argument("--output", default=here.parent / "src" / "aws" / "table.rs")
    parser.add_argument("--stdout", action="store_true", help="print instead of writing")
    parser.add_argument("--version", action="store_true", help="print the version of botocore and stop")
    options = parser.parse_args()
    if options.version:
        print(load_model(options.botocore)[0])
        return
    text = table(*load_model(options.botocore))
    if options.stdout:
        sys.stdout.write(text)
    else:
        pathlib.Path(options.output).write_text(text)


if __name__ == "__main__":
    main()
