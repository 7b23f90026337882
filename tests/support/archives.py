"""Archives of given files."""

import io
import tarfile
import zipfile
from collections.abc import Iterable, Mapping


def tar_of(
    files: Mapping[str, bytes], mode: str = "w", extra: Iterable[tarfile.TarInfo] = ()
) -> bytes:
    """A tar file of `files`, by name, and of members without content, `extra`. mode: see
    `tarfile.open`.
    """
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as opened:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
        for info in extra:
            opened.addfile(info)
    return target.getvalue()


def zip_of(files: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip file of `files`, by name."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return target.getvalue()
