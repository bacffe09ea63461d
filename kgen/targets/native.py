"""Calls of kernels from C: the templates of the C files, the names of launch arguments, and the
tables of tiles.

A family builds a `Native` from a spec. `kgen build` adds machine code, and resolves the tables for
its chips.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.diagnostics import Diagnostic, KgenError
from kgen.spec.common import ParamSpec
from kgen.spec.load import Loaded
from kgen.targets.code import CUDA, Code, Name, rewritten, spell, text
from kgen.targets.template import Template

DTYPES = {
    "bf16": ("KGEN_BF16", 2),
    "fp16": ("KGEN_FP16", 2),
    "fp32": ("KGEN_FP32", 4),
    "fp64": ("KGEN_FP64", 8),
    "int32": ("KGEN_I32", 4),
    "int64": ("KGEN_I64", 8),
    "uint8": ("KGEN_U8", 1),
    "bool": ("KGEN_I1", 1),
    "fp8_e4m3": ("KGEN_FP8E4NV", 1),
}
"""By dtype of a spec: its name in the C runtime, and the bytes of an element."""
ATEN = {
    "bf16": "at::kBFloat16",
    "fp16": "at::kHalf",
    "fp32": "at::kFloat",
    "fp64": "at::kDouble",
    "int32": "at::kInt",
    "int64": "at::kLong",
    "uint8": "at::kByte",
    "bool": "at::kBool",
    "fp8_e4m3": "at::kFloat8_e4m3fn",
}
"""The name of a spec's dtype in PyTorch's C++."""
WORDS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8_e4m3": "float8_e4m3",
}
MOST_DIMS = 5
"""Maximum number of dimensions of `kgen_tensor`."""
_KEYWORDS = """
alignas alignof and_eq asm atomic_cancel auto bitand bitor bool case catch char char8_t char16_t
char32_t compl concept const consteval constexpr constinit const_cast co_await co_return co_yield
decltype default delete do double dynamic_cast enum explicit export extern false float friend goto
inline int long mutable namespace new noexcept not_eq nullptr operator or_eq private protected
public register reinterpret_cast requires restrict short signed sizeof static static_assert
static_cast struct switch template this thread_local throw true typedef typeid typename union
unsigned using virtual void volatile wchar_t xor xor_eq linux unix errno stdin stdout stderr
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""Keywords of C and C++ that Python does not have, and macros of their headers."""
_HEADERS = """
aio aliases alloca ar argp argz assert byteswap complex cpio crypt ctype dirent dlfcn elf endian
envz err errno error execinfo fcntl features fenv float fmtmsg fnmatch fstab fts ftw gconv getopt
glob grp gshadow iconv ifaddrs inttypes iso646 kgen kgen_calls kgen_driver kgen_example kgen_runtime
langinfo lastlog libgen libintl limits link locale malloc math mcheck memory mntent monetary mqueue
netdb nl_types nss obstack paths poll printf proc_service pthread pty pwd re_comp regex regexp
resolv sched search semaphore setjmp sgtty shadow signal spawn stab stdalign stdarg stdatomic
stdbool stddef stdint stdio stdio_ext stdlib stdnoreturn string strings syscall sysexits syslog tar
termio termios tgmath thread_db threads time ttyent uchar ucontext ulimit unistd utime utmp utmpx
values wait wchar wctype wordexp
"""
HEADERS = frozenset(_HEADERS.split())
"""Names that an emitted header cannot have: headers of the system and of a package."""


@dataclass(frozen=True)
class Tiles:
    """A table of tiles of a kernel, with rows `(chips, fields)`.

    A chip takes rows with its name or no name.
    """

    name: str
    rows: Sequence[tuple[Collection[int], Mapping[str, int | bool]]]
    kernel: str | None = None
    """The kernel for which tiles are constants. Tiles that it was not compiled for are left out."""
    struct: str = "tile"
    """The C struct of a row: the chip, and the fields."""


@dataclass(frozen=True)
class Table:
    """A table of tiles, resolved for the chips of a package."""

    name: str
    struct: str
    rows: tuple[tuple[int, ...], ...]
    """The chip and the fields of each row."""
    end: tuple[int, ...]
    """The terminator after the last row: zeros."""


@dataclass(frozen=True)
class Tensor:
    """A tensor among the arguments of a call."""

    name: str
    """The name in kernels."""
    label: str
    """The name in messages."""
    member: str
    """The name in the struct of arguments."""
    extents: tuple[Code, ...]
    """The size of each dimension. Its names are numbers of a call."""
    element: str
    """The dtype in specs."""
    words: str
    contiguous: bool = False
    widest: str = "INT32_MAX"
    """The largest stride between elements of a row that kernels accept, as a C expression."""

    @property
    def sizes(self) -> tuple[str, ...]:
        """The size of each dimension, in the functions of the program."""
        return tuple(in_struct(size, "p->") for size in self.extents)

    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def dtype(self) -> str:
        """The dtype in the C runtime."""
        return DTYPES[self.element][0]

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.element][1]


@dataclass(frozen=True)
class Parameter:
    """A run-time parameter among the arguments of a call."""

    name: str
    label: str
    member: str
    real: bool
    words: str

    @property
    def type(self) -> str:
        return "double" if self.real else "int64_t"

    @property
    def value(self) -> str:
        """The launch argument."""
        return f"{'kgen_real' if self.real else 'kgen_integer'}(a->{self.member})"


@dataclass(frozen=True)
class Check:
    """A condition for which a call fails, and its message with the values in it."""

    wrong: str
    message: str
    given: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class File(Template):
    """The base of all C files of a spec."""

    name: str
    """The prefix of functions and files."""
    license: str


@dataclass(frozen=True, kw_only=True)
class Header(File):
    """The base of headers."""

    summary: str
    passes: tuple[str, ...]

    @property
    def guard(self) -> str:
        return f"{self.name.upper()}_H"


@dataclass(frozen=True, kw_only=True)
class Program(File):
    """The base of the files that define the functions. `kgen build` sets the tables."""

    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Operators(File):
    """The base of the files that define operators of PyTorch in C++. `kgen build` sets the code."""

    function: str
    """The name of the spec's function, which is also the name of an operator."""
    places: tuple[tuple[str, str], ...]
    """Globals of the emitted file that hold operators, with the names of these operators."""
    code: str = ""
    """The name of the library of operators in the emitted file."""


@dataclass(frozen=True)
class Native:
    """The C files of a spec, and the names of all launch arguments."""

    header: Template
    program: Program
    example: Template
    names: Sequence[str]
    """Launch arguments. The strides of a tensor are adjacent."""
    tiles: Sequence[Tiles]
    hint: str = "name the sizes of the call to `kgen build` (--gqa, --batch, --width, --heads)"
    """The remedy in the message if no machine code fits a call."""
    operators: Operators | None = None
    """The operators in C++. None if only Python has them."""
    call: Template | None = None
    """A shorter Python function that calls these operators. None if the emitted function does."""
    why_in_python: str = "this kernel family has no operators in C++"
    """The reason why only Python has them."""
    kernels: Collection[str] | None = None
    """The kernels that the launcher launches. None: all kernels of the package."""


def in_struct(size: Code, prefix: str) -> str:
    """Print a size in C. Its names are members of the struct that `prefix` reaches."""

    def member_of(part: Code) -> Code | None:
        return Name(f"{prefix}{part.name}") if isinstance(part, Name) else None

    return spell(rewritten(size, member_of), CUDA)


def fixed(size: int) -> Code:
    """Return a size that is the same in every call."""
    return text(str(size))


def with_tables(program: Program, tables: Iterable[Table]) -> Program:
    """Return the file with the tables of a package."""
    return replace(program, tables=tuple(tables))


def member(name: str, taken: Collection[str]) -> str:
    """Return the name of an argument in a C struct: its own name, or with underscores if it would
    clash.

    Keywords, names in capitals (macros), names with `_t` (types), and `taken` names clash.
    """
    if name in KEYWORDS or name.isupper() or name.endswith("_t"):
        name += "_"
    while name in taken:
        name += "_"
    return name


def prefix_of(loaded: Loaded) -> str:
    """Return the prefix of functions and files of a spec.

    Raise `KgenError` if the C library has a header with this name.
    """
    name = loaded.folder.replace("/", "_")
    if name in HEADERS:
        refuse(loaded, f"`{name}.h` is a header of C", "give the spec another name")
    return name


def refuse(loaded: Loaded, why: str, hint: str) -> None:
    """Raise `KgenError`: the spec cannot be called from C, for the reason `why`."""
    message = f"`{loaded.spec.name}` cannot be called from C: {why}"
    raise KgenError(Diagnostic("no-c", message, file=str(loaded.path), hint=hint))


def parameters(
    params: Mapping[str, ParamSpec],
    words: str,
    taken: Collection[str],
    called: Mapping[str, str] = {},
) -> tuple[Parameter, ...]:
    """Return the run-time parameters.

    `words` describe real ones; `called` maps names to those of users.
    """
    found = []
    for name, param in params.items():
        if param.runtime:
            label, real = called.get(name, name), param.type == "float"
            own = words if real else "an integer"
            found.append(Parameter(name, label, member(label, taken), real, own))
    return tuple(found)


def unique(names: Iterable[str]) -> list[str]:
    """Remove duplicates, and keep the order."""
    return list(dict.fromkeys(names))
