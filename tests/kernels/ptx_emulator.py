"""Runs compiled kernels (PTX) on the CPU with numpy, so that machines without a GPU check what the compiler made.

All threads of many programs execute in lockstep, one instruction at a time over arrays of registers; programs that take
another branch go on by themselves. That hides timing, so shared memory keeps a log, and races raise (`ptx_shared`).
So do misaligned and out-of-bounds accesses and branches that diverge within a program.
It knows the instructions that the quantization kernels compile to (no tensor cores, no asynchronous copies) and raises
NotImplementedError for others. What it cannot check is ptxas, which makes machine code from PTX.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import ml_dtypes
import numpy as np

from tests.kernels.ptx_code import FLOATS, INTEGERS, handlers, parse
from tests.kernels.ptx_shared import SharedMemory

BF16 = ml_dtypes.bfloat16
FP8 = {"e4m3x2": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2x2": (ml_dtypes.float8_e5m2, 57344.0)}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
FIRST_ADDRESS = 4096  # of global memory; below it, nothing may be touched
LOCKSTEP = 16384  # threads that execute together


class Programs:
    """The programs (CTAs) of a kernel: as many at a time as make up LOCKSTEP threads, in order."""

    def __init__(self, ptx: str, memory: np.ndarray, shared: int) -> None:
        self.code, self.labels, self.parameters, self.width = parse(ptx)
        self.memory, self.shared_size = memory, shared
        self.handlers = handlers(ptx)

    def run(self, grid: int, arguments: list[Any]) -> None:
        self.arguments = dict(zip(self.parameters, arguments, strict=True))
        together = max(1, LOCKSTEP // self.width)
        for first in range(0, grid, together):
            index = np.arange(first, min(first + together, grid))
            self._enter(index, grid)
            self.registers: dict[str, np.ndarray] = {}
            self.shared = SharedMemory(self.shared_size, len(index), self.thread // 32)
            self._execute(0)

    def _enter(self, index: np.ndarray, grid: int) -> None:
        """Whose threads the arrays are from now on."""
        self.index, self.grid = index, grid
        self.threads = len(index) * self.width
        self.thread = np.arange(self.threads)
        self.special = {
            "%tid.x": self.thread % self.width,
            "%ctaid.x": np.repeat(index, self.width),
            "%nctaid.x": grid,
            "global_smem": 0,
        }

    def _execute(self, position: int) -> None:
        while position < len(self.code):
            instruction = self.code[position]
            self.mask = self.predicate(instruction.predicate) if instruction.predicate else None
            name = instruction.parts[0]
            target = position + 1
            if name in ("bra", "ret"):
                taken = self._taken()
                jump = len(self.code) if name == "ret" else self.labels[instruction.operands[0]]
                if taken.any() and not taken.all():
                    self._part(taken, jump, target)
                    return
                target = jump if taken.all() else target
            elif name == "bar":
                self.shared.epoch += 1
            else:
                getattr(self, self.handlers[position])(instruction.parts, instruction.operands)
            position = target

    def _taken(self) -> np.ndarray:
        """Which programs take a branch."""
        if self.mask is None:
            return np.ones(len(self.index), bool)
        taken = self.mask.reshape(-1, self.width)
        assert (taken == taken[:, :1]).all(), "threads diverge"
        return taken[:, 0]

    def _part(self, taken: np.ndarray, jump: int, following: int) -> None:
        """Some programs jump and some don't: each of the two go on to their end by themselves."""
        index, grid, registers, shared = self.index, self.grid, self.registers, self.shared
        for chosen, position in ((~taken, following), (taken, jump)):
            rows = np.repeat(chosen, self.width)
            self._enter(index[chosen], grid)
            self.registers = {name: value[rows] for name, value in registers.items()}
            self.shared = shared.of(chosen, self.thread // 32)
            self._execute(position)

    # Operands

    def predicate(self, name: str) -> np.ndarray:
        return ~self.registers[name[1:]] if name.startswith("!") else self.registers[name]

    def value(self, operand: str, bits: int = 32) -> np.ndarray:
        """An operand's bits, zero-extended or cut. Registers that nothing wrote hold garbage, as on a GPU."""
        kind = UNSIGNED[bits]
        if operand in self.special:
            return np.broadcast_to(np.asarray(self.special[operand]), self.threads).astype(kind)
        if operand.startswith(("0f", "0d")):
            return np.full(self.threads, int(operand[2:], 16), np.uint32 if operand[1] == "f" else np.uint64)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return np.full(self.threads, int(operand.rstrip("U"), 0) & ((1 << bits) - 1), kind)
        if operand not in self.registers:
            return np.random.default_rng(bits).integers(0, 2**bits, self.threads, dtype=kind)
        return self.registers[operand].astype(kind)

    def single(self, operand: str) -> np.ndarray:
        return self.value(operand).view(np.float32)

    def typed(self, operand: str, kind: str) -> np.ndarray:
        """By PTX type: u32, s64, b16, f32, bf16, ..."""
        if kind == "bf16":
            return self.value(operand, 16).view(BF16).astype(np.float32)
        bits = max(16, int(kind.lstrip("busf")))
        values = self.value(operand, bits)
        if kind[0] == "f":
            return values.view({16: np.float16, 32: np.float32, 64: np.float64}[bits])
        return values.view(values.dtype.name[1:]) if kind[0] == "s" else values

    def write(self, name: str, value: np.ndarray) -> None:
        value = value.view(f"u{value.dtype.itemsize}") if value.dtype != bool else value
        if self.mask is not None:
            old = self.registers.get(name, np.zeros_like(value)).astype(value.dtype)
            value = np.where(self.mask, value, old)
        self.registers[name] = value

    @staticmethod
    def vector(operand: str) -> list[str]:
        return [name.strip() for name in operand.strip("{} ").split(",")]

    # Memory

    def address(self, operand: str) -> np.ndarray:
        base, offset = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand).groups()
        bits = 64 if base.startswith("%rd") else 32
        return self.value(base, bits).astype(np.int64) + int(offset or 0)

    def access(self, space: str, address: np.ndarray, size: int, data: np.ndarray | None = None) -> np.ndarray | None:
        """Reads, or writes `data [threads, size]`, for the active threads."""
        active = np.ones(self.threads, bool) if self.mask is None else self.mask
        index = (address[:, None] + np.arange(size))[active]
        memory, first, end = self.memory, FIRST_ADDRESS, len(self.memory)
        if space == "shared":
            memory, first, end = self.shared.data, 0, self.shared.size
        assert not (address[active] % size).any(), f"misaligned {space} access of {size} bytes"
        assert not index.size or (index.min() >= first and index.max() < end), f"{space} access out of bounds"
        if space == "shared":
            index = index + (self.thread[active] // self.width * self.shared.size)[:, None]
            if data is not None:
                return self.shared.write(index, active, data[active])
            self.shared.note(index, active, writes=False)
        if data is not None:
            memory[index] = data[active]
            return None
        out = np.zeros((self.threads, size), np.uint8)
        out[active] = memory[index]
        return out

    def load(self, parts: list[str], operands: list[str]) -> None:
        if parts[1] == "param":
            value = self.arguments[operands[1].strip("[] ")]
            bits = 64 if operands[0].startswith("%rd") else 32
            raw = struct.unpack("I", struct.pack("f", value))[0] if isinstance(value, float) else value
            self.write(operands[0], np.full(self.threads, raw & ((1 << bits) - 1), UNSIGNED[bits]))
            return
        names, width = self.vector(operands[0]), int(re.sub(r"\D", "", parts[-1])) // 8
        raw = self.access(parts[1], self.address(operands[1]), width * len(names)).view(UNSIGNED[8 * width])
        for i, name in enumerate(names):
            self.write(name, raw[:, i].astype(UNSIGNED[max(16, 8 * width)]))

    def store(self, parts: list[str], operands: list[str]) -> None:
        names, width = self.vector(operands[1]), int(re.sub(r"\D", "", parts[-1])) // 8
        columns = [self.value(name, max(16, 8 * width)).astype(UNSIGNED[8 * width]) for name in names]
        data = np.ascontiguousarray(np.stack(columns, 1)).view(np.uint8)
        self.access(parts[1], self.address(operands[0]), width * len(names), data)

    def matrix(self, parts: list[str], operands: list[str]) -> None:
        """8 x 8 matrices of 16 bits: thread 8i + r names row r of matrix i, thread t holds a pair of row t / 4."""
        loads, transposed = parts[0] == "ldmatrix", "trans" in parts
        registers, pointers = operands if loads else operands[::-1]
        pointers, lane = self.address(pointers), self.thread % 32
        row, column = lane // 4, lane % 4 * 2
        for i, name in enumerate(self.vector(registers)):
            first = self.thread - lane + 8 * i
            where = (
                [pointers[first + column + h] + row * 2 for h in (0, 1)]
                if transposed
                else [pointers[first + row] + (column + h) * 2 for h in (0, 1)]
            )
            if loads:
                low, high = (self.access("shared", w, 2).view(np.uint16)[:, 0].astype(np.uint32) for w in where)
                self.write(name, low | high << np.uint32(16))
            else:
                halves = self.value(name).view(np.uint16).reshape(-1, 2)
                for h, w in enumerate(where):
                    self.access("shared", w, 2, np.ascontiguousarray(halves[:, h : h + 1]).view(np.uint8))

    def atomic(self, parts: list[str], operands: list[str]) -> None:
        combine = {"max": max, "add": lambda a, b: a + b}.get(parts[-2])
        if combine is None or parts[-1] not in ("s32", "u32", "u64") or parts[1] not in ("global", "shared"):
            raise NotImplementedError(".".join(parts))
        kind, size = (np.int64, 8) if parts[-1] == "u64" else (np.int32, 4)
        active = np.flatnonzero(np.ones(self.threads, bool) if self.mask is None else self.mask)
        where, new, memory = self.address(operands[1]), self.value(operands[2], 8 * size).view(kind), self.memory
        if parts[1] == "shared":
            assert not active.size or (where[active].min() >= 0 and where[active].max() + size <= self.shared.size)
            where, memory = where + self.thread // self.width * self.shared.size, self.shared.data
            self.shared.note_atomics(where[active][:, None] + np.arange(size), active)
        old = np.zeros(self.threads, kind)
        for thread in active:
            cell = memory[where[thread] : where[thread] + size].view(kind)
            old[thread] = cell[0]
            cell[0] = combine(int(cell[0]), int(new[thread]))
        self.write(operands[0], old)

    # Registers

    def move(self, parts: list[str], operands: list[str]) -> None:
        target, source = operands
        if target.startswith("{"):
            bits = 64 if source.startswith("%rd") else 32
            halves = self.value(source, bits).view(UNSIGNED[bits // 2]).reshape(-1, 2)
            for i, name in enumerate(self.vector(target)):
                self.write(name, halves[:, i].copy())
        elif source.startswith("{"):
            bits = 32 if target.startswith("%rd") else 16
            halves = np.stack([self.value(name, bits) for name in self.vector(source)], 1)
            self.write(target, np.ascontiguousarray(halves).view(UNSIGNED[2 * bits])[:, 0])
        elif parts[-1] == "pred":
            constant = source in ("0", "-1")
            self.write(target, np.full(self.threads, source != "0") if constant else self.predicate(source))
        else:
            self.write(target, self.value(source, int(parts[-1][1:])))

    def compare(self, parts: list[str], operands: list[str]) -> None:
        a, b = (self.typed(o, parts[-1]) for o in operands[1:3])
        with np.errstate(invalid="ignore"):
            result = {"eq": a == b, "ne": a != b, "neu": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
            result |= {"ltu": ~(a >= b), "leu": ~(a > b), "gtu": ~(a <= b), "geu": ~(a < b)}
        self.write(operands[0], result[parts[1]])

    def select(self, parts: list[str], operands: list[str]) -> None:
        bits = int(parts[-1][1:])
        condition = self.predicate(operands[3])
        self.write(operands[0], np.where(condition, self.value(operands[1], bits), self.value(operands[2], bits)))

    def logic(self, parts: list[str], operands: list[str]) -> None:
        values = [self.predicate(o) for o in operands[1:]]
        function = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[parts[0]]
        self.write(operands[0], function(*values))

    def shuffle(self, parts: list[str], operands: list[str]) -> None:
        lane, by = self.thread % 32, self.value(operands[2]).astype(np.int64)
        source = {"bfly": lane ^ by, "up": np.where(lane >= by, lane - by, lane), "idx": by % 32}[parts[2]]
        self.write(operands[0].split("|")[0], self.value(operands[1])[self.thread - lane + source])

    def ballot(self, parts: list[str], operands: list[str]) -> None:
        bits = self.predicate(operands[1]).reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
        self.write(operands[0], np.repeat(bits.sum(1).astype(np.uint32), 32))

    def count_bits(self, parts: list[str], operands: list[str]) -> None:
        bits = np.unpackbits(self.value(operands[1]).view(np.uint8).reshape(-1, 4), axis=1)
        self.write(operands[0], bits.sum(1).astype(np.uint32))

    def reduce_warp(self, parts: list[str], operands: list[str]) -> None:
        combine = {"add": np.add, "max": np.maximum, "min": np.minimum}[parts[2]]
        values = self.typed(operands[1], parts[-1]).reshape(-1, 32)
        self.write(operands[0], np.repeat(combine.reduce(values, axis=1).astype(values.dtype), 32))

    def permute_bytes(self, parts: list[str], operands: list[str]) -> None:
        source = np.stack([self.value(o) for o in operands[1:3]], 1).view(np.uint8)
        selector = self.value(operands[3])[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 0xF
        taken = np.take_along_axis(source, (selector & 7).astype(np.int64), 1)
        signs = np.where(taken >= 128, np.uint8(0xFF), np.uint8(0))  # what a selector's upper bit asks for
        taken = np.where(selector & 8, signs, taken)
        self.write(operands[0], np.ascontiguousarray(taken).view(np.uint32)[:, 0])

    def convert(self, parts: list[str], operands: list[str]) -> None:
        target, source = parts[-2:]
        target_name, *sources = operands
        with np.errstate(invalid="ignore", over="ignore"):
            if target in FP8:  # the first source is the upper half
                kind, largest = FP8[target]
                halves = [self.single(o) for o in sources[::-1]]
                halves = [
                    np.where(np.isnan(h), 0x7F, np.clip(h, -largest, largest).astype(kind).view(np.uint8))
                    for h in halves
                ]
                result = np.stack(halves, 1).astype(np.uint8).view(np.uint16)[:, 0]
            elif target == "bf16x2":
                halves = [self.single(o).astype(BF16).view(np.uint16) for o in sources[::-1]]
                result = np.stack(halves, 1).view(np.uint32)[:, 0]
            elif source in FP8:
                halves = self.value(sources[0], 16).view(np.uint8).view(FP8[source][0]).astype(np.float16)
                result = halves.view(np.uint32)
            elif target == "bf16":
                result = self.single(sources[0]).astype(BF16)
            else:
                bits = max(16, int(target.lstrip("busf")))
                kind = {"f": "float", "s": "int"}.get(target[0], "int" if source[0] == "s" else "uint")
                result = self.typed(sources[0], source).astype(f"{kind}{bits}")
                result = result & 0xFF if source in ("u8", "b8") else result
        self.write(target_name, np.ascontiguousarray(result))

    # Arithmetic

    def arithmetic(self, parts: list[str], operands: list[str]) -> None:
        name = parts[0]
        if name == "abs" and parts[-1].endswith("f16x2"):  # NaN's bits too lose only their sign
            self.write(operands[0], self.value(operands[1]) & np.uint32(0x7FFF7FFF))
            return
        with np.errstate(all="ignore"):
            if parts[-1] in ("bf16", "bf16x2"):
                bits = 16 if parts[-1] == "bf16" else 32
                values = [self.value(o, bits).view(BF16).astype(np.float32) for o in operands[1:]]
                if "xorsign" in parts:  # the larger magnitude, under the product of the signs
                    sign = np.signbit(values[0]) ^ np.signbit(values[1])
                    values = [np.abs(value) for value in values]
                result = FLOATS[name](*values).astype(BF16)
                result = np.where(sign, -result, result).astype(BF16) if "xorsign" in parts else result
                result = np.where(np.isnan(result), np.uint16(0x7FFF), result.view(np.uint16)).view(f"uint{bits}")
            else:
                values = [self.typed(o, parts[-1]) for o in operands[1:]]
                function = np.maximum if (name, "NaN" in parts) == ("max", True) else FLOATS[name]
                result = function(*values).astype(values[0].dtype)
        self.write(operands[0], result)

    def integer(self, parts: list[str], operands: list[str]) -> None:
        name, kind = parts[0], parts[-1]
        if name == "bfe":
            value, first, length = (self.value(o).astype(np.int64) for o in operands[1:])
            result = value >> first & (1 << length) - 1
            sign = 1 << length - 1
            result = (result ^ sign) - sign if kind == "s32" else result
            self.write(operands[0], result.astype(np.uint64).astype(np.uint32))
            return
        if name in ("shl", "shr"):
            value, by = self.typed(operands[1], kind), self.value(operands[2]).astype(np.int64)
            bits = 8 * value.dtype.itemsize
            shift = np.left_shift if name == "shl" else np.right_shift
            shifted = shift(value, np.minimum(by, bits - 1).astype(value.dtype))
            self.write(operands[0], np.where((by >= bits) & (kind[0] != "s"), 0, shifted).astype(value.dtype))
            return
        values = [self.typed(o, kind) for o in operands[1:]]
        if "wide" in parts or "hi" in parts:
            double = np.int64 if kind[0] == "s" else np.uint64
            product = values[0].astype(double) * values[1].astype(double)
            if "hi" in parts:
                self.write(operands[0], (product >> double(32)).astype(np.uint64).astype(np.uint32))
            else:
                product = product.view(np.uint64)
                self.write(operands[0], product + self.value(operands[3], 64) if name == "mad" else product)
            return
        with np.errstate(over="ignore", divide="ignore"):
            self.write(operands[0], INTEGERS[name](*values).astype(values[0].dtype))
