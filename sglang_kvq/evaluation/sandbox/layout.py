"""Lists the files that Python needs to start. Run as a script with -I -S by the interpreter in question.

It imports only the standard library and prints one JSON object:

    interpreter: its path
    binds: [source, target] of each file or folder that Python reads: itself, its standard library, shared libraries
    covered: folders within ``binds`` that are not the standard library (site-packages), to be covered by empty ones
"""

import contextlib
import ctypes
import glob
import json
import os
import sys

#: Libraries that are opened by name instead of linked; a thread needs libgcc_s when it ends.
OPENED_BY_NAME = ("libgcc_s.so.1",)
#: Extension modules that programs do not need and that load a desktop's libraries.
LEFT_OUT = ("_tkinter", "_test", "xx")


def shared_objects() -> "list[str]":
    """Returns paths of all shared objects in this process, spelled as the loader will search for them again."""

    class Info(ctypes.Structure):
        _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]  # the rest is not read

    found: list[str] = []

    def note(info: "ctypes._Pointer[Info]", size: int, data: object) -> int:
        found.append(os.fsdecode(info.contents.name or b""))
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(callback(note), None)
    return [name for name in found if name.startswith("/")]  # excludes the program itself and the kernel's vDSO


def main() -> None:
    library = [entry for entry in sys.path if os.path.exists(entry)]
    for folder in library:
        for extension in glob.glob(os.path.join(glob.escape(folder), "*.so")):
            if not os.path.basename(extension).startswith(LEFT_OUT):
                with contextlib.suppress(OSError):  # it does not load outside the sandbox either
                    ctypes.CDLL(extension)
    for name in OPENED_BY_NAME:
        with contextlib.suppress(OSError):  # musl has none
            ctypes.CDLL(name)
    # The loader's cache lists libraries outside its standard folders.
    single = [sys.executable, *shared_objects(), *filter(os.path.exists, ["/etc/ld.so.cache"])]
    binds: list[tuple[str, str]] = []
    # The root has no symbolic links, so paths are bound as they are spelled. A folder comes before its content.
    for target in sorted({os.path.normpath(path): path for path in library + single}.items()):
        if not any(target[0].startswith(other + "/") for _, other in binds):
            binds.append((os.path.realpath(target[1]), target[0]))
    folders = [target for source, target in binds if os.path.isdir(source)]
    covered = [os.path.join(folder, name) for folder in folders for name in ("site-packages", "dist-packages")]
    layout = {"interpreter": sys.executable, "binds": binds, "covered": list(filter(os.path.isdir, covered))}
    json.dump(layout, sys.stdout)


if __name__ == "__main__":
    main()
