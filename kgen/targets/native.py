"""What calls kernels from C: which templates write it, what kernels call their arguments, which tiles there are.

A family makes it of a spec. `kgen build` adds the machine code, and resolves the tables of tiles for its chips.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.diagnostics import Diagnostic, KgenError
from kgen.spec.common import ParamSpec
from kgen.spec.load import Loaded
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
"""What kernels and the runtime in C call a dtype of specs, and bytes of an element."""
WORDS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8_e4m3": "float8_e4m3",
}
MOST_DIMS = 5
"""Dimensions of `kgen_tensor`."""
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
"""Words of C and C++ that are none of Python, and macros of their headers."""
_HEADERS = """
aio aliases alloca ar argp argz assert byteswap complex cpio crypt ctype dirent dlfcn elf endian envz err errno error
execinfo fcntl features fenv float fmtmsg fnmatch fstab fts ftw gconv getopt glob grp gshadow iconv ifaddrs inttypes
iso646 kgen kgen_calls kgen_driver kgen_example kgen_runtime langinfo lastlog libgen libintl limits link locale malloc
math mcheck memory mntent monetary mqueue netdb nl_types nss obstack paths poll printf proc_service pthread pty pwd
re_comp regex regexp resolv sched search semaphore setjmp sgtty shadow signal spawn stab stdalign stdarg stdatomic
stdbool stddef stdint stdio stdio_ext stdlib stdnoreturn string strings syscall sysexits syslog tar termio termios
tgmath thread_db threads time ttyent uchar ucontext ulimit unistd utime utmp utmpx values wait wchar wctype wordexp
"""
HEADERS = frozenset(_HEADERS.split())
"""What a header beside the program's own, the system's and those of a package cannot be called."""


@dataclass(frozen=True)
class Tiles:
    """A table of tiles of a kernel: rows `(chips, fields)`, of which a chip takes those that name it or none."""

    name: str
    rows: Sequence[tuple[Collection[int], Mapping[str, int | bool]]]
    kernel: str | None = None
    """Where tiles are constants of a kernel: those that it was not compiled with are left out."""
    struct: str = "tile"
    """What a row is in C: the chip, and the fields."""


@dataclass(frozen=True)
class Table:
    """A table of tiles, resolved for the chips of a package."""

    name: str
    struct: str
    rows: tuple[tuple[int, ...], ...]
    """The chip and the fields of each row."""
    end: tuple[int, ...]
    """The row behind the last one: zeros."""


@dataclass(frozen=True)
class Tensor:
    """A tensor among the arguments of a call."""

    name: str
    """Its name in kernels."""
    label: str
    """Its name in messages."""
    member: str
    """Its name in the struct of arguments."""
    sizes: tuple[str, ...]
    """Expressions of C."""
    element: str
    """The dtype of an element in specs."""
    words: str
    contiguous: bool = False
    widest: str = "INT32_MAX"
    """The largest stride between elements of a row that kernels take."""

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def dtype(self) -> str:
        """The dtype in the runtime of C."""
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
        """The argument of a launch."""
        return f"{'kgen_real' if self.real else 'kgen_integer'}(a->{self.member})"


@dataclass(frozen=True)
class Check:
    """A condition on which a call fails, and its message with the numbers in it."""

    wrong: str
    message: str
    given: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class File(Template):
    """The base of all files in C of a spec."""

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
    """The base of the files that have the functions. `kgen build` sets the tables."""

    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Native:
    """How a spec is called from C: the files of a family, and the names of all arguments of kernels."""

    header: Template
    program: Program
    example: Template
    names: Sequence[str]
    """Strides of a tensor are one behind the other."""
    tiles: Sequence[Tiles]
    hint: str = "name the sizes of the call to `kgen build` (--gqa, --batch, --width, --heads)"
    """What to do where no machine code fits a call."""


def with_tables(program: Program, tables: Iterable[Table]) -> Program:
    """The file with the tables of a package."""
    return replace(program, tables=tuple(tables))


def member(name: str, taken: Collection[str]) -> str:
    """What a struct calls an argument of users': its own name, or one with an underscore. Names in capitals are macros'
    by custom, those with `_t` types'."""
    if name in KEYWORDS or name.isupper() or name.endswith("_t"):
        name += "_"
    while name in taken:
        name += "_"
    return name


def prefix_of(loaded: Loaded) -> str:
    """What functions and files of a spec begin with. Raises `KgenError` where a header could not be called so."""
    name = loaded.folder.replace("/", "_")
    if name in HEADERS:
        refuse(loaded, f"`{name}.h` is a header of C", "give the spec another name")
    return name


def refuse(loaded: Loaded, why: str, hint: str) -> None:
    """That a spec has no calls from C. Raises `KgenError`."""
    message = f"`{loaded.spec.name}` cannot be called from C: {why}"
    raise KgenError(Diagnostic("no-c", message, file=str(loaded.path), hint=hint))


def parameters(
    params: Mapping[str, ParamSpec], words: str, taken: Collection[str], called: Mapping[str, str] = {}
) -> tuple[Parameter, ...]:
    """The run-time parameters; `words` say where a real one occurs, `called` how users call one."""
    found = []
    for name, param in params.items():
        if param.runtime:
            label, real = called.get(name, name), param.type == "float"
            own = words if real else "an integer"
            found.append(Parameter(name, label, member(label, taken), real, own))
    return tuple(found)


def unique(names: Iterable[str]) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(names))
