"""Reads XLA's programs (HLO modules): their inputs, constants and operations; and what differs between two of them.

Only the few fields that are needed of OpenXLA's xla/service/hlo.proto and xla/xla_data.proto are declared; protobuf skips the
rest. Their numbers have not changed for years, because stored programs depend on them.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from pipeline.errors import BadData

ELEMENT_TYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64",
    10: "f16", 11: "f32", 12: "f64", 13: "tuple", 15: "c64", 16: "bf16", 17: "token", 18: "c128",
}  # fmt: skip
"""xla_data.proto, PrimitiveType."""

_TYPE = descriptor_pb2.FieldDescriptorProto
_FIELDS: dict[str, list[tuple[str, int, int, bool, str]]] = {
    # message: (field, number, type, repeated, message type)
    "Shape": [
        ("element_type", 2, _TYPE.TYPE_INT32, False, ""),
        ("dimensions", 3, _TYPE.TYPE_INT64, True, ""),
        ("tuple_shapes", 4, _TYPE.TYPE_MESSAGE, True, "Shape"),
    ],
    "Literal": [
        ("shape", 1, _TYPE.TYPE_MESSAGE, False, "Shape"),
        ("preds", 2, _TYPE.TYPE_BOOL, True, ""),
        ("s32s", 4, _TYPE.TYPE_INT32, True, ""),
        ("s64s", 5, _TYPE.TYPE_INT64, True, ""),
        ("u32s", 6, _TYPE.TYPE_UINT32, True, ""),
        ("u64s", 7, _TYPE.TYPE_UINT64, True, ""),
        ("f32s", 8, _TYPE.TYPE_FLOAT, True, ""),
        ("f64s", 9, _TYPE.TYPE_DOUBLE, True, ""),
        ("f16s", 11, _TYPE.TYPE_BYTES, False, ""),
        ("bf16s", 13, _TYPE.TYPE_BYTES, False, ""),
    ],
    "SliceDimensions": [
        ("start", 1, _TYPE.TYPE_INT64, False, ""),
        ("limit", 2, _TYPE.TYPE_INT64, False, ""),
        ("stride", 3, _TYPE.TYPE_INT64, False, ""),
    ],
    "ReplicaGroup": [("replica_ids", 1, _TYPE.TYPE_INT64, True, "")],
    "Instruction": [
        ("name", 1, _TYPE.TYPE_STRING, False, ""),
        ("opcode", 2, _TYPE.TYPE_STRING, False, ""),
        ("shape", 3, _TYPE.TYPE_MESSAGE, False, "Shape"),
        ("literal", 8, _TYPE.TYPE_MESSAGE, False, "Literal"),
        ("slice_dimensions", 17, _TYPE.TYPE_MESSAGE, True, "SliceDimensions"),
        ("replica_groups", 49, _TYPE.TYPE_MESSAGE, True, "ReplicaGroup"),
    ],
    "Computation": [
        ("name", 1, _TYPE.TYPE_STRING, False, ""),
        ("instructions", 2, _TYPE.TYPE_MESSAGE, True, "Instruction"),
        ("id", 5, _TYPE.TYPE_INT64, False, ""),
    ],
    "Module": [
        ("name", 1, _TYPE.TYPE_STRING, False, ""),
        ("computations", 3, _TYPE.TYPE_MESSAGE, True, "Computation"),
        ("entry_computation_id", 6, _TYPE.TYPE_INT64, False, ""),
    ],
    # How XLA's CPU client stores an executable: the module is in the first field of the first field of the first field.
    "ModuleWithConfig": [("module", 1, _TYPE.TYPE_MESSAGE, False, "Module")],
    "CompilationResult": [("module", 1, _TYPE.TYPE_MESSAGE, False, "ModuleWithConfig")],
    "Executable": [("result", 1, _TYPE.TYPE_MESSAGE, False, "CompilationResult")],
}


@lru_cache(maxsize=1)
def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="trnpipe_hlo.proto", package="trnpipe.hlo", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated, message_type in fields:
            message.field.add(
                name=field,
                number=number,
                type=kind,
                label=_TYPE.LABEL_REPEATED if repeated else _TYPE.LABEL_OPTIONAL,
                type_name=f".trnpipe.hlo.{message_type}" if message_type else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"trnpipe.hlo.{name}")) for name in _FIELDS}


@dataclass(frozen=True, slots=True)
class GraphDescription:
    """The counts that tell one graph from another, few enough to list.

    Attributes:
        inputs: type and shape (`f32[64,384]`) -> how many inputs have it.
        outputs: the same for outputs.
        constants: type and value of a scalar constant (`f32 0.05`), type, shape and digest of a larger one, or where a slice is
            (`slice [3:4, 0:32]`) -> how many.
        operations: opcode -> how many.
        collectives: opcode with its group size (`all-reduce x32`) -> how many.
    """

    inputs: dict[str, int]
    outputs: dict[str, int]
    constants: dict[str, int]
    operations: dict[str, int]
    collectives: dict[str, int]

    @property
    def size(self) -> int:
        return sum(self.operations.values())


def describe(module: bytes) -> GraphDescription:
    """Return a module as a few counts.

    Raises:
        BadData: not an HLO module.
    """
    parsed = _parse("Module", module)
    if not parsed.computations:
        raise BadData("not an HLO module", value=f"{len(module)} bytes without a computation")
    entry = next((item for item in parsed.computations if item.id == parsed.entry_computation_id), parsed.computations[-1])
    inputs = Counter(_shape(item.shape) for item in entry.instructions if item.opcode == "parameter")
    root = entry.instructions[-1].shape
    outputs = Counter(_shape(shape) for shape in (root.tuple_shapes or [root]))
    computed = [item for one in parsed.computations for item in one.instructions if item.opcode != "parameter"]
    operations = Counter(item.opcode for item in computed)
    constants: Counter[str] = Counter()
    collectives: Counter[str] = Counter()
    for item in computed:
        if item.opcode == "constant":
            constants[_constant(item.literal)] += 1
        elif item.slice_dimensions:
            steps = (f"{one.start}:{one.limit}" + (f":{one.stride}" if one.stride > 1 else "") for one in item.slice_dimensions)
            constants[f"slice [{', '.join(steps)}]"] += 1
        elif item.replica_groups:
            collectives[f"{item.opcode} x{len(item.replica_groups[0].replica_ids)}"] += 1
    return GraphDescription(*(dict(sorted(counter.items())) for counter in (inputs, outputs, constants, operations, collectives)))


def module_of_executable(data: bytes) -> bytes | None:
    """Return the module inside an executable that XLA's CPU client stored, None if it has another form."""
    try:
        module = _parse("Executable", data).result.module.module
    except BadData:
        return None
    return bytes(module.SerializeToString()) if module.computations else None


def difference(new: GraphDescription, known: list[GraphDescription]) -> str:
    """Say what distinguishes a graph from the most similar known one: shapes, types, constants, operations.

    Inputs are compared before constants and those before operations, because the former change the latter.
    """
    if not known:
        return "no known graph to compare it with"
    parts = {
        "inputs": "inputs of other shapes or types",
        "constants": "other constants",
        "outputs": "other outputs",
        "operations": "other operations",
    }

    def distance(other: GraphDescription) -> int:
        pairs = [(Counter(getattr(new, name)), Counter(getattr(other, name))) for name in parts]
        return sum(((here - there) + (there - here)).total() for here, there in pairs)

    nearest = min(known, key=distance)
    for name, what in parts.items():
        here, there = Counter(getattr(new, name)), Counter(getattr(nearest, name))
        if here != there:
            added, removed = _listed(here - there), _listed(there - here)
            return f"{what}: " + "; ".join(
                part for part in (f"new {added}" if added else "", f"instead of {removed}" if removed else "") if part
            )
    return "the same inputs, constants and operations in another arrangement"


def _listed(counts: dict[str, int], limit: int = 6) -> str:
    shown = [f"{key} ({count} times)" if count > 1 else key for key, count in list(counts.items())[:limit]]
    return ", ".join([*shown, *(["..."] if len(counts) > limit else [])])


def _parse(name: str, data: bytes) -> Any:
    message = _messages()[name]()
    try:
        message.ParseFromString(data)
    except Exception as error:
        raise BadData("not an HLO module", value=f"{len(data)} bytes: {error}") from error
    return message


def _shape(shape: Any) -> str:
    return f"{_element_type(shape)}[{','.join(map(str, shape.dimensions))}]"


def _element_type(shape: Any) -> str:
    return ELEMENT_TYPES.get(shape.element_type, str(shape.element_type))


def _constant(literal: Any) -> str:
    kind = _element_type(literal.shape)
    for name in ("preds", "s32s", "s64s", "u32s", "u64s", "f32s", "f64s"):
        values = getattr(literal, name)
        if len(values) == 1:
            return f"{kind} {values[0]:g}" if isinstance(values[0], float) else f"{kind} {values[0]}"
    if len(literal.bf16s) == 2:
        # The upper half of an fp32 number, little endian.
        return f"bf16 {struct.unpack('<f', bytes(2) + literal.bf16s)[0]:g}"
    if len(literal.f16s) == 2:
        return f"f16 {struct.unpack('<e', literal.f16s)[0]:g}"
    return f"{_shape(literal.shape)} {hashlib.sha256(literal.SerializeToString()).hexdigest()[:12]}"
