"""Small tasks to begin with: rows, a grader, golden cases and a job file for each kind (`regraft init`)."""

from pathlib import Path

KINDS = ("classify", "extract", "math", "judge")


def write(kind: str, folder: Path) -> list[Path]:
    """Write the files of a kind into a folder, which is made if there is none.

    Raises:
        FileExistsError: the folder has one of the files. Nothing was written.
    """
    sources = sorted(path for path in (Path(__file__).parent / kind).iterdir() if path.is_file())
    paths = [folder / source.name for source in sources]
    for path in paths:
        if path.exists():
            raise FileExistsError(f"{path} already exists: choose another folder with --to.")
    folder.mkdir(parents=True, exist_ok=True)
    for source, path in zip(sources, paths, strict=True):
        path.write_bytes(source.read_bytes())
    return paths
