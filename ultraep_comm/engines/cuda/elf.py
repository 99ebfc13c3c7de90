"""Reads a symbol's bytes from an ELF file, as a cubin is one."""

from __future__ import annotations

import struct

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
SYMBOL_TABLE = 2  # SHT_SYMTAB
MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian


def read_symbol(data: bytes, name: str) -> bytes | None:
    """Return the bytes of a symbol of a relocatable or device ELF file; None: it has none.

    Raises:
        ValueError: the file is not such a file, or is cut off.
    """
    if not data.startswith(MAGIC):
        raise ValueError("it is not a 64-bit little-endian ELF file")
    try:
        header = HEADER.unpack_from(data)
        table, count = header[6], header[12]
        sections = [SECTION.unpack_from(data, table + i * SECTION.size) for i in range(count)]
        for _, kind, _, _, offset, size, link, *_ in sections:
            if kind != SYMBOL_TABLE:
                continue
            names = sections[link][4]
            for at in range(offset, offset + size, SYMBOL.size):
                name_at, _, _, section, value, length = SYMBOL.unpack_from(data, at)
                begin = names + name_at
                if data[begin : data.find(b"\0", begin)] != name.encode():
                    continue
                found = sections[section][4] + value
                if found + length > len(data):
                    raise ValueError(f"it ends before the {length} bytes of {name}")
                return data[found : found + length]
    except (struct.error, IndexError):
        raise ValueError("it is cut off, or its sections are wrong") from None
    return None
