"""Errors of files, as sentences with a remedy in place of `[Errno 2] No such file or directory: '/a'`.

The client links to this file, so that its commands write the same sentences.
"""

import errno


def file_problem(error: Exception) -> str:
    """Return what is wrong with the file or the folder of an error, which it names, and what to do.

    Errors of no file keep their own text.
    """
    if not isinstance(error, OSError):
        return str(error)
    # A move has two paths. These errors are of the second.
    is_of_target = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR)
    path = (error.filename2 if is_of_target else None) or error.filename
    if path is None:
        return error.strerror or str(error)
    match error.errno:
        case errno.ENOENT:
            return f"{path} does not exist; check the path"
        case errno.EACCES | errno.EPERM:
            return (
                f"this user may not use or create {path}; change the owner or the mode of it or of its folder"
            )
        case errno.EEXIST | errno.ENOTEMPTY:
            return f"{path} exists already, and cannot be used; name another one"
        case errno.ENOTDIR:
            return f"a part of the path {path} is a file and no folder; check the path"
        case errno.EISDIR:
            return f"{path} is a folder; name a file"
        case errno.ENOSPC | errno.EDQUOT:
            return f"there is no space left for {path}; free some, or name another disk"
        case errno.EROFS:
            return f"{path} is on a filesystem that is mounted read-only; name another one"
    return f"{path}: {error.strerror}"
