"""liboctet.so keeps what programs compiled with octet.h 0.1.0 rely on.

    abi.py COMPILER NM LIBRARY ROOT

The library exports every function that tests/abi/octet_0.1.0.h declares. Functions take and return the same types as
there, fields lie where they lay, enumerators have their numbers, and new fields lie behind all of 0.1.0's, as the
compiler sees both headers. (abidiff cannot be asked: told to allow fields at the end, it allows a field that grows.)
"""

import pathlib
import re
import subprocess
import sys
import tempfile

OLD, NEW = "tests/abi/octet_0.1.0.h", ["include/octet/octet.h", "include/octet/octet_study.h"]
COUNTS = 11, 6, 79, 68  # functions, structs, fields and enumerators of 0.1.0: what the expressions below have to find
# From a name of 0.1.0, "OCTET_X" or "octet_struct.field", to today's: a new name for the same thing.
RENAMED = {
    "octet_attention.remedy": "octet_attention.bias_correction",
    "OCTET_REMEDY_F16_INSIDE": "OCTET_BIAS_CORRECTION_F16",
    "OCTET_REMEDY_NONE": "OCTET_BIAS_CORRECTION_NONE",
    "OCTET_REMEDY_BETA": "OCTET_BIAS_CORRECTION_BETA",
    "OCTET_REMEDY_EXACT_DELTA": "OCTET_BIAS_CORRECTION_EXACT_DELTA",
    "OCTET_REMEDY_PROJECT": "OCTET_BIAS_CORRECTION_GPROJ",
}


class Header:
    """What one or several headers declare, and the numbers that a C compiler gives it."""

    def __init__(self, root, paths, compiler):
        self.paths = [pathlib.Path(root, path).resolve() for path in paths]
        text = re.sub(r"//.*", "", "\n".join(path.read_text() for path in self.paths))
        functions = re.findall(r"^OCTET_API ([\w* ]+?)\b(octet_\w+)\(([^)]*)\);", text, re.MULTILINE)
        self.functions = {name: [result.strip(), *map(type_of, given.split(","))] for result, name, given in functions}
        structs = re.findall(r"^typedef struct (\w+) \{([^}]*)\}", text, re.MULTILINE)
        self.fields = [f"{struct}.{field}" for struct, body in structs for field in fields_of(body)]
        self.structs = [struct for struct, _ in structs]
        self.enumerators = re.findall(r"\b(OCTET_\w+) = ", " ".join(re.findall(r"enum[^{;]*\{([^}]*)\}", text)))
        self.numbers = self.measured(compiler, root)

    def measured(self, compiler, root):
        """From enumerators to their values, structs to their sizes, fields to offset and size."""
        expressions = {name: [name] for name in self.enumerators}
        expressions |= {name: [f"sizeof({name})"] for name in self.structs}
        for name in self.fields:
            struct, field = name.split(".")
            expressions[name] = [f"offsetof({struct}, {field})", f"sizeof((({struct}*)0)->{field})"]
        lines = [f'printf("%lld\\n", (long long)({x}));' for each in expressions.values() for x in each]
        includes = "".join(f'#include "{path}"\n' for path in self.paths)
        with tempfile.TemporaryDirectory() as scratch:
            source, program = pathlib.Path(scratch, "print.c"), pathlib.Path(scratch, "print")
            source.write_text(f"{includes}#include <stdio.h>\nint main(void) {{\n" + "\n".join(lines) + "\n}\n")
            subprocess.run([compiler, "-std=c11", f"-I{root}/include", source, "-o", program], check=True)
            printed = iter(subprocess.run([program], capture_output=True, text=True, check=True).stdout.split())
        return {name: [int(next(printed)) for _ in each] for name, each in expressions.items()}


def type_of(parameter):
    """A parameter without its name."""
    words = " ".join(parameter.split())
    return words if words == "void" else re.sub(r"\w+$", "", words).strip()


def fields_of(body):
    """The names that the body of a struct declares."""
    for declaration in body.split(";")[:-1]:
        yield from (re.search(r"(\w+)(?:\[\d+\])?$", name.strip()).group(1) for name in declaration.split(","))


def differences(old, new):
    for name, types in old.functions.items():
        if new.functions.get(name) != types:
            yield f"{name}: {types} of 0.1.0 are now {new.functions.get(name)}"
    for name, numbers in old.numbers.items():
        now = new.numbers.get(RENAMED.get(name, name))
        if name in old.structs:
            if not now or now < numbers:
                yield f"{name}: {numbers[0]} bytes of 0.1.0 are now {now}"
        elif now != numbers:
            yield f"{name}: {'offset and size' if '.' in name else 'value'} {numbers} of 0.1.0 are now {now}"
    for name in new.fields:
        struct = name.split(".")[0]
        known = name in old.numbers or name in RENAMED.values() or struct not in old.structs
        if not known and new.numbers[name][0] < old.numbers[struct][0]:
            yield f"{name}: lies at {new.numbers[name][0]}, within the {old.numbers[struct][0]} bytes of 0.1.0"


def main():
    compiler, nm, library, root = sys.argv[1:]
    old, new = Header(root, [OLD], compiler), Header(root, NEW, compiler)
    symbols = subprocess.run([nm, "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in symbols.splitlines()}
    wrong = [f"{name}: not exported by {library}" for name in old.functions if name not in exported]
    wrong += differences(old, new)
    # The counts are those of 0.1.0: a parser that reads less of the header would compare less.
    counts = len(old.functions), len(old.structs), len(old.fields), len(old.enumerators)
    if counts != COUNTS:
        wrong.append(f"{OLD}: found {counts} functions, structs, fields, enumerators, expected {COUNTS}")
    print(
        "\n".join(wrong) or "{} functions, {} structs, {} fields and {} enumerators are those of 0.1.0".format(*counts)
    )
    sys.exit(bool(wrong))


main()
