"""Estimates the memory that unpickling takes, and the nesting depth of tuples, before any object is created.

    opcode by opcode, on a stack of stand-ins:  bytes of the object, a length or a memo index that the pickle claims,
                                                a copy that a call makes of its arguments  ─► cost, refused above

Three kinds of pickle kill a process that reads them. The first claims sizes: a length of 2^60, or a large memo index,
for which the unpickler allocates at once. The second is short and expands: a list for each byte, or nested calls that
each copy their arguments. The third nests tuples: Python hashes a tuple recursively, without checking how much stack is
left.

The estimate knows all opcodes, though `torch.load(weights_only=True)` accepts only some. If a pickle is truncated or
invalid, the unpickler raises too, and has allocated no more than was counted here.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import NoReturn

from holdfast.parse_cost import InputTooLarge, allowed_cost

PICKLE_FACTOR = 256  # of each byte of the pickle
_PLACE_BYTES = 16  # on a stack, in a list
_VALUE_BYTES = 40
_CONTAINER_BYTES = 96
_PAIR_BYTES = 64
_MEMO_BYTES = 100
_GLOBAL_BYTES = 2400  # of a class, because the drill defines one for each global
_CALL_BYTES = 400  # of a tensor, the usual result
_CHARACTER_BYTES = 4
_NUMBER_BYTES_MAX = 16
_ANY_NUMBER = 1 << 62
_NAME_BYTES_MAX = 64
_CODEC_FACTOR = 10  # text in an escaped form

# Functions that take a value as a size, or nested lists as a tensor of that many dimensions, even if lists are shared.
_BY_SIZE = ("Tensor", "Storage")
_BY_NUMBER = ("bytearray", "bytes")
_BY_CODEC = ("encode", "bytearray", "bytes")
_LATIN = ("latin1", "latin-1")  # pickle's own encoding of bytes
_OF_LISTS = ("_rebuild_qtensor", "_rebuild_sparse_tensor")
_OF_ANOTHER, _OF_ANOTHER_PARTS = "_rebuild_from_type_v2", 3  # function, type, arguments
_UNBOUNDED = (
    _OF_ANOTHER,  # with other arguments than these three
    "_rebuild_device_tensor_from_cpu_tensor",  # copies a tensor, which may be a small one expanded
    "_rebuild_device_tensor_from_numpy",
)


class _Value:
    """Stand-in for an object. `weight`: estimated bytes, contents included. `name`: of a class or function, without the
    module. `holds_list`: a list, dict or set, or a tuple that holds one.
    """

    number = depth = 0
    name = ""
    parts: tuple[_Value, ...] | None = None
    holds_list = False

    def __init__(self, weight: int = _VALUE_BYTES) -> None:
        self.weight = weight


class _Shared(_Value):
    """Immutable stand-in for many objects."""


_PLAIN = _Shared()
_NUMBERS = [_Shared() for _ in range(256)]
for _number, _value in enumerate(_NUMBERS):
    _value.number = _number
_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_NAMES = {code: name for name, code in _CODES.items()}
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_OPERANDS = {ord(opcode.code): opcode.arg.n if opcode.arg else 0 for opcode in pickletools.opcodes}
_STOP = _CODES["STOP"]
_DECIMAL = {_CODES["GET"], _CODES["PUT"]}
_TWO_LINES = {_CODES["GLOBAL"], _CODES["INST"]}


def check_pickle(pickled: bytes | memoryview, tuples_max: int | None = None) -> int:
    """Refuse a pickle that would take too much memory; return the nesting depth of tuples. Raises `InputTooLarge`."""
    return _PickleWalker(bytes(pickled), tuples_max).run()


def pickle_cost(pickled: bytes) -> int:
    """Estimate the bytes of the objects in the pickle, without a limit."""
    walk = _PickleWalker(pickled, None)
    walk.allowed_bytes = 1 << 62
    walk.run()
    return walk.cost


class _PickleWalker:
    """Walk through one pickle, from its first opcode to its last."""

    def __init__(self, pickled: bytes, tuples_max: int | None) -> None:
        self._pickled, self._tuples_max = pickled, tuples_max
        self.allowed_bytes = allowed_cost(len(pickled), PICKLE_FACTOR)
        self.cost = 0
        self._deepest = 0
        self._position = self._begin = 0
        self._stack: list[_Value] = []
        self._below: list[list[_Value]] = []
        self._memo: dict[int, _Value] = {}
        self._memo_end = 0

    def run(self) -> int:
        try:
            self._run()
        except (IndexError, KeyError, ValueError) as error:
            # The pickle is truncated or invalid; the unpickler will raise, too.
            if isinstance(error, InputTooLarge):
                raise
        return self._deepest

    def _run(self) -> None:
        pickled, handlers, available = self._pickled, _HANDLERS, len(self._pickled)
        while True:
            self._begin = self._position
            code = pickled[self._position]
            self._position += 1
            if code == _STOP:
                return
            handler = handlers[code]
            size = _OPERANDS[code]
            if size >= 0 and self._position + size <= available:
                begin = self._position
                end = self._position = begin + size
            else:
                begin, end = self._operand(code, size)
            handler(self, begin, end)
            if self.cost > self.allowed_bytes:
                self._reject()
            if self._tuples_max is not None and self._deepest > self._tuples_max:
                return

    def _operand(self, code: int, size: int) -> tuple[int, int]:
        """Return begin and end of the operand. Count the bytes that a length claims even if the pickle lacks them."""
        begin = self._position
        if size == pickletools.UP_TO_NEWLINE:
            end = self._pickled.index(b"\n", begin)
            self._position = end + 1
            if code in _TWO_LINES:
                begin, end = end + 1, self._pickled.index(b"\n", end + 1)
                self._position = end + 1
            return begin, end
        if size < 0:
            width = _LENGTHS[size]
            size = int.from_bytes(self._pickled[begin : begin + width], "little")
            begin += width
            self.cost += size
        end = self._position = begin + size
        if end > len(self._pickled):
            if self.cost > self.allowed_bytes:
                self._reject(f"claims {size} bytes, of which {max(0, len(self._pickled) - begin)} are there")
            raise IndexError
        return begin, end

    def _reject(self, why: str = "") -> NoReturn:
        place = f"{_NAMES[self._pickled[self._begin]]} at byte {self._begin}"
        if why:
            raise InputTooLarge(f"{place} {why}; expected at most {self.allowed_bytes} bytes in all")
        raise InputTooLarge(
            f"{len(self._pickled)} bytes of pickle would take {self.cost} bytes or more to unpickle, expected at most "
            f"{self.allowed_bytes}, exceeded at {place}"
        )

    # -- values ------------------------------------------------------------------------------------------------------

    def _push(self, value: _Value, nbytes: int = 0) -> None:
        self.cost += _PLACE_BYTES + nbytes
        self._stack.append(value)

    def plain(self, _begin: int, _end: int) -> None:
        self._push(_PLAIN)

    def float(self, _begin: int, _end: int) -> None:
        self._push(_PLAIN, _VALUE_BYTES)

    def byte(self, begin: int, _end: int) -> None:
        self._push(_NUMBERS[self._pickled[begin]])

    def number(self, begin: int, end: int) -> None:
        value = _Value()
        value.number = _ANY_NUMBER
        if end - begin <= _NUMBER_BYTES_MAX:
            is_signed = self._pickled[self._begin] != _CODES["BININT2"]
            value.number = int.from_bytes(self._pickled[begin:end], "little", signed=is_signed)
        self._push(value, _VALUE_BYTES)

    def decimal(self, begin: int, end: int) -> None:
        value = _Value()
        line = self._pickled[begin:end]
        # Python accepts other notations, too: any text that is not plain digits counts as the largest number.
        value.number = int(line) if line.isdigit() and len(line) <= _NUMBER_BYTES_MAX else _ANY_NUMBER
        self._push(value, _VALUE_BYTES + len(line))

    def text(self, begin: int, end: int) -> None:
        nbytes = end - begin
        value = _Value(_VALUE_BYTES + nbytes)
        if nbytes <= _NAME_BYTES_MAX:  # it may name a function, for STACK_GLOBAL
            value.name = self._pickled[begin:end].decode(errors="replace")
        self._push(value, _VALUE_BYTES + (_CHARACTER_BYTES - 1) * nbytes)

    def container(self, _begin: int, _end: int) -> None:
        value = _Value(_CONTAINER_BYTES)
        value.holds_list = True
        self._push(value, _CONTAINER_BYTES)

    def container_of_marked(self, _begin: int, _end: int) -> None:
        items = self._pop_to_mark()
        self.container(0, 0)
        self._fill(items)

    def tuple_of_marked(self, _begin: int, _end: int) -> None:
        self._tuple(self._pop_to_mark())

    def tuple_of_last(self, _begin: int, _end: int) -> None:
        count = self._pickled[self._begin] - _CODES["TUPLE1"] + 1
        items = self._stack[-count:]
        if len(items) < count:
            raise IndexError
        del self._stack[-count:]
        self._tuple(items)

    def empty_tuple(self, _begin: int, _end: int) -> None:
        self._tuple([])

    def _tuple(self, items: list[_Value]) -> None:
        weight, depth, holds_list = _CONTAINER_BYTES, 0, False
        for item in items:
            weight += item.weight
            depth = max(depth, item.depth)
            holds_list = holds_list or item.holds_list
        value = _Value(weight)
        value.depth, value.parts, value.holds_list = depth + 1, tuple(items), holds_list
        self._deepest = max(self._deepest, depth + 1)
        self._push(value, _CONTAINER_BYTES + _PLACE_BYTES * len(items))

    # -- filling containers ------------------------------------------------------------------------------------------

    def append(self, _begin: int, _end: int) -> None:
        self._fill([self._stack.pop()], _PLACE_BYTES)

    def append_marked(self, _begin: int, _end: int) -> None:
        self._fill(self._pop_to_mark(), _PLACE_BYTES)

    def set_item(self, _begin: int, _end: int) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._fill([key, value])

    def fill_with_marked(self, _begin: int, _end: int) -> None:
        self._fill(self._pop_to_mark())

    def _fill(self, items: list[_Value], nbytes: int = _PAIR_BYTES) -> None:
        target = self._stack[-1]
        if isinstance(target, _Shared):
            raise ValueError  # not a container
        self.cost += nbytes * len(items)
        for item in items:
            target.weight += item.weight

    # -- stack and memo ----------------------------------------------------------------------------------------------

    def mark(self, _begin: int, _end: int) -> None:
        self.cost += _CONTAINER_BYTES
        self._below.append(self._stack)
        self._stack = []

    def pop(self, _begin: int, _end: int) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._stack = self._below.pop()

    def pop_marked(self, _begin: int, _end: int) -> None:
        self._pop_to_mark()

    def _pop_to_mark(self) -> list[_Value]:
        """Pop the values above the last mark."""
        items = self._stack
        self._stack = self._below.pop()
        return items

    def duplicate_top(self, _begin: int, _end: int) -> None:
        self._push(self._stack[-1])

    def get(self, begin: int, end: int) -> None:
        self._push(self._memo[self._index(begin, end)])

    def put(self, begin: int, end: int) -> None:
        index = self._index(begin, end)
        if index < 0:
            raise ValueError
        self._memoize_top(index)

    def memoize(self, _begin: int, _end: int) -> None:
        self._memoize_top(len(self._memo))

    def _index(self, begin: int, end: int) -> int:
        operand = self._pickled[begin:end]
        is_text = self._pickled[self._begin] in _DECIMAL
        return int(operand) if is_text else int.from_bytes(operand, "little")

    def _memoize_top(self, index: int) -> None:
        """Store the top value in the memo. The memo is an array: a large index allocates all entries before it."""
        if index >= self._memo_end:
            self.cost += _MEMO_BYTES + _PLACE_BYTES * (index - self._memo_end)
            self._memo_end = index + 1
            if self.cost > self.allowed_bytes:
                self._reject(f"claims place {index} of the memo, of which {len(self._memo)} are taken")
        self._memo[index] = self._stack[-1]

    # -- classes, functions, and their results -----------------------------------------------------------------------

    def push_global(self, begin: int, end: int) -> None:
        value = _Value()
        value.name = self._pickled[begin:end].decode(errors="replace")
        self._push(value, _GLOBAL_BYTES + end - begin)

    def push_stack_global(self, _begin: int, _end: int) -> None:
        value = _Value()
        value.name = self._stack.pop().name
        self._stack.pop()
        self._push(value, _GLOBAL_BYTES)

    def call(self, _begin: int, _end: int) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._call(function, arguments)

    def call_with_names(self, _begin: int, _end: int) -> None:
        named, arguments, function = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self.cost += named.weight
        self._call(function, arguments)

    def call_marked(self, begin: int, end: int) -> None:
        items = self._pop_to_mark()
        if self._pickled[self._begin] == _CODES["INST"]:
            self.push_global(begin, end)
            function = self._stack.pop()
        else:
            function = items.pop(0)
        self._tuple(items)
        self._call(function, self._stack.pop())

    def persistent(self, _begin: int, _end: int) -> None:
        self._stack.pop()
        self._push(_PLAIN, _CALL_BYTES)

    def persistent_line(self, _begin: int, _end: int) -> None:
        self._push(_PLAIN, _CALL_BYTES)

    def build(self, _begin: int, _end: int) -> None:
        self.cost += self._stack.pop().weight

    def frame(self, begin: int, end: int) -> None:
        size = int.from_bytes(self._pickled[begin:end], "little")
        self.cost += size
        if self.cost > self.allowed_bytes:
            self._reject(f"claims {size} bytes, of which {len(self._pickled) - end} are there")

    def ignore(self, _begin: int, _end: int) -> None:
        pass

    def _call(self, function: _Value, arguments: _Value) -> None:
        nbytes = _VALUE_BYTES + arguments.weight + self._growth(function.name, arguments)
        result = _Value(nbytes)
        result.depth = max(function.depth, arguments.depth)
        self._push(result, _CALL_BYTES + nbytes)

    def _growth(self, name: str, arguments: _Value) -> int:
        """Return how many bytes the result of the named function may have beyond those of its arguments."""
        while (
            name == _OF_ANOTHER and arguments.parts is not None and len(arguments.parts) >= _OF_ANOTHER_PARTS
        ):
            name, arguments = arguments.parts[0].name, arguments.parts[2]
        parts = arguments.parts
        if name in _UNBOUNDED or (name in _BY_NUMBER and parts is None):
            self._reject(f"calls {name}, which may take any number of bytes")
        if name.endswith(_BY_SIZE) and parts != ():
            self._reject(f"calls {name} with values, which may take any number of bytes")
        if name in _OF_LISTS and arguments.holds_list:
            self._reject(f"calls {name} with a list, which may take any number of bytes")
        by_number = sum(abs(part.number) for part in parts or ()) if name in _BY_NUMBER else 0
        is_latin = parts is not None and len(parts) > 1 and parts[1].name in _LATIN
        return by_number + (_CODEC_FACTOR * arguments.weight if name in _BY_CODEC and not is_latin else 0)


_Handler = Callable[[_PickleWalker, int, int], None]
_HANDLERS: dict[int, _Handler] = {
    _CODES[name]: handler
    for handler, names in (
        (_PickleWalker.plain, "NONE NEWFALSE NEWTRUE"),
        (_PickleWalker.float, "FLOAT BINFLOAT NEXT_BUFFER EXT1 EXT2 EXT4"),
        (_PickleWalker.byte, "BININT1"),
        (_PickleWalker.number, "BININT BININT2 LONG1 LONG4"),
        (_PickleWalker.decimal, "INT LONG"),
        (
            _PickleWalker.text,
            "STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8",
        ),
        (_PickleWalker.text, "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"),
        (_PickleWalker.container, "EMPTY_LIST EMPTY_DICT EMPTY_SET"),
        (_PickleWalker.container_of_marked, "LIST DICT FROZENSET"),
        (_PickleWalker.tuple_of_marked, "TUPLE"),
        (_PickleWalker.tuple_of_last, "TUPLE1 TUPLE2 TUPLE3"),
        (_PickleWalker.empty_tuple, "EMPTY_TUPLE"),
        (_PickleWalker.append, "APPEND"),
        (_PickleWalker.set_item, "SETITEM"),
        (_PickleWalker.append_marked, "APPENDS"),
        (_PickleWalker.fill_with_marked, "SETITEMS ADDITEMS"),
        (_PickleWalker.mark, "MARK"),
        (_PickleWalker.pop, "POP"),
        (_PickleWalker.pop_marked, "POP_MARK"),
        (_PickleWalker.duplicate_top, "DUP"),
        (_PickleWalker.get, "GET BINGET LONG_BINGET"),
        (_PickleWalker.put, "PUT BINPUT LONG_BINPUT"),
        (_PickleWalker.memoize, "MEMOIZE"),
        (_PickleWalker.push_global, "GLOBAL"),
        (_PickleWalker.push_stack_global, "STACK_GLOBAL"),
        (_PickleWalker.call, "REDUCE NEWOBJ"),
        (_PickleWalker.call_with_names, "NEWOBJ_EX"),
        (_PickleWalker.call_marked, "INST OBJ"),
        (_PickleWalker.persistent, "BINPERSID"),
        (_PickleWalker.persistent_line, "PERSID"),
        (_PickleWalker.build, "BUILD"),
        (_PickleWalker.frame, "FRAME"),
        (_PickleWalker.ignore, "PROTO READONLY_BUFFER"),
    )
    for name in names.split()
}
