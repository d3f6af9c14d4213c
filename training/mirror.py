"""A copy of a run folder in another place, such as an object store, by fsspec: `checkpoint.mirror`.

Machines whose disks vanish with them (Kubernetes, spot instances) keep a run there: an empty run
folder is filled from its mirror, and the run goes on as from its own disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path, PurePosixPath
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from common.errors import ConfigError, first_line
from common.files import replacing, sync

_CHECKPOINTS = "checkpoints/step-*"
_MANIFESTS = "checkpoints/step-*.json"
_WEIGHTS = "checkpoints/step-*.pt"
# Tells of what run the others are: sent first.
CONFIG = "config.yaml"
# Other files of every run, of which older versions may have sent some before that.
_OTHERS = ("environment.json", "decisions.json", "metrics.jsonl")
_KEPT_HERE = ("lock",)  # files that belong to this machine
_UNFINISHED = ".tmp"
# Lies in a run folder while it is filled from a mirror: until then there is no run in it.
RESTORING = f"restoring{_UNFINISHED}"


class _Version(NamedTuple):
    """Mark of a file by which its content is told from another."""

    size: int
    modified: int


class Mirror:
    """Sends what has changed in a run folder, after each checkpoint, while the training goes on.

    The recipe is sent first. A checkpoint's manifest is sent after its other files, and removed
    before them, so a transfer that is cut off leaves no checkpoint that only seems whole. What
    is there whole is not written again. What fails twice is said, and tried again with the next
    checkpoint: it never ends a run.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        say: Callable[[str], None],
        check: Callable[[], None],
    ):
        """
        Args:
            url: that fsspec knows, or a folder.
            folder: of the run.
            say: prints a line.
            check: raises OSError once the folder's path leads to another folder.

        Raises:
            ConfigError: fsspec does not know the URL, a package is missing, or mirror and run
                folder lie in each other.
        """
        self._url = url
        self._folder = folder
        self._say = say
        self._check = check
        self._system, self._root = _connect(url)
        check_place(url, folder)
        self._place = _local_place(url)
        # What is there, as far as this process has sent it.
        self._sent: Dict[str, _Version] = {}
        self._sending: Optional[threading.Thread] = None

    def recipe(self) -> Optional[str]:
        """Return the text of the recipe of the mirror's run.

        None where the mirror is empty, or its first transfer was cut off before the recipe.

        Raises:
            ConfigError: the mirror cannot be read, or has files that are no run.
        """
        with self._reading():
            names = self._remote_names()
            if CONFIG in names:
                return self._system.cat_file(self._path(CONFIG)).decode()
        if names and not _is_beginning(names):
            fault = f"{self._url} holds files that are no run ({min(names)})"
            raise ConfigError(f"checkpoint.mirror: {fault}; name a place of its own")
        return None

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to go on from.

        There is none in an empty mirror, or where the first transfer was cut off.

        Raises:
            ConfigError: the mirror cannot be read, or has several checkpoints and the manifest of
                none. To begin anew would cost a run of days.
        """
        with self._reading():
            names = self._remote_names()
        if _newest(names):
            return True
        # One that is cut off may be the first of the run, as in the run folder itself.
        steps = {_step_of(name) for name in names if _is_checkpoint(name)}
        if len(steps) > 1:
            fault = f"{self._url} has {len(steps)} checkpoints, all without their manifests"
            remedy = "restore these, or give another mirror to start from the beginning"
            raise ConfigError(f"checkpoint.mirror: {fault}; {remedy}")
        return False

    def restore(self) -> int:
        """Fill the run folder, which has no run in it, from the mirror.

        What is cut off at any moment can be repeated: until all is there, RESTORING is, too.

        Returns:
            The number of files.

        Raises:
            ConfigError: the mirror cannot be read. To begin anew would cost a run of days.
        """
        marker = self._folder / RESTORING
        with self._reading():
            names = self._remote_names()
            marker.touch()
            sync(self._folder)
            # Manifests last, as they are sent: what is cut off here is no whole checkpoint.
            for name in sorted(names, key=_turn):
                place = self._folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                with replacing(place, durable=True) as temporary:
                    self._system.get_file(self._path(name), str(temporary))
                # It is there already, and need not be sent back.
                self._sent[name] = _version(place)
            marker.unlink()
            sync(self._folder)
        return len(names)

    def check_not_ahead(self) -> None:
        """Raise ConfigError where the mirror has a later checkpoint than the run folder, which would
        be removed there.
        """
        with self._reading():
            there = _newest(self._remote_names())
        if _step_of(there) > _step_of(_newest(self._local_files())):
            fault = f"{self._url} is ahead of {self._folder} ({there})"
            remedy = "remove the folder to go on from there, or give another mirror"
            raise ConfigError(f"checkpoint.mirror: {fault}; {remedy}")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise ConfigError for whatever a store raises while it is read."""
        try:
            yield
        except Exception as error:
            remedy = "mend that, or train without it by checkpoint.mirror=null"
            raise ConfigError(
                f"checkpoint.mirror: {self._url}: {first_line(error)}; {remedy}"
            ) from None

    def send(self) -> None:
        """Begin to send what has changed; wait first until the transfer before has ended."""
        self.wait()
        # As it is now: files that go on growing are sent up to here.
        self._sending = threading.Thread(target=self._send, name="mirror", daemon=True)
        self._sending.start()

    def close(self) -> None:
        """Send what is left, and wait for it."""
        self.send()
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is being sent: then files may be removed."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None

    def _send(self) -> None:
        """Make the mirror like the run folder, or say why that fails."""
        try:
            # A regroup of an elastic run may have cut the connections (parallel/cutting.py).
            with contextlib.suppress(Exception):  # stores raise anything
                return self._send_changes()
            self._send_changes()
        except Exception as error:
            fault = f"checkpoint.mirror: {self._url}: {first_line(error)}"
            self._say(f"{fault}; it is tried again with the next checkpoint")

    def _send_changes(self) -> None:
        """Make the mirror like the run folder."""
        # What lies in the place of a lost run folder is not this run.
        self._check()
        here = self._local_files()
        # Before its first checkpoint a run may still be begun anew, with another recipe.
        newest = _newest(here)
        if not newest:
            return
        there = self._remote_names()
        self._note_whole(here, there)
        for name in sorted(here, key=_turn):
            if self._sent.get(name) != here[name]:
                self._send_file(name)
                self._sent[name] = here[name]
        # Once the new ones are there: a store that takes no more, or a machine that vanishes
        # now, must leave a whole checkpoint. Nothing else is ever removed, whatever lies there,
        # and no later checkpoint than this folder has: then it is not what the mirror is of.
        self._check()
        gone = {name for name in there if _is_checkpoint(name)} - set(here)
        older = {name for name in gone if _step_of(name) <= _step_of(newest)}
        for name in sorted(older, key=_is_manifest, reverse=True):
            self._system.rm_file(self._path(name))
            self._sent.pop(name, None)

    def _note_whole(self, here: Dict[str, _Version], there: Set[str]) -> None:
        """Note as sent the checkpoints that the mirror has whole, which need not be sent again.

        Args:
            here: files of the run folder.
            there: names of the mirror's files.
        """
        # Those of earlier processes: this one knows what it has sent itself.
        for manifest in filter(_is_any_manifest, there & here.keys()):
            if self._sent.get(manifest) == here[manifest]:
                continue
            # It was sent last, and has the SHA-256 of each file.
            sent = self._system.cat_file(self._path(manifest))
            if sent != (self._folder / manifest).read_bytes():
                continue
            checkpoint = _without_suffix(manifest)
            files = {name for name in here if _without_suffix(name) == checkpoint}
            # A checkpoint that someone has cut short there is mended.
            if files <= there and all(self._size_there(name) == here[name].size for name in files):
                self._sent.update((name, here[name]) for name in files)

    def _size_there(self, name: str) -> int:
        """Return the bytes of a file of the mirror."""
        return self._system.info(self._path(name))["size"]

    def _send_file(self, name: str) -> None:
        """Send one file."""
        place = self._folder / name
        remote = self._path(name)
        self._system.makedirs(str(PurePosixPath(remote).parent), exist_ok=True)
        # An object is there once it is whole; a file shows from its first byte on, and the one
        # before it would be lost.
        is_disk = self._is_disk()
        target = f"{remote}{_UNFINISHED}" if is_disk else remote
        if PurePosixPath(name).match(_WEIGHTS):
            self._system.put_file(str(place), target)
        else:
            # Metrics grow meanwhile; stores want to know a file's length beforehand.
            self._system.pipe_file(target, place.read_bytes())
        if is_disk:
            self._system.mv(target, remote)

    def _local_files(self) -> Dict[str, _Version]:
        """Return the versions of the files of the run folder by their names relative to it."""
        found = {}
        # A link may lead to where the mirror is: that is not copied into itself.
        for relative in _names_below(self._folder, left_out=self._place):
            if relative not in _KEPT_HERE and not relative.endswith(_UNFINISHED):
                found[relative] = _version(self._folder / relative)
        return found

    def _remote_names(self) -> Set[str]:
        """Return the names of the mirror's files, relative to it, without those half sent."""
        # fsspec may remember a listing of before this process, or another one, changed it.
        self._system.invalidate_cache()
        if not self._system.exists(self._root):
            return set()
        if self._is_disk():
            # fsspec takes a link to a folder for a file: the checkpoints behind it would be missed.
            names = set(_names_below(Path(self._root)))
        else:
            root = self._root.rstrip("/") + "/"
            paths: List[str] = self._system.find(self._root)
            names = {path[len(root) :] for path in paths if path.startswith(root)}
        for name in names:
            # A store takes any text as a name; as a path it must not lead out of the run folder.
            if ".." in PurePosixPath(name).parts:
                raise ValueError(f"a file is named {name!r}")
        return {name for name in names if not name.endswith(_UNFINISHED)}

    def _is_disk(self) -> bool:
        """Return whether the mirror is a folder of this machine."""
        return getattr(self._system, "local_file", False)

    def _path(self, name: str) -> str:
        """Return the path of a file in the mirror."""
        return f"{self._root.rstrip('/')}/{name}"


def _connect(url: str) -> Tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it. Raises ConfigError."""
    try:
        # Few runs need it.
        import fsspec

        return fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise _refusal(url, error) from None


def check_package(url: str) -> None:
    """Raise ConfigError unless fsspec knows a `url` and has the package for it. Nothing is connected."""
    try:
        # Few runs need it.
        import fsspec
        from fsspec.core import split_protocol

        # Caches come before the store: simplecache::s3://bucket/run.
        for scheme in (split_protocol(url)[0] or "file").split("::"):
            fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise _refusal(url, error) from None


def check_place(url: str, folder: Path) -> None:
    """Refuse a mirror on this machine that lies in the run folder, or has that in it: each
    checkpoint would copy the copies before it.

    Nothing is connected.

    Args:
        url: of the mirror, whose package is there.
        folder: of the run; neither need exist.

    Raises:
        ConfigError: one lies in the other, or they are the same.
    """
    there = _local_place(url)
    if there is None:
        return
    here = Path(os.path.realpath(folder))
    if here == there:
        fault = "is the run folder itself"
    elif here in there.parents:
        fault = f"lies in the run folder {folder}, and would be copied into itself"
    elif there in here.parents:
        fault = f"has the run folder {folder} in it, and would be copied into that"
    else:
        return
    raise ConfigError(f"checkpoint.mirror: {url} {fault}; name a place of its own")


def _local_place(url: str) -> Optional[Path]:
    """Return the real path of a mirror that is a folder on this machine, None for other stores."""
    # Few runs need them.
    import fsspec
    from fsspec.core import split_protocol, strip_protocol
    from fsspec.implementations.local import LocalFileSystem

    # Caches come before the store: simplecache::file:///run.
    store = url.rpartition("::")[2]
    system = fsspec.get_filesystem_class(split_protocol(store)[0] or "file")
    if not issubclass(system, LocalFileSystem):
        return None
    return Path(os.path.realpath(strip_protocol(store)))


def _refusal(url: str, error: Exception) -> ConfigError:
    """Return the error for a URL whose package is missing, or whose scheme is unknown."""
    fault = first_line(error)
    remedy = "pip install what it names, or correct the URL"
    return ConfigError(f"checkpoint.mirror: {url}: {fault}; {remedy}")


def _names_below(folder: Path, left_out: Optional[Path] = None) -> Iterator[str]:
    """Yield the names of the files in a folder, at any depth, relative to it.

    Args:
        folder: with links to folders, too, as that of the checkpoints to a larger disk.
        left_out: real path of a folder that is not entered.
    """
    for place, folders, names in os.walk(folder, followlinks=True):
        entered = []
        for name in folders:
            path = Path(place, name)
            if Path(os.path.realpath(path)) != left_out and not _leads_back(path, folder):
                entered.append(name)
        folders[:] = entered
        for name in names:
            path = Path(place, name)
            if path.is_file():
                yield path.relative_to(folder).as_posix()


def _leads_back(path: Path, folder: Path) -> bool:
    """Return whether a folder within another is a link to one around it, or around the other.

    Such a link leads in a circle, or to what is no part of the run.
    """
    if not path.is_symlink():
        return False
    real = Path(os.path.realpath(path))
    for outer in path.relative_to(folder).parents:
        around = Path(os.path.realpath(folder / outer))
        if real == around or real in around.parents:
            return True
    return False


def _is_checkpoint(name: str) -> bool:
    """Return whether a file belongs to a checkpoint of the run itself, not of a branch."""
    path = PurePosixPath(name)
    # `match` looks at the end of a path alone: branches/x/checkpoints/step-... has the same.
    return len(path.parts) == 2 and path.match(_CHECKPOINTS)


def _step_of(name: str) -> str:
    """Return the `step-00001234` in the name of a checkpoint's file.

    Names have equally many digits, up to a step that no run reaches, so they compare as steps do.
    """
    return PurePosixPath(name).name.partition(".")[0]


def _without_suffix(name: str) -> str:
    """Return the `checkpoints/step-00001234` that all files of one checkpoint begin with."""
    return str(PurePosixPath(name).with_name(_step_of(name)))


def _is_manifest(name: str) -> bool:
    """Return whether a file is the manifest of a checkpoint of the run itself."""
    return _is_checkpoint(name) and _is_any_manifest(name)


def _is_any_manifest(name: str) -> bool:
    """Return whether a file is a checkpoint's manifest, of the run or of one of its branches."""
    return PurePosixPath(name).match(_MANIFESTS)


def _turn(name: str) -> int:
    """Return in which turn a file is sent or fetched: the recipe first, manifests last."""
    if name == CONFIG:
        return 0
    return 2 if _is_any_manifest(name) else 1


def _is_beginning(names: Set[str]) -> bool:
    """Return whether files without a recipe are what a run's first transfer leaves if cut off."""
    if names.isdisjoint(_OTHERS):
        return False
    # Manifests are sent last: the transfer had come to an end.
    if any(map(_is_any_manifest, names)):
        return False
    return all(name in _OTHERS or _is_checkpoint(name) for name in names)


def _newest(names: Iterable[str]) -> str:
    """Return the manifest of the newest checkpoint among the names of files, "" for none."""
    return max(filter(_is_manifest, names), key=_step_of, default="")


def _version(path: Path) -> _Version:
    """Return the version of a local file."""
    status = path.stat()
    return _Version(status.st_size, status.st_mtime_ns)
